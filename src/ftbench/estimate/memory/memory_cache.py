"""The memory of many specs on many GPUs: each is worked out once, since GPUs differ in how much they have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ftbench.core.hardware import MODERN, Gpu, capability_of, cublas_workspace
from ftbench.estimate.memory.capacity import RESERVE, capacity
from ftbench.estimate.memory.estimate import MemoryEstimate, estimate_memory, largest_within, verdict_of
from ftbench.spec.experiment import Experiment, resolve


class MemoryCache:
    """`options` are those of `estimate_memory`: the model's config.json."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._known: dict[Any, dict[int, MemoryEstimate]] = {}

    def estimate(self, spec: Experiment, gpu: Gpu | float) -> MemoryEstimate:
        """Return what `estimate_memory` says."""
        return self._of(self._curve(spec, gpu), spec, gpu, spec.train.batch_size)

    def _curve(self, spec: Experiment, gpu: Gpu | float) -> dict[int, MemoryEstimate]:
        """Return what is known of a spec by its batch size."""
        capability = capability_of(gpu)
        train = (spec.train.optimizer, spec.train.precision, spec.train.gradient_accumulation_steps > 1)
        launch = (spec.launch.gpus, spec.launch.strategy, spec.launch.offload)
        kind = (cublas_workspace(capability or MODERN), capability is not None and capability >= MODERN)
        return self._known.setdefault(
            (kind, spec.model, spec.dataset, spec.method, spec.optimizations, train, launch), {}
        )

    def _of(self, curve: dict[int, MemoryEstimate], spec: Experiment, gpu: Gpu | float, size: int) -> MemoryEstimate:
        if size not in curve:
            train = spec.train.model_copy(update={"batch_size": size})
            resolved = resolve(spec.model_copy(update={"train": train}), capability_of(gpu))
            curve[size] = estimate_memory(resolved, gpu, **self._options)
        has, verdict = capacity(gpu), verdict_of(curve[size].device, capacity(gpu))
        return replace(curve[size], total=has.total, usable=has.usable, margin=has.margin, verdict=verdict)

    def largest_batch(self, spec: Experiment, gpu: Gpu | float) -> int | None:
        """Return what `largest_batch` finds."""
        has, curve = capacity(gpu), self._curve(spec, gpu)
        known = {size: estimate.device.high for size, estimate in curve.items()}
        room = has.usable - has.margin + RESERVE
        return largest_within(spec, lambda size: self._of(curve, spec, gpu, size).device.high, room, known)

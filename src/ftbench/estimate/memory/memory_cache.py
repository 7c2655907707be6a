"""The memory of many specs on many GPUs: each is worked out once, since GPUs differ in how much they have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ftbench.core.hardware import Gpu, capability_of, cublas_workspace
from ftbench.estimate.memory.capacity import RESERVE, capacity
from ftbench.estimate.memory.estimate import MODERN, MOST_BATCH, MemoryEstimate, estimate_memory, verdict_of
from ftbench.spec.experiment import Experiment, resolve


class MemoryCache:
    """`config` is the model's config.json where facts do not know it."""

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        self._config = config
        self._known: dict[Any, dict[int, MemoryEstimate]] = {}

    def estimate(self, spec: Experiment, gpu: Gpu) -> MemoryEstimate:
        """Return what `estimate_memory` says."""
        return self._of(self._curve(spec, gpu), spec, gpu, spec.train.batch_size)

    def _curve(self, spec: Experiment, gpu: Gpu) -> dict[int, MemoryEstimate]:
        """Return what is known of a spec by its batch size."""
        capability = capability_of(gpu)
        train = (spec.train.optimizer, spec.train.precision, spec.train.gradient_accumulation_steps > 1)
        kind = (cublas_workspace(capability or MODERN), capability is not None and capability >= MODERN)
        return self._known.setdefault((kind, spec.model, spec.dataset, spec.method, spec.optimizations, train), {})

    def _of(self, curve: dict[int, MemoryEstimate], spec: Experiment, gpu: Gpu, size: int) -> MemoryEstimate:
        if size not in curve:
            train = spec.train.model_copy(update={"batch_size": size})
            resolved = resolve(spec.model_copy(update={"train": train}), capability_of(gpu))
            curve[size] = estimate_memory(resolved, gpu, config=self._config)
        has, verdict = capacity(gpu), verdict_of(curve[size].device, capacity(gpu))
        return replace(curve[size], total=has.total, usable=has.usable, margin=has.margin, verdict=verdict)

    def largest_batch(self, spec: Experiment, gpu: Gpu) -> int | None:
        """Return what `largest_batch` finds, in fewer steps: memory is nearly a straight line over the batch size."""
        has, most = capacity(gpu), min(MOST_BATCH, spec.dataset.samples or MOST_BATCH)
        total = has.usable - has.margin + RESERVE
        curve = self._curve(spec, gpu)

        def high(size: int) -> float:
            return self._of(curve, spec, gpu, size).device.high

        if high(1) > total:
            return None
        known = {size: estimate.device.high for size, estimate in curve.items() if size <= most}
        fits = max(size for size, needed in known.items() if needed <= total)
        fails = min((size for size, needed in known.items() if needed > total), default=most + 1)
        while fails - fits > 1:
            size = _between(fits, fails, known, total)
            known[size] = high(size)
            fits, fails = (size, fails) if known[size] <= total else (fits, size)
        return fits


def _between(fits: int, fails: int, known: dict[int, float], total: float) -> int:
    """Return the next size to try: where the line through the two nearest sizes meets `total`, else twice or half
    way."""
    other = fails if fails in known else max((size for size in known if size < fits), default=None)
    if other is None:
        return min(2 * fits, fails - 1)
    slope = (known[other] - known[fits]) / (other - fits)
    if slope <= 0:
        return (fits + fails) // 2
    step = max(1, int((total - known[fits]) / slope))
    return max(fits + 1, min(fits + step + (fails not in known), fails - 1))

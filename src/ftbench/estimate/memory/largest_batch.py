"""Find the largest batch that fits, and cache memory estimates: GPUs differ only in their capacity."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ftbench.core.hardware import MODERN, Gpu, capability_of, cublas_workspace
from ftbench.estimate.gpus import RESERVE, capacity
from ftbench.estimate.memory.estimate import MemoryEstimate, estimate_memory, verdict_of
from ftbench.spec.experiment import Experiment, resolve

MOST_BATCH = 65_536  # spec.experiment.Train.batch_size


class MemoryCache:
    """Memory estimates of many specs on many GPUs. `total` is passed to `estimate_memory`."""

    def __init__(self, total: float | None = None) -> None:
        self._total = total
        self._known: dict[Any, dict[int, MemoryEstimate]] = {}

    def estimate(self, spec: Experiment, gpu: Gpu | float) -> MemoryEstimate:
        """Return the same as `estimate_memory`."""
        return self._of(self._curve(spec, gpu), spec, gpu, spec.train.batch_size)

    def _curve(self, spec: Experiment, gpu: Gpu | float) -> dict[int, MemoryEstimate]:
        """Return the known estimates of a spec by batch size."""
        capability = capability_of(gpu)
        passes = spec.train.gradient_accumulation_steps
        train = (spec.train.optimizer, spec.train.precision, passes > 1, spec.objective)
        launch = spec.launch.model_dump(
            include={"gpus", "strategy", "tp", "offload", "pp", "micro_batches", "schedule"}
        )
        kind = (cublas_workspace(capability or MODERN), capability is not None and capability >= MODERN)
        return self._known.setdefault(
            (kind, spec.model, spec.dataset, spec.method, spec.optimizations, train, *launch.values()), {}
        )

    def _of(self, curve: dict[int, MemoryEstimate], spec: Experiment, gpu: Gpu | float, size: int) -> MemoryEstimate:
        has = capacity(gpu, self._total)
        if size not in curve:
            train = spec.train.model_copy(update={"batch_size": size})
            resolved = resolve(spec.model_copy(update={"train": train}), capability_of(gpu))
            curve[size] = estimate_memory(resolved, gpu, total=self._total)
        verdict = verdict_of(curve[size].allocated, curve[size].device, has)
        return replace(curve[size], total=has.total, usable=has.usable, margin=has.margin, verdict=verdict)

    def largest_batch(
        self, spec: Experiment, gpu: Gpu | float, likely: bool = False, most: int = MOST_BATCH
    ) -> int | None:
        """Return the largest train.batch_size that fits, or None if the smallest does not.

        It is at most the number of samples and `most`, and a multiple of the micro-batches of pp. With `likely`, return
        the largest that is expected to fit, without margins: the start of a search."""
        has, curve = capacity(gpu, self._total), self._curve(spec, gpu)
        unit = spec.launch.micro_batches or 1

        def needed(estimate: MemoryEstimate) -> float:
            return estimate.device.expected if likely else estimate.device.high

        known = {size // unit: needed(estimate) for size, estimate in curve.items() if size % unit == 0}
        room = has.usable - (0 if likely else has.margin) + RESERVE
        most = min(MOST_BATCH, most, spec.dataset.samples or most) // unit
        if not most:
            return None
        units = _largest_within(most, lambda size: needed(self._of(curve, spec, gpu, size * unit)), room, known)
        return units and units * unit


def largest_batch(
    spec: Experiment, gpu: Gpu | float, *, likely: bool = False, total: float | None = None
) -> int | None:
    """Return the largest batch of one spec."""
    return MemoryCache(total).largest_batch(spec, gpu, likely)


def _largest_within(most: int, needed: Callable[[int], float], room: float, known: Mapping[int, float]) -> int | None:
    """Return the largest batch up to `most` that needs at most `room`. `known` holds the needs of some sizes.

    Memory is almost linear in the batch size, so few steps are enough."""
    known = {1: needed(1)} | {size: need for size, need in known.items() if size <= most}
    if known[1] > room:
        return None
    fits = max(size for size, need in known.items() if need <= room)
    fails = min((size for size, need in known.items() if need > room), default=most + 1)
    while fails - fits > 1:
        size = _between(fits, fails, known, room)
        known[size] = needed(size)
        fits, fails = (size, fails) if known[size] <= room else (fits, size)
    return fits


def _between(fits: int, fails: int, known: Mapping[int, float], room: float) -> int:
    """Return the next size to try: on the line through the two nearest sizes, otherwise twice as large or half way."""
    other = fails if fails in known else max((size for size in known if size < fits), default=None)
    if other is None:
        return min(2 * fits, fails - 1)
    slope = (known[other] - known[fits]) / (other - fits)
    if slope <= 0:
        return (fits + fails) // 2
    step = max(1, int((room - known[fits]) / slope))
    return max(fits + 1, min(fits + step + (fails not in known), fails - 1))

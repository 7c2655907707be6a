"""Find the largest batch size that fits a GPU, and cache memory estimates for GPUs of the same generation."""

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

from ftbench.core.hardware import MODERN, Gpu, capability_of, cublas_workspace
from ftbench.estimate.gpus import RESERVE, capacity
from ftbench.estimate.memory.estimate import MemoryEstimate, estimate_memory, verdict_of
from ftbench.spec.experiment import Experiment, resolve

MOST_BATCH = 65_536  # spec.experiment.Train.batch_size


def with_batch(spec: Experiment, batch: int, accumulation: int | None = None) -> Experiment:
    """Return the spec with another batch size. The number of gradient accumulation steps stays the same by default."""
    passes = accumulation or spec.train.gradient_accumulation_steps
    train = spec.train.model_copy(update={"batch_size": batch, "gradient_accumulation_steps": passes})
    return spec.model_copy(update={"train": train})


class MemoryCache:
    """Cache the memory estimates of many specs on many GPUs. `total` is the memory in GiB that the driver reports."""

    def __init__(self, total: float | None = None) -> None:
        self._total = total
        self._known: dict[Any, MemoryEstimate] = {}

    def estimate(self, spec: Experiment, gpu: Gpu | float) -> MemoryEstimate:
        """Return the result of `estimate_memory`, from the cache if possible."""
        capability = capability_of(gpu) or MODERN
        spec = resolve(spec, capability)  # `auto` can have different values on GPUs with the same workspace
        kind, train = cublas_workspace(capability), spec.train
        passes = train.gradient_accumulation_steps
        steps = (train.batch_size, passes if train.max_steps else passes > 1, train.optimizer, train.precision)
        has = capacity(gpu, self._total)
        key = (kind, steps, spec.model, spec.dataset, spec.method, spec.objective, spec.optimizations, spec.launch,
               spec.launch.gpus > 1 and has)  # fmt: skip
        if key not in self._known:
            self._known[key] = estimate_memory(spec, gpu, total=self._total)
        known = self._known[key]
        verdict = verdict_of(known.allocated, known.device, has)
        return replace(known, total=has.total, usable=has.usable, margin=has.margin, verdict=verdict)

    def largest_batch(
        self, spec: Experiment, gpu: Gpu | float, likely: bool = False, most: int = MOST_BATCH
    ) -> int | None:
        """Return the largest `train.batch_size` that fits, or None if no size fits.

        The result is at most `most`, and at most the number of samples. With pipeline parallelism, the result is a
        multiple of the number of micro-batches. With `likely`, only the expected memory must fit, without a margin, and
        synthetic data have as many samples as a batch needs."""
        has, unit, data = capacity(gpu, self._total), spec.launch.micro_batches or 1, spec.dataset
        made = likely and data.is_generated

        def spare(units: int) -> float:
            sized = with_batch(spec, units * unit)
            if made:
                more = {"samples": max(data.samples or 0, units * unit)}
                sized = sized.model_copy(update={"dataset": data.model_copy(update=more)})
            memory = self.estimate(sized, gpu)
            return has.usable + RESERVE - (memory.device.expected if likely else memory.device.high + has.margin)

        most = min(MOST_BATCH, most, MOST_BATCH if made else data.samples or most) // unit
        return unit * _largest_within(most, spare) or None


def _largest_within(most: int, spare: Callable[[int], float]) -> int:
    """Return the largest batch up to `most` with `spare(batch) >= 0` GiB, or 0: ten secant steps, then bisection."""
    low, high, size, last, tries = 0, most + 1, 1, (0, inf), 0
    while high - low > 1:
        left, tries = spare(size), tries + 1
        low, high = (size, high) if left >= 0 else (low, size)
        step = (last[1] - left) / (size - last[0])
        guess = size + left / step if step > 0 and tries < 10 else (low + high) / 2
        last, size = (size, left), min(max(int(guess), low + 1), high - 1)
    return low

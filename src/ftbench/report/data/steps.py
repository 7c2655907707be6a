"""The steps of one run as figures a step, for comparisons."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ftbench.report.data.curves import read_columns
from ftbench.store.rundir import RunDir

_NAMES = ("step", "step_time_s", "real_tokens", "samples", "energy_j", "loss", "label_tokens")


@dataclass(frozen=True, slots=True)
class Steps:
    """The train steps of one run whose time is known, in order: step number, seconds, real tokens, samples, joules,
    loss and label tokens (NaN is unknown); and how many of them are warm-up."""

    step: list[int]
    seconds: list[float]
    tokens: list[float]
    samples: list[float]
    joules: list[float]
    loss: list[float]
    labels: list[float]
    warmup: int

    def rate(self, counts: str) -> dict[int, float]:
        """Step → `tokens` or `samples` a second, of the steady steps that are known."""
        return self._per(getattr(self, counts), self.seconds)

    def joules_per_sample(self) -> dict[int, float]:
        return self._per(self.joules, self.samples)

    def _per(self, above: Iterable[float], below: Iterable[float]) -> dict[int, float]:
        steady = list(zip(self.step, above, below, strict=True))[self.warmup :]
        return {step: a / b for step, a, b in steady if a > 0 and b > 0}

    def losses(self) -> dict[int, float]:
        """Step → loss, of all steps that have one."""
        return {step: loss for step, loss in zip(self.step, self.loss, strict=True) if math.isfinite(loss)}

    def weighted(self) -> list[tuple[float, float, float]]:
        """Samples, label tokens and loss of each step; nothing where a step lacks one."""
        found = list(zip(self.samples, self.labels, self.loss, strict=True))
        return found if all(math.isfinite(value) for row in found for value in row) else []

    def samples_by_step(self) -> dict[int, float]:
        return {step: count for step, count in zip(self.step, self.samples, strict=True) if count > 0}


def read(run: RunDir, warmup: int) -> Steps:
    """The steps of a run; none for a run that has no steps.csv."""
    found = read_columns(run.steps, _NAMES)
    if not found:
        return Steps([], [], [], [], [], [], [], warmup)
    rows = [row for row in zip(*(found[name] for name in _NAMES), strict=True) if math.isfinite(row[1])]
    columns: list[list[float]] = [[row[i] for row in rows] for i in range(len(_NAMES))]
    number = [int(step) if math.isfinite(step) else i for i, step in enumerate(columns[0], 1)]
    return Steps(number, columns[1], columns[2], columns[3], columns[4], columns[5], columns[6], warmup)

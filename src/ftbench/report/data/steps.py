"""The steps of one run as figures a step, for comparisons."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ftbench.core.learning import TrainedStep
from ftbench.store.rundir import RunDir
from ftbench.store.steps import read_columns

_NAMES = ("step", "step_time_s", "real_tokens", "samples", "energy_j", "label_tokens", "loss", "grad_norm")
_Column = list[float | None]


@dataclass(frozen=True, slots=True)
class Steps:
    """The train steps of one run whose time is known, in order, as columns: step number, seconds, real tokens,
    samples, joules, label tokens, loss, gradient norm (None is unknown); and how many of them are warm-up."""

    step: list[int]
    seconds: _Column
    tokens: _Column
    samples: _Column
    joules: _Column
    labels: _Column
    loss: _Column
    grad_norm: _Column
    warmup: int

    def rate(self, counts: str) -> dict[int, float]:
        """Return step → `tokens` or `samples` a second, of the steady steps that are known."""
        return self._per(getattr(self, counts), self.seconds)

    def joules_per_sample(self) -> dict[int, float]:
        return self._per(self.joules, self.samples)

    def _per(self, above: Sequence[float | None], below: Sequence[float | None]) -> dict[int, float]:
        steady = list(zip(self.step, above, below, strict=True))[self.warmup :]
        return {step: a / b for step, a, b in steady if a and b and a > 0 and b > 0}

    def learning(self) -> list[TrainedStep]:
        """Return what each step says about learning."""
        return list(map(TrainedStep, self.step, self.samples, self.labels, self.loss, self.grad_norm))

    def samples_by_step(self) -> dict[int, float]:
        return {step: count for step, count in zip(self.step, self.samples, strict=True) if count}


def read(run: RunDir, warmup: int) -> Steps:
    """Return the steps of a run; none for a run that has no steps.csv."""
    columns = read_columns(run.steps, _NAMES)
    rows = zip(*(columns[name] for name in _NAMES), strict=True) if columns else ()
    timed = [row for row in rows if row[0] is not None and row[1] is not None and math.isfinite(row[1])]
    step, *rest = ([row[column] for row in timed] for column in range(len(_NAMES)))
    seconds, tokens, samples, joules, labels, loss, norm = rest
    return Steps([int(number or 0) for number in step], seconds, tokens, samples, joules, labels, loss, norm, warmup)

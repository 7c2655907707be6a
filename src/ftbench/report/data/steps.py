"""The steps of one run as figures a step, for comparisons."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ftbench.core.learning import TrainedStep
from ftbench.store.rundir import RunDir
from ftbench.store.steps import read_columns

_LEARNING = ("samples", "label_tokens", "loss", "grad_norm")
_NAMES = ("step", "step_time_s", "real_tokens", "energy_j", *_LEARNING)


@dataclass(frozen=True, eq=False)
class Steps:
    """The train steps of one run whose time is known, in order: columns of steps.csv by their names (None is unknown),
    and how many of the steps are warm-up."""

    columns: Mapping[str, Sequence[float | None]]
    warmup: int

    @cached_property
    def numbers(self) -> list[int]:
        return [int(number or 0) for number in self.columns["step"]]

    def per_step(self, above: str, below: str) -> dict[int, float]:
        """Return step → one column over another, of the steady steps that know both."""
        steady = list(zip(self.numbers, self.columns[above], self.columns[below], strict=True))[self.warmup :]
        return {step: a / b for step, a, b in steady if a and b and a > 0 and b > 0}

    @cached_property
    def learning(self) -> list[TrainedStep]:
        """Return what each step says about learning."""
        return list(map(TrainedStep, self.numbers, *(self.columns[name] for name in _LEARNING)))

    @cached_property
    def samples_by_step(self) -> dict[int, float]:
        return {step: count for step, count in zip(self.numbers, self.columns["samples"], strict=True) if count}


def read(run: RunDir, warmup: int) -> Steps:
    """Return the steps of a run; none for a run that has no steps.csv."""
    columns = read_columns(run.steps, _NAMES) or {name: [] for name in _NAMES}
    timed = [row for row in zip(*columns.values(), strict=True) if row[1] is not None and math.isfinite(row[1])]
    return Steps({name: [row[at] for row in timed] for at, name in enumerate(_NAMES)}, warmup)

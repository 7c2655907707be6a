"""How long a run will take, from those that have ended, and which runs say most in a short night. Pure."""

import statistics
from collections.abc import Collection, Sequence

from ftbench.core.units import parse_seconds
from ftbench.errors import SpecError
from ftbench.spec.experiment import Experiment
from ftbench.sweep.jobs import Job

MARGIN = 1.1


def duration(text: str) -> float:
    """Return the seconds of `8h`, `90m`, `1h30m` or `45s`. Raise SpecError for anything else."""
    total = parse_seconds(text)
    if total is None:
        raise SpecError(f"--time-budget {text}: write it as 8h, 90m or 1h30m")
    return total


class WallTimes:
    """The wall seconds of the runs that have ended, by cell and by family."""

    def __init__(self) -> None:
        self._cells: dict[str, list[float]] = {}
        self._families: dict[str, list[tuple[Experiment, float]]] = {}
        self._slowest: dict[int, tuple[Experiment, float]] = {}  # of each batch
        self._median: float | None = None

    def add(self, job: Job, wall_s: float) -> None:
        """Take note of a run that has ended."""
        self._cells.setdefault(job.cell, []).append(wall_s)
        self._families.setdefault(job.family, []).append((job.spec, wall_s))
        batch = _batch(job.spec)
        if batch not in self._slowest or wall_s > self._slowest[batch][1]:
            self._slowest[batch] = (job.spec, wall_s)
        self._median = None

    def at_most_s(self, job: Job) -> float | None:
        """Return the wall seconds that `job` takes at most; None where no run has ended. The nearest relative decides:
        another repeat, else the same cell with another batch, else the slowest of all and the slowest of the nearest
        batch. With a fixed number of steps the time grows at most in proportion to the samples of a step; with a fixed
        number of epochs a smaller batch takes at most in proportion more steps."""
        if repeats := self._cells.get(job.cell):
            return MARGIN * max(repeats)
        family = self._families.get(job.family)
        if not (relatives := family or [*self._slowest.values()]):
            return None
        spec, wall = min(relatives, key=lambda pair: abs(_batch(pair[0]) - _batch(job.spec)))
        others = () if family else (wall for _, wall in relatives)  # a packed row of one sample's batch holds many
        return MARGIN * max(wall * _growth(spec, job.spec), *others, 0.0)

    def remaining_s(
        self, pending: Collection[Job], slots: int, running: Collection[tuple[Job, float]] = ()
    ) -> float | None:
        """Return the seconds until all pending jobs are done, roughly: for each the median of its family, or else of
        all runs, less the seconds for which it is `running`; None before the first has ended."""
        if not self._cells:
            return None
        if self._median is None:
            self._median = statistics.median(wall for walls in self._cells.values() for wall in walls)
        medians: dict[str, float] = {}
        left = 0.0
        for job, spent in (*((job, 0.0) for job in pending), *running):
            if job.family not in medians:
                walls = [wall for _, wall in self._families.get(job.family, ())]
                medians[job.family] = statistics.median(walls) if walls else self._median
            left += max(0.0, medians[job.family] - spent)
        return left / slots


def _batch(spec: Experiment) -> int:
    return spec.train.batch_size * spec.train.gradient_accumulation_steps


def _growth(known: Experiment, wanted: Experiment) -> float:
    ratio = _batch(wanted) / _batch(known)
    return max(1.0, ratio if wanted.train.max_steps else 1 / ratio)


def coarse_to_fine(jobs: Sequence[Job]) -> list[Job]:
    """Return the same jobs, first repeats before second ones, the ends of each numeric axis before its middle, the
    middle before the quarters. If the night is too short, the grid is thin everywhere and not cut off."""
    values: dict[str, list[float]] = {}
    for job in jobs:
        for key, value in job.values.items():
            if (number := _number(value)) is not None:
                values.setdefault(key, []).append(number)
    levels = {key: _levels(sorted(set(numbers))) for key, numbers in values.items()}

    def level(job: Job) -> int:
        numbers = ((key, _number(job.values.get(key))) for key in levels)
        return sum(levels[key][number] for key, number in numbers if number is not None)

    return sorted(jobs, key=lambda job: (job.repeat, level(job)))


def _number(value: object) -> float | None:
    """Return a value of an axis as a number; YAML reads 1e-4 as a text."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def _levels(ordered: Sequence[float]) -> dict[float, int]:
    """Return each value's level of refinement: 0 for the two ends, 1 for the middle, 2 for the quarters, and so on."""
    levels = {ordered[0]: 0, ordered[-1]: 0}
    spans, level = [(0, len(ordered) - 1)], 1
    while spans:
        halves = []
        for low, high in spans:
            if high - low > 1:
                middle = (low + high) // 2
                levels[ordered[middle]] = level
                halves += [(low, middle), (middle, high)]
        spans, level = halves, level + 1
    return levels

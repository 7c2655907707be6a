"""What to run next of a grid's cells. The run directories say what is done already, so that a sweep goes on where it
stopped, whatever stopped it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ftbench.spec.experiment import Experiment
from ftbench.spec.sweep import Cell
from ftbench.sweep.execute.budget import History
from ftbench.sweep.jobs import PENDING, Job, Standing, blames_the_batch, job, on_resume, standing

KILLS = 2  # how often in a sitting a run that somebody killed is begun again


@dataclass(frozen=True, slots=True)
class Options:
    """`folder` is the experiment's; `gpu` the GPU's name; `sets` the changes to the spec file that all cells share."""

    folder: Path
    gpu: str | None
    sets: tuple[str, ...] = ()
    retry_failed: bool = False
    force: bool = False


class Plan(Protocol):
    """`standings` holds every job known so far, in the order of the table."""

    standings: dict[Job, Standing]
    history: History

    def next(self, fits: Callable[[Job], bool]) -> Job | None:
        """A job to start now, or None where nothing can start; `fits` says whether there is time for it."""

    def ended(self, job: Job) -> None:
        """Takes note of what the directory of a job says that was started."""

    def pending(self) -> Collection[Job]: ...


class Grid:
    """Every job of a fixed list, in its order, but for those that are done. A job whose batch is larger than one that
    ran out of memory in the same family is skipped."""

    def __init__(self, jobs: Iterable[Job], refused: dict[Job, str], options: Options) -> None:
        self.history = History()
        self.standings: dict[Job, Standing] = {}
        self._options = options
        self._limits: dict[str, int] = {}
        self._kills: Counter[Job] = Counter()
        self._waiting: deque[Job] = deque()
        self.add(jobs, refused)

    def add(self, jobs: Iterable[Job], refused: dict[Job, str]) -> None:
        """More jobs, behind those that wait; one that the plan has already is not run again."""
        for each in jobs:
            if each in self.standings:
                continue
            if each in refused:
                self.standings[each] = Standing("skipped", refused[each])
                continue
            now = standing(each.run)
            again = self._options.force and now.state != "running"
            self.standings[each] = PENDING if again else on_resume(now, self._options.retry_failed)
            self._note(each)
            if self.standings[each] == PENDING:
                self._waiting.append(each)
        self._prune()

    def next(self, fits: Callable[[Job], bool]) -> Job | None:
        for _ in range(len(self._waiting)):
            each = self._waiting.popleft()
            if self.standings[each] != PENDING:
                continue
            if fits(each):
                self.standings[each] = Standing("running")
                return each
            self._waiting.append(each)
        return None

    def ended(self, job: Job) -> None:
        self.standings[job] = standing(job.run)
        if self.standings[job].killed and self._kills[job] < KILLS:  # at once: a larger batch tells another story
            self._kills[job] += 1
            self.standings[job] = PENDING
            self._waiting.appendleft(job)
            return
        self._note(job)
        if self.standings[job].state == "oom":
            self._prune()

    def pending(self) -> Collection[Job]:
        return [each for each in self._waiting if self.standings[each] == PENDING]

    def _note(self, each: Job) -> None:
        found = self.standings[each]
        if found.state in ("ok", "timeout") and found.wall_s is not None:
            self.history.add(each, found.wall_s)
        if found.state == "oom" and blames_the_batch(each.run):
            batch = each.spec.train.batch_size
            self._limits[each.family] = min(batch, self._limits.get(each.family, batch))

    def _prune(self) -> None:
        for each in self._waiting:
            limit = self._limits.get(each.family)
            if self.standings[each] == PENDING and limit is not None and each.spec.train.batch_size >= limit:
                self.standings[each] = Standing("skipped", f"oom at batch {limit}")


def jobs_of(cells: Iterable[Cell], resolved: Callable[[Experiment], Experiment], options: Options) -> list[Job]:
    """The jobs of a grid: every cell once before any cell twice. Cells that turn out to be the same spec are one."""
    found: dict[Path, Job] = {}
    ready = [(cell, resolved(cell.spec)) for cell in cells if cell.spec is not None]
    for repeat in range(1, max((spec.measure.repeats for _, spec in ready), default=1) + 1):
        for cell, spec in ready:
            if repeat <= spec.measure.repeats:
                each = job(spec, (*options.sets, *cell.sets), cell.values, repeat, options.folder, options.gpu)
                found.setdefault(each.run.path, each)
    return list(found.values())

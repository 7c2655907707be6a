"""What to run next of a grid's cells. The run directories say what is done already, so that a sweep goes on where it
stopped, whatever stopped it."""

import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from ftbench.spec.sweep import GridCell
from ftbench.store.rundir import RunDir
from ftbench.sweep.jobs import PENDING, Job, Standing, blames_the_batch, job, on_resume, read_standing
from ftbench.sweep.plan.base import Options, Plan


class Grid(Plan):
    """Every job of a fixed list, in its order, but for those that are done. A job whose batch is larger than one that
    ran out of memory in the same family is skipped."""

    def __init__(self, jobs: Iterable[Job], refused: dict[Job, str], options: Options) -> None:
        super().__init__(options)
        self._limits: dict[str, int] = {}
        self._waiting: deque[Job] = deque()
        self.add(jobs, refused)

    def add(self, jobs: Iterable[Job], refused: dict[Job, str]) -> None:
        """Add more jobs behind those that wait; one that the plan has already is not run again."""
        begun = set(os.listdir(self.options.folder)) if self.options.folder.is_dir() else set()
        for each in jobs:
            if each in self.standings:
                continue
            if each in refused:
                self.standings[each] = Standing("skipped", refused[each])
                continue
            now = read_standing(each.run) if each.run.run_id in begun else PENDING
            again = self.options.force and now.state != "running"
            self.record(each, PENDING if again else on_resume(now, self.options.retry_failed))
            if self.standings[each] == PENDING:
                self._waiting.append(each)
        self._prune()

    def next(self, has_time: Callable[[Job], bool]) -> Job | None:
        for _ in range(len(self._waiting)):
            each = self._waiting.popleft()
            if self.standings[each] != PENDING:
                continue
            if has_time(each):
                self.standings[each] = Standing("running")
                return each
            self._waiting.append(each)
        return None

    def ended(self, job: Job) -> None:
        now = read_standing(job.run)
        if self.begins_again(job, now):
            self._waiting.appendleft(job)  # at once: a larger batch tells another story
            return
        self.record(job, now)
        if now.state == "oom":
            self._prune()

    def pending(self) -> Collection[Job]:
        return [each for each in self._waiting if self.standings[each] == PENDING]

    def record(self, job: Job, standing: Standing) -> None:
        super().record(job, standing)
        if standing.state == "oom" and blames_the_batch(job.run):
            batch = job.spec.train.batch_size
            self._limits[job.family] = min(batch, self._limits.get(job.family, batch))

    def _prune(self) -> None:
        for each in self.pending():
            limit = self._limits.get(each.family)
            if limit is not None and each.spec.train.batch_size >= limit:
                self.standings[each] = Standing("skipped", f"oom at batch {limit}")


def first_jobs(cells: Iterable[GridCell], options: Options) -> list[Job]:
    """Return the first job of each cell of a grid of resolved specs that can work."""
    return [
        job(cell.spec, (*options.sets, *cell.sets), cell.values, 1, options.folder, options.gpu)
        for cell in cells if cell.spec is not None
    ]  # fmt: skip


def with_repeats(firsts: Sequence[Job]) -> list[Job]:
    """Return the jobs of a grid: every cell once before any cell twice. Cells that are the same spec are one."""
    jobs: dict[str, Job] = {}
    for repeat in range(1, max((first.spec.measure.repeats for first in firsts), default=1) + 1):
        for first in firsts:
            name = f"{first.cell}-r{repeat}"
            if repeat <= first.spec.measure.repeats and name not in jobs:
                run = first.run if repeat == 1 else RunDir(first.run.path.with_name(name))
                jobs[name] = replace(first, run=run, repeat=repeat)
    return list(jobs.values())

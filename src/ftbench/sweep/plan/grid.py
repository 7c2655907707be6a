"""The plan of a grid: run all unfinished cells in order."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ftbench.spec.sweep import GridCell
from ftbench.store.rundir import RunDir
from ftbench.sweep.plan.base import PENDING, Job, JobStatus, Options, Plan, is_batch_too_large, job, read_status


class Grid(Plan):
    """Run a fixed list of jobs in order. If a batch runs out of memory, skip larger batches with the same settings."""

    def __init__(self, jobs: Iterable[Job], refused: dict[Job, str], options: Options) -> None:
        """Read the results of earlier sessions. `refused` has the reason for each job that cannot run."""
        super().__init__(options)
        self._limits: dict[str, int] = {}
        for each in dict.fromkeys(jobs):
            self.record(each, JobStatus("skipped", refused[each]) if each in refused else self._read(each))
        self._skip_larger_batches()

    def _read(self, job: Job) -> JobStatus:
        status = self.resumed(job)
        return PENDING if self.options.force and status.state != "running" else status

    def next(self, has_time: Callable[[Job], bool]) -> Job | None:
        while job := next(filter(has_time, self.pending()), None):
            if self._read(job) == PENDING:
                self.statuses[job] = JobStatus("running")
                return job
            self.ended(job)  # another process has started or finished it since the plan was made
        return None

    def ended(self, job: Job) -> None:
        status = read_status(job.run)
        if not self.is_retried(job, status):
            self.record(job, status)
            self._skip_larger_batches()

    def record(self, job: Job, status: JobStatus) -> None:
        super().record(job, status)
        if status.state == "oom" and is_batch_too_large(job.run):
            batch = job.spec.train.batch_size
            self._limits[job.without_batch] = min(batch, self._limits.get(job.without_batch, batch))

    def _skip_larger_batches(self) -> None:
        for each in self.pending():
            limit = self._limits.get(each.without_batch)
            if limit is not None and each.spec.train.batch_size >= limit:
                self.statuses[each] = JobStatus("skipped", f"oom at batch {limit}")


def first_jobs(cells: Iterable[GridCell], options: Options) -> list[Job]:
    """Return the job of the first repeat of each cell. Leave out refused cells: they do not have a valid spec."""
    return [
        job(cell.spec, (*options.sets, *cell.sets), cell.values, 1, options.folder, options.gpu)
        for cell in cells if cell.spec is not None
    ]  # fmt: skip


def with_repeats(firsts: Sequence[Job]) -> list[Job]:
    """Return the jobs of a grid: the first repeat of all cells, then the second repeat of all cells, and so on."""
    jobs: dict[str, Job] = {}
    for repeat in range(1, max((first.spec.measure.repeats for first in firsts), default=1) + 1):
        for first in firsts:
            name = f"{first.cell}-r{repeat}"
            if repeat <= first.spec.measure.repeats and name not in jobs:
                run = first.run if repeat == 1 else RunDir(first.run.path.with_name(name))
                jobs[name] = replace(first, run=run, repeat=repeat)
    return list(jobs.values())

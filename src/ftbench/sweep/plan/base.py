"""Jobs of a sweep, their status, and the base class of plans.

Progress is stored only in the run directories. Therefore, a sweep can be resumed after any interruption.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftbench.errors import MissingError
from ftbench.spec import identity
from ftbench.spec.experiment import Experiment
from ftbench.spec.reading import as_text
from ftbench.store import rundir
from ftbench.store.run_warnings import is_free
from ftbench.store.rundir import NOT_FINITE, RunDir

FAILED = ("timeout", "error", NOT_FINITE)
DONE = ("ok", "oom", *FAILED)
RETRIES = 2  # retries per session of a run that another process killed
MARGIN = 1.1  # factor on measured wall times


@dataclass(frozen=True, slots=True)
class Job:
    """One run of a sweep. Jobs are equal if they have the same run directory.

    Attributes:
        run: Run directory. Its name comes from the spec, the GPU and the repeat.
        spec: The resolved spec.
        sets: `--set` changes that turn the spec file into `spec`.
        values: The job's value on each axis.
        repeat: Number of the repeat, from 1.
        without_batch: Identifier of all jobs that differ only in batch size.
    """

    run: RunDir
    spec: Experiment = field(compare=False)
    sets: tuple[str, ...] = field(compare=False)
    values: dict[str, Any] = field(compare=False)
    repeat: int = field(compare=False)
    without_batch: str = field(compare=False)

    @property
    def cell(self) -> str:
        """The name of the cell. All repeats of the cell have the same name."""
        return self.run.run_id.rpartition("-r")[0]

    @property
    def what(self) -> str:
        """The description of the job in messages, such as `method=lora train.batch_size=4 repeat 2`."""
        repeat = [f"repeat {self.repeat}"] if self.spec.measure.repeats > 1 else []
        return " ".join([*(f"{key}={short(value)}" for key, value in self.values.items()), *repeat]) or self.spec.name


def short(value: Any) -> str:
    """Return an axis value as text of at most 40 characters. For a section, the text starts with the section's name."""
    text = as_text(value)
    if isinstance(value, dict) and (name := value.get("name", value.get("id"))):
        others = [f"{key} {as_text(other)}" for key, other in value.items() if key not in ("name", "id")]
        text = ", ".join([str(name), *others])
    return text if len(text) <= 40 else text[:39] + "…"


def job(spec: Experiment, sets: tuple[str, ...], values: dict[str, Any], repeat: int, folder: Path, gpu: Any) -> Job:
    """Return the job that runs a resolved spec on this kind of GPU. Its run directory is in `folder`."""
    run = RunDir(folder / f"{identity.slug(spec, gpu)}-r{repeat}")
    return Job(run, spec, sets, values, repeat, identity.fingerprint_without_batch(spec, gpu))


def run_command(source: Path, job: Job, out: Path) -> list[str]:
    """Return the arguments of the `ftbench run` command that repeats a job."""
    sets = [part for text in job.sets for part in ("--set", text)]
    return ["ftbench", "run", str(source), *sets, *([] if out == Path("results") else ["--out", str(out)])]


@dataclass(frozen=True, slots=True)
class JobStatus:
    """Status of a job: the state of its run, `pending`, or `skipped`.

    `wall_s` is the wall time of a finished run in seconds. `lacking` is True if the run failed because something is
    missing on the machine. `killed` is True if another process killed the run.
    """

    state: str
    reason: str | None = None
    wall_s: float | None = None
    lacking: bool = False
    killed: bool = False

    @property
    def done(self) -> bool:
        return self.state in DONE or self.state == "skipped"


PENDING = JobStatus("pending")


def read_status(run: RunDir) -> JobStatus:
    """Return the status recorded in a run directory, or `pending` if there is no valid state file."""
    state = rundir.read_json(run.state)
    if state.get("state") not in rundir.STATES:
        return PENDING
    if state["state"] == "running":
        state = rundir.read_state(run)
    lacking = state.get("exit_code") == MissingError.exit_code
    killed = state["state"] == "error" and state.get("signal") in rundir.CUT_SHORT
    return JobStatus(state["state"], state.get("reason"), state.get("wall_s"), lacking, killed)


def on_resume(status: JobStatus, retry_failed: bool) -> JobStatus:
    """Return the status `pending` for a job that must run again. For other jobs, return the given status.

    Interrupted jobs must run again. Jobs that failed because something was missing on the machine must run again too.
    Other failed jobs must run again only if `retry_failed` is True. Out of memory is a result, not a failure.
    """
    interrupted = status.state == "interrupted" or status.killed
    again = interrupted or status.lacking or (retry_failed and status.state in FAILED)
    return PENDING if again else status


def is_batch_too_large(run: RunDir) -> bool:
    """Return whether no other program used the GPUs of an out-of-memory run: then larger batches do not fit either."""
    return all(map(is_free, rundir.gpus_of(rundir.read_json(run.machine))))


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a plan: the experiment's folder, the GPU's name, and the `--set` changes shared by all cells."""

    folder: Path
    gpu: str | None
    sets: tuple[str, ...] = ()
    retry_failed: bool = False
    force: bool = False


@dataclass(frozen=True)
class PlanRequest:
    """Command-line options shared by all commands that run a plan. `time_budget` is in seconds."""

    spec: Path
    sets: Sequence[str] = ()
    out: Path = Path("results")
    time_budget: float | None = None
    retry_failed: bool = False
    force: bool = False

    def options(self, folder: Path, gpu: str | None, sets: Sequence[str]) -> Options:
        """Return the options of a plan. `folder` is the experiment's folder, and `gpu` is the name of the GPU."""
        return Options(folder, gpu, tuple(sets), self.retry_failed, self.force)


class WallTimes:
    """Wall times of finished runs in seconds. They give upper bounds for the wall times of pending jobs."""

    def __init__(self) -> None:
        self._cells: dict[str, list[float]] = {}
        self._by_settings: dict[str, list[tuple[Experiment, float]]] = {}
        self._slowest: dict[int, tuple[Experiment, float]] = {}  # the key is the batch size

    def add(self, job: Job, wall_s: float) -> None:
        """Record a finished run."""
        self._cells.setdefault(job.cell, []).append(wall_s)
        self._by_settings.setdefault(job.without_batch, []).append((job.spec, wall_s))
        batch = _batch(job.spec)
        if batch not in self._slowest or wall_s > self._slowest[batch][1]:
            self._slowest[batch] = (job.spec, wall_s)

    def at_most_s(self, job: Job) -> float | None:
        """Return an upper bound of the job's wall time in seconds. Return None before a run has finished.

        If repeats of the same cell have finished, use their longest time. Otherwise, use the finished run with the
        nearest batch size: if possible, one that differs only in batch size. If other settings differ too, the bound
        is at least the time of the slowest run. Scale this time up to the job's batch: in proportion to the samples
        for a fixed number of steps, and in proportion to the steps for a fixed number of epochs.
        """
        if repeats := self._cells.get(job.cell):
            return MARGIN * max(repeats)
        same = self._by_settings.get(job.without_batch)
        if not (relatives := same or [*self._slowest.values()]):
            return None
        spec, wall = min(relatives, key=lambda pair: abs(_batch(pair[0]) - _batch(job.spec)))
        others = () if same else (wall for _, wall in relatives)  # one packed row can hold many samples
        return MARGIN * max(wall * _growth(spec, job.spec), *others, 0.0)

    def remaining_s(
        self, pending: Collection[Job], slots: int, running: Collection[tuple[Job, float]] = ()
    ) -> float | None:
        """Return an upper bound of the seconds until all jobs are done. Return None before a run has finished.

        `running` has a pair for each running job: the job, and the seconds since the start of the job."""
        bounds = [(self.at_most_s(job), spent) for job, spent in (*((job, 0.0) for job in pending), *running)]
        lasting = [max(0.0, bound - spent) for bound, spent in bounds if bound]
        return max(sum(lasting) / slots, *lasting, 0.0) if self._cells else None


def _batch(spec: Experiment) -> int:
    return spec.train.batch_size * spec.train.gradient_accumulation_steps


def _growth(known: Experiment, wanted: Experiment) -> float:
    ratio = _batch(wanted) / _batch(known)
    if not wanted.train.max_steps:
        samples = (wanted.dataset.samples or 1) / (known.dataset.samples or wanted.dataset.samples or 1)
        return max(1.0, samples * wanted.train.epochs / known.train.epochs / ratio)
    return max(1.0, ratio * wanted.train.max_steps / (known.train.max_steps or wanted.train.max_steps))


class Plan:
    """Base class of plans. A plan decides which job runs next. `statuses` has the status of all jobs, in table order.
    `has_commands` is True if an `ftbench run` command can repeat each job."""

    has_commands = True

    def __init__(self, options: Options) -> None:
        self.options = options
        self.statuses: dict[Job, JobStatus] = {}
        self.wall_times = WallTimes()
        self._retries: Counter[Job] = Counter()

    def next(self, has_time: Callable[[Job], bool]) -> Job | None:
        """Return a job to start now, or None. `has_time` tests whether a job fits into the time budget."""
        raise NotImplementedError

    def ended(self, job: Job) -> None:
        """Record the result of a job that has ended."""
        raise NotImplementedError

    def resumed(self, job: Job) -> JobStatus:
        """Return the recorded status of a job, or `pending` if the job must run again (see `on_resume`)."""
        return on_resume(read_status(job.run), self.options.retry_failed)

    def pending(self) -> list[Job]:
        """Return the jobs with the status `pending`."""
        return [job for job, status in self.statuses.items() if status == PENDING]

    def left(self) -> int:
        """Return the number of jobs that are not done."""
        return sum(not status.done for status in self.statuses.values())

    def record(self, job: Job, status: JobStatus) -> None:
        """Record a job's status and wall time."""
        self.statuses[job] = status
        if status.state in ("ok", "timeout", NOT_FINITE) and status.wall_s is not None:
            self.wall_times.add(job, status.wall_s)

    def is_retried(self, job: Job, status: JobStatus) -> bool:
        """If the job was killed, make it `pending` again, at most twice per session. Return whether it is `pending`."""
        if not status.killed or self._retries[job] >= RETRIES:
            return False
        self._retries[job] += 1
        self.statuses[job] = PENDING
        return True

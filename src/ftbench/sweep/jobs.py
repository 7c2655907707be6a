"""A run that a sweep wants, and where it stands. The run directories are the truth: resuming asks nothing else."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftbench.errors import MissingError
from ftbench.spec import identity
from ftbench.spec.experiment import Experiment
from ftbench.spec.reading import as_text
from ftbench.store import rundir
from ftbench.store.run_warnings import FOREIGN_MEMORY_GB
from ftbench.store.rundir import RunDir

FAILED = ("timeout", "error", rundir.NOT_FINITE)
DONE = ("ok", "oom", *FAILED)


@dataclass(frozen=True, slots=True)
class Job:
    """A resolved spec, the changes that make it of the spec file, which repeat it is, and the directory that its
    identity (spec, GPU) and repeat give it, by which jobs are told apart. `family` is what it shares with the other
    batch sizes of its cell; `values` are its value on each axis."""

    run: RunDir
    spec: Experiment = field(compare=False)
    sets: tuple[str, ...] = field(compare=False)
    values: dict[str, Any] = field(compare=False)
    repeat: int = field(compare=False)
    family: str = field(compare=False)

    @property
    def cell(self) -> str:
        """Return the name that its repeats share."""
        return self.run.run_id.rpartition("-r")[0]

    @property
    def what(self) -> str:
        """Return `method=lora train.batch_size=4`, with the repeat if there is more than one."""
        again = [f"repeat {self.repeat}"] if self.spec.measure.repeats > 1 else []
        return " ".join([*(f"{key}={short(value)}" for key, value in self.values.items()), *again]) or self.spec.name


def short(value: Any) -> str:
    """Return a value of an axis as a row shows it: of a section its name and what else it says."""
    text = as_text(value)
    if isinstance(value, dict) and (named := value.get("name", value.get("id"))):
        more = [f"{key} {as_text(other)}" for key, other in value.items() if key not in ("name", "id")]
        text = ", ".join([str(named), *more])
    return text if len(text) <= 40 else text[:39] + "…"


def job(spec: Experiment, sets: tuple[str, ...], values: dict[str, Any], repeat: int, folder: Path, gpu: Any) -> Job:
    """Return the job of a resolved spec on the GPU of that name."""
    run = RunDir(folder / f"{identity.slug(spec, gpu)}-r{repeat}")
    return Job(run, spec, sets, values, repeat, identity.fingerprint_without_batch(spec, gpu))


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a job stands: a state of a run, or `pending`, or `skipped` with the reason; `wall_s` of a finished one."""

    state: str
    reason: str | None = None
    wall_s: float | None = None
    lacking: bool = False  # failed for what the machine lacks
    killed: bool = False  # somebody else ended its process

    @property
    def done(self) -> bool:
        return self.state in DONE or self.state == "skipped"


PENDING = Standing("pending")


def read_standing(run: RunDir) -> Standing:
    """Return what a job's directory says; `pending` where there is none, or none with a word in it."""
    state = rundir.read_json(run.state)
    if state.get("state") not in rundir.STATES:
        return PENDING
    if state["state"] == "running":
        state = rundir.read_state(run)
    lacking = state.get("exit_code") == MissingError.exit_code
    killed = state["state"] == "error" and state.get("signal") in rundir.CUT_SHORT
    return Standing(state["state"], state.get("reason"), state.get("wall_s"), lacking, killed)


def on_resume(standing: Standing, retry_failed: bool) -> Standing:
    """Return `pending` for what is to be run again: what was cut short, or failed for what the machine lacked; what
    failed of itself only with `retry_failed`. Out of memory is a result."""
    cut_short = standing.state == "interrupted" or standing.killed
    again = cut_short or standing.lacking or (retry_failed and standing.state in FAILED)
    return PENDING if again else standing


def blames_the_batch(run: RunDir) -> bool:
    """Return whether an out-of-memory run had the GPU to itself, so that a larger batch would not fit either."""
    gpu = rundir.first_gpu(rundir.read_json(run.machine))
    return not gpu.get("foreign_processes") and (gpu.get("memory_used_before_gb") or 0.0) <= FOREIGN_MEMORY_GB


def command(source: Path, job: Job, out: Path) -> list[str]:
    """Return what a user types to make this one run."""
    sets = [part for text in job.sets for part in ("--set", text)]
    return ["ftbench", "run", str(source), *sets, *([] if out == Path("results") else ["--out", str(out)])]

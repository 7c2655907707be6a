"""GPU slots of a sweep. Each slot runs one job at a time. Workers wait for a free GPU (`worker/gpu_lock.py`)."""

import select
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ftbench.errors import MissingError, SpecError
from ftbench.launch import checks, runner
from ftbench.launch.runner import FinishedRun, RunRequest
from ftbench.store import machine, rundir
from ftbench.sweep.plan.base import Job


@dataclass(slots=True)
class RunControl:
    """Connection between a run and its sweep.

    Attributes:
        stop_pipe: Read end of a pipe. The run ends when the sweep writes a byte.
        deadline: End of the sweep's time budget, in seconds of the monotonic clock. None without a budget.
        show: Function that displays the progress, given as one line of text.
    """

    stop_pipe: int
    deadline: float | None
    show: Callable[[str], None]

    def stops_within(self, wait_s: float) -> bool:
        """Wait at most `wait_s` seconds. Return whether the run must end. After True, later calls return True too."""
        return bool(select.select([self.stop_pipe], [], [], wait_s)[0])


class GpuSlot(Protocol):
    """A place that runs one job at a time, such as a GPU. `trains` is False while its job waits in Slurm's queue."""

    name: str

    @property
    def trains(self) -> bool: ...

    def run(self, job: Job, source: bytes, control: RunControl) -> FinishedRun: ...


@dataclass(slots=True)
class LocalSlot:
    """A GPU of this machine, or the CPU of a machine without a GPU.

    `visible` is the value for CUDA_VISIBLE_DEVICES, or None to use the first GPU. `shared` is True if the sweep also
    uses other GPUs of this machine.
    """

    name: str
    visible: str | None = None
    shared: bool = False
    trains: bool = field(default=True, init=False)

    def run(self, job: Job, source: bytes, control: RunControl) -> FinishedRun:
        """Train a job in a new run directory, and return the result. Raise MissingError if the disk is full."""
        checks.check_disk(job.run.path.parent)
        return self.train(create(job), RunRequest(job.spec, source, job.sets), control)

    def train(self, run: rundir.RunDir, request: RunRequest, control: RunControl) -> FinishedRun:
        """Train the spec of `request` in the new run directory `run`, and return the result."""
        described = runner.describe(request.spec, self.visible) | ({"shared_host": True} if self.shared else {})
        return runner.execute(
            run, request, described, control.stop_pipe, lambda progress: control.show(progress.text()),
            None if self.visible is None else {"CUDA_VISIBLE_DEVICES": self.visible}, control.deadline,
        )  # fmt: skip


def create(job: Job) -> rundir.RunDir:
    """Create and return the run directory of a job. Move an earlier run with the same name to `.superseded/`."""
    if job.run.path.exists():
        rundir.archive(job.run)
    return rundir.create_at(job.run.path)


def local_slots(gpus: Sequence[str], mock: bool) -> list[LocalSlot]:
    """Return one slot per GPU in `--gpu-ids`. Without `--gpu-ids`, return one slot for this machine.

    Raise MissingError for an unknown GPU. Raise SpecError for GPUs of different models: their runs are not comparable.
    """
    if not gpus:
        return [LocalSlot("this machine")]
    if twice := [gpu for gpu in gpus if gpus.count(gpu) > 1]:
        raise SpecError(f"--gpu-ids: GPU {twice[0]} is listed twice; a GPU takes one run at a time")
    names = {}
    for gpu in gpus:
        if not gpu.isdecimal() and not gpu.startswith(("GPU-", "MIG-")):
            raise SpecError(f"--gpu-ids {gpu}: name GPUs by number, for example --gpu-ids 0,1 (`nvidia-smi -L`)")
        described = None if mock else machine.gpu(gpu)
        if described is None and not mock:
            raise MissingError(f"--gpu-ids {gpu}: this machine has no such GPU; `nvidia-smi -L` lists their numbers")
        names[gpu] = (described or {}).get("name")
    if len(set(names.values())) > 1:
        kinds = ", ".join(f"{gpu} is {name}" for gpu, name in names.items())
        raise SpecError(f"--gpu-ids: {kinds}: a sweep needs GPUs of one kind; start one sweep per kind")
    return [LocalSlot(f"GPU {gpu}", gpu, shared=len(gpus) > 1) for gpu in gpus]

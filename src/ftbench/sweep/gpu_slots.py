"""GPU slots: run one job at a time on a GPU. The worker waits until the GPU is free (`worker/gpu_lock.py`)."""

import select
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ftbench.errors import MissingError, SpecError
from ftbench.launch import checks, runner
from ftbench.launch.runner import FinishedRun, Order
from ftbench.store import machine, rundir
from ftbench.sweep.plan.base import Job


@dataclass(slots=True)
class RunControl:
    """Connection between a run and its sweep.

    Attributes:
        stop_pipe: Reading end of a pipe. A byte ends the run.
        deadline: The sweep's deadline (monotonic clock, s).
        show: Receives the progress as one line.
    """

    stop_pipe: int
    deadline: float | None
    show: Callable[[str], None]

    def stops_within(self, wait_s: float) -> bool:
        """Wait, and return whether the run must end. The byte in the pipe is not read, so later calls see it too."""
        return bool(select.select([self.stop_pipe], [], [], wait_s)[0])


class GpuSlot(Protocol):
    """Runs one job at a time. `trains` is False while a job waits in a cluster's queue."""

    name: str

    @property
    def trains(self) -> bool: ...

    def run(self, job: Job, source: bytes, control: RunControl) -> FinishedRun: ...


@dataclass(slots=True)
class LocalSlot:
    """A GPU of this machine, or its CPU.

    `visible` is the value for CUDA_VISIBLE_DEVICES. None selects the first GPU. `shared` is true if runs on other GPUs
    use the machine at the same time.
    """

    name: str
    visible: str | None = None
    shared: bool = False
    trains: bool = field(default=True, init=False)

    def run(self, job: Job, source: bytes, control: RunControl) -> FinishedRun:
        """Train a job. Raise MissingError if the disk is full."""
        checks.check_disk(job.run.path.parent)
        return self.train(create(job), Order(job.spec, source, job.sets), control)

    def train(self, run: rundir.RunDir, order: Order, control: RunControl) -> FinishedRun:
        """Train in a new directory."""
        described = runner.describe(order.spec, self.visible) | ({"shared_host": True} if self.shared else {})
        return runner.execute(
            run, order, described, control.stop_pipe, lambda progress: control.show(progress.text()),
            None if self.visible is None else {"CUDA_VISIBLE_DEVICES": self.visible}, control.deadline,
        )  # fmt: skip


def create(job: Job) -> rundir.RunDir:
    """Create the job's directory. An earlier run is archived under `.superseded/`."""
    if job.run.path.exists():
        rundir.archive(job.run)
    return rundir.create_at(job.run.path)


def local_slots(gpus: Sequence[str], mock: bool) -> list[LocalSlot]:
    """Return a slot for each GPU of `--gpu-ids`, or one default slot.

    Raise MissingError for an unknown GPU. Raise SpecError for different GPUs, whose runs cannot be compared.
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

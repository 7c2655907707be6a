"""GPU slots: run one job at a time on a GPU, and wait until its memory is free before and after."""

import re
import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ftbench.core.units import GIB, gibibytes, seconds, some
from ftbench.errors import MissingError, SpecError
from ftbench.launch import checks, runner
from ftbench.launch.runner import FinishedRun, Order
from ftbench.spec.experiment import Experiment
from ftbench.store import machine, rundir
from ftbench.sweep.plan.base import Job

RETURNED_GB = 50 * 2**20 / GIB  # tolerance when memory is compared with its level before the run
RETURN_S = 30.0  # longest wait for memory after a run
FREE_GB = 1.0  # more than this above the first reading means that another program uses the GPU
FREE_S = 300.0  # longest wait for other programs
_POLL_S = 0.1


@dataclass(slots=True)
class RunControl:
    """Connection between a run and its sweep.

    Attributes:
        stop_pipe: Reading end of a pipe. A byte ends the run.
        deadline: The sweep's deadline (monotonic clock, s).
        notify: Receives events for people.
        show: Receives the progress as one line.
    """

    stop_pipe: int
    deadline: float | None
    notify: Callable[[str], None]
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

    `visible` is the value for CUDA_VISIBLE_DEVICES; None is the first GPU. `shared` marks runs that share the machine
    with runs on other GPUs.
    """

    name: str
    visible: str | None = None
    shared: bool = False
    trains: bool = field(default=True, init=False)
    _initial_gb: float | None = field(default=None, init=False)

    def run(self, job: Job, source: bytes, control: RunControl) -> FinishedRun:
        """Wait for the GPU, train, and wait for the memory. Raise MissingError if the disk is full."""
        checks.check_disk(job.run.path.parent)
        return self.train(lambda: create(job), Order(job.spec, source, job.sets), control)

    def train(self, create_run: Callable[[], rundir.RunDir], order: Order, control: RunControl) -> FinishedRun:
        """Train in the directory that `create_run` makes once the GPU is free."""
        before = self._when_free(order.spec, control)
        described = before | ({"shared_host": True} if self.shared else {})
        result = runner.execute(
            create_run(), order, described, control.stop_pipe, lambda progress: control.show(progress.text()),
            None if self.visible is None else {"CUDA_VISIBLE_DEVICES": self.visible}, control.deadline,
        )  # fmt: skip
        if not order.spec.measure.share_gpu:
            self._wait_for_memory(_used_gb(before), order.spec.launch.gpus, control)
        return result

    def _when_free(self, spec: Experiment, control: RunControl) -> dict[str, Any]:
        """Wait up to FREE_S while other programs use the GPU, and return machine.json.

        If they still use it then, the run gets a warning. If it runs out of memory, larger batches are not skipped.
        """
        until = time.monotonic() + FREE_S
        waiting = False
        while True:
            described = runner.describe(spec, self.visible)
            used = _used_gb(described)
            if self._initial_gb is None:
                self._initial_gb = used
            others = sum(gpu.get("foreign_processes") or 0 for gpu in rundir.gpus_of(described))
            crowded = used is not None and used > (self._initial_gb or 0.0) + FREE_GB
            if spec.measure.share_gpu or (not others and not crowded):
                return described
            if time.monotonic() > until or control.stops_within(1.0):
                control.notify(f"{self.name} is still used by other programs: running anyway")
                return described
            if not waiting:
                waiting = True
                control.notify(
                    f"{self.name}: waiting for {some(others, 'other process')} to end, {gibibytes(used)} GiB in use"
                )

    def _wait_for_memory(self, before_gb: float | None, count: int, control: RunControl) -> None:
        """Wait up to RETURN_S until the driver reports as much free memory as before the run."""
        begin = time.monotonic()
        while before_gb is not None:
            used = _used_gb({"gpus": machine.gpus(self.visible, count)})
            if used is None or used <= before_gb + RETURNED_GB:
                return
            if time.monotonic() > begin + RETURN_S or control.stops_within(_POLL_S):
                control.notify(
                    f"{self.name}: {gibibytes(used - before_gb)} GiB not freed {seconds(RETURN_S)} after a run"
                )
                return


def create(job: Job) -> rundir.RunDir:
    """Create the job's directory. An earlier run is archived under `.superseded/`."""
    if job.run.path.exists():
        rundir.archive(job.run)
    return rundir.create_at(job.run.path)


def _used_gb(described: dict[str, Any]) -> float | None:
    """Return the memory in use on all GPUs of a run in GiB; None if the driver does not report it."""
    used = [gpu.get("memory_used_before_gb") for gpu in rundir.gpus_of(described)]
    known = [float(value) for value in used if value is not None]
    return sum(known) if known and len(known) == len(used) else None


def local_slots(gpus: Sequence[str], mock: bool) -> list[LocalSlot]:
    """Return a slot for each GPU of `--gpu-ids`, or one default slot.

    Raise MissingError for an unknown GPU, SpecError for GPUs of different kinds: their runs cannot be compared.
    """
    if not gpus:
        return [LocalSlot("this machine")]
    if twice := [gpu for gpu in gpus if gpus.count(gpu) > 1]:
        raise SpecError(f"--gpu-ids: GPU {twice[0]} is listed twice; a GPU takes one run at a time")
    names = {}
    for gpu in gpus:
        if not re.fullmatch(r"\d+|(GPU|MIG)-[\w/-]+", gpu):
            raise SpecError(f"--gpu-ids {gpu}: name GPUs by number, for example --gpu-ids 0,1 (`nvidia-smi -L`)")
        described = None if mock else machine.gpu(gpu)
        if described is None and not mock:
            raise MissingError(f"--gpu-ids {gpu}: this machine has no such GPU (`nvidia-smi -L` lists them)")
        names[gpu] = (described or {}).get("name")
    if len(set(names.values())) > 1:
        kinds = ", ".join(f"{gpu} is {name}" for gpu, name in names.items())
        raise SpecError(f"--gpu-ids: {kinds}: a sweep needs GPUs of one kind; start one sweep per kind")
    return [LocalSlot(f"GPU {gpu}", gpu, shared=len(gpus) > 1) for gpu in gpus]

"""Where a run happens: a GPU of this machine. Sees to it that the GPU is free before a run, and free again after it."""

import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ftbench.core.units import GIB, gibibytes, seconds, some
from ftbench.errors import MissingError, SpecError
from ftbench.launch import family, runner
from ftbench.launch.runner import FinishedRun, Order
from ftbench.spec.experiment import Experiment
from ftbench.store import machine, rundir
from ftbench.sweep.jobs import Job

RETURNED_GB = 50 * 2**20 / GIB  # the memory is back when the driver shows this little more than before
RETURN_S = 30.0  # how long that is waited for
FREE_GB = 1.0  # more than this above the first sight, or another process: somebody else uses the GPU
FREE_S = 300.0  # how long a run waits for others to leave
_POLL_S = 0.1


@dataclass(slots=True)
class RunControl:
    """A run in a slot, as the sweep sees it: `stop_pipe` ends it, `deadline` (monotonic clock, s) is the sweep's,
    `say` takes an event for people, `show` a line on how far the run is."""

    stop_pipe: int
    deadline: float | None
    say: Callable[[str], None]
    show: Callable[[str], None]

    def stops_within(self, wait_s: float) -> bool:
        """Wait, and return whether the run is to end. Leave the byte to whoever ends it."""
        return bool(select.select([self.stop_pipe], [], [], wait_s)[0])


class GpuSlot(Protocol):
    """Somewhere a job can run, one at a time; `trains` says whether one may be on there just now."""

    name: str

    @property
    def trains(self) -> bool: ...

    def run(self, job: Job, source: bytes, control: RunControl) -> FinishedRun: ...


@dataclass(slots=True)
class LocalSlot:
    """A GPU of this machine, or its CPU. `visible` names it as CUDA_VISIBLE_DEVICES would; None is the first there is.
    `shared` marks runs beside which others ran on the machine's other GPUs."""

    name: str
    visible: str | None = None
    shared: bool = False
    trains: bool = field(default=True, init=False)
    _first_sight_gb: float | None = field(default=None, init=False)

    def run(self, job: Job, source: bytes, control: RunControl) -> FinishedRun:
        """Wait for the GPU, train, wait for the memory. Raise MissingError for a disk without room."""
        runner.check_disk(job.run.path.parent)
        return self.train(lambda: claim(job), Order(job.spec, source, job.sets), control)

    def train(self, claim_run: Callable[[], rundir.RunDir], order: Order, control: RunControl) -> FinishedRun:
        """Train in the directory that `claim_run` makes once the GPU is free."""
        family.end_orphans()
        before = self._when_free(order.spec, control)
        described = before | ({"shared_host": True} if self.shared else {})
        result = runner.carry_out(
            claim_run(), order, described, control.stop_pipe, lambda follower: control.show(follower.text()),
            None if self.visible is None else {"CUDA_VISIBLE_DEVICES": self.visible}, control.deadline,
        )  # fmt: skip
        if not order.spec.measure.share_gpu:
            self._wait_for_memory(_used_gb(before), order.spec.launch.gpus, control)
        return result

    def _when_free(self, spec: Experiment, control: RunControl) -> dict[str, Any]:
        """Return the machine before the run. Wait while somebody else uses the GPU, but not for ever: then the run says
        so in its warnings, and what it runs out of is not blamed on its batch."""
        until = time.monotonic() + FREE_S
        waiting = False
        while True:
            described = runner.describe(spec, self.visible)
            used = _used_gb(described)
            if self._first_sight_gb is None:
                self._first_sight_gb = used
            others = sum(gpu.get("foreign_processes") or 0 for gpu in rundir.gpus_of(described))
            crowded = used is not None and used > (self._first_sight_gb or 0.0) + FREE_GB
            if spec.measure.share_gpu or (not others and not crowded):
                return described
            if time.monotonic() > until or control.stops_within(1.0):
                control.say(f"{self.name} is still in use by others: running all the same")
                return described
            if not waiting:
                waiting = True
                control.say(
                    f"{self.name}: waiting for {some(others, 'other process')} and {gibibytes(used)} GiB to leave"
                )

    def _wait_for_memory(self, before_gb: float | None, count: int, control: RunControl) -> None:
        """Wait until the driver shows the memory as free as before, or RETURN_S have passed: then say so."""
        begin = time.monotonic()
        while before_gb is not None:
            used = _used_gb({"gpus": machine.gpus(self.visible, count)})
            if used is None or used <= before_gb + RETURNED_GB:
                return
            if time.monotonic() > begin + RETURN_S or control.stops_within(_POLL_S):
                control.say(
                    f"{self.name}: {gibibytes(used - before_gb)} GiB not returned {seconds(RETURN_S)} after a run"
                )
                return


def claim(job: Job) -> rundir.RunDir:
    """Make the job's directory anew; keep a run that was there under `.superseded/`."""
    if job.run.path.exists():
        rundir.archive(job.run)
    return rundir.create_at(job.run.path)


def _used_gb(described: dict[str, Any]) -> float | None:
    """Return the memory in use on all GPUs of a run together; None where the driver does not tell."""
    used = [gpu.get("memory_used_before_gb") for gpu in rundir.gpus_of(described)]
    known = [float(value) for value in used if value is not None]
    return sum(known) if known and len(known) == len(used) else None


def local_slots(gpus: Sequence[str], mock: bool) -> list[LocalSlot]:
    """Return one slot for each of `gpus` (as --gpus names them); the default one for none. Raise MissingError for a GPU
    that is not there, SpecError for GPUs of different kinds: their runs are no repeats of each other."""
    if not gpus:
        return [LocalSlot("this machine")]
    if twice := [gpu for gpu in gpus if gpus.count(gpu) > 1]:
        raise SpecError(f"--gpus: GPU {twice[0]} stands there twice: a GPU takes one run at a time")
    names = {}
    for gpu in gpus:
        described = None if mock else machine.gpu(gpu)
        if described is None and not mock:
            raise MissingError(f"--gpus {gpu}: no such GPU on this machine (`nvidia-smi -L` lists them)")
        names[gpu] = (described or {}).get("name")
    if len(set(names.values())) > 1:
        kinds = ", ".join(f"{gpu} is {name}" for gpu, name in names.items())
        raise SpecError(f"--gpus: {kinds}: one sweep runs on one kind of GPU; start a sweep for each")
    return [LocalSlot(f"GPU {gpu}", gpu, shared=len(gpus) > 1) for gpu in gpus]

"""Where a run happens: a GPU of this machine. Sees to it that the GPU is free before a run, and free again after it."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ftbench.core.units import GIB, gibibytes, seconds
from ftbench.errors import MissingError, SpecError
from ftbench.launch import runner
from ftbench.launch.follow import Follower
from ftbench.launch.runner import Order, Result
from ftbench.spec.experiment import Experiment
from ftbench.store import machine, rundir
from ftbench.sweep.jobs import Job

RETURNED_GB = 50 * 2**20 / GIB  # the memory is back when the driver shows this little more than before
RETURN_S = 30.0  # how long that is waited for
FREE_GB = 1.0  # more than this above the first sight, or another process: somebody else uses the GPU
FREE_S = 300.0  # how long a run waits for others to leave
_POLL_S = 0.1


@dataclass(slots=True)
class Watch:
    """A run in a place, as the sweep sees it: `asked` is the pipe that ends it, `deadline` (monotonic clock, s) the
    sweep's, `say` takes an event for people, `show` a line on where the
    run stands."""

    asked: int
    deadline: float | None
    say: Callable[[str], None]
    show: Callable[[str], None]


class Place(Protocol):
    """Somewhere a job can run, one at a time."""

    name: str

    def run(self, job: Job, source: bytes, watch: Watch) -> Result: ...


@dataclass(slots=True)
class Here:
    """A GPU of this machine, or its CPU. `visible` names it as CUDA_VISIBLE_DEVICES would; None is the first there is.
    `shared` marks runs beside which others ran on the machine's other GPUs."""

    name: str
    visible: str | None = None
    shared: bool = False
    _first_sight_gb: float | None = field(default=None, init=False)

    def run(self, job: Job, source: bytes, watch: Watch) -> Result:
        """Waits for the GPU, trains, waits for the memory. Raises MissingError for a disk without room."""
        runner.check_disk(job.run.path.parent)
        return self.train(lambda: claim(job), Order(job.spec, source, job.sets), watch)

    def train(self, claimed: Callable[[], rundir.RunDir], order: Order, watch: Watch) -> Result:
        """The same in the directory that `claimed` makes once the GPU is free."""
        before = self._when_free(order.spec, watch)
        described = before | ({"shared_host": True} if self.shared else {})
        environment = None if self.visible is None else {"CUDA_VISIBLE_DEVICES": self.visible}

        def on_tick(follower: Follower) -> None:
            watch.show(follower.text())

        result = runner.carry_out(claimed(), order, described, watch.asked, on_tick, environment, watch.deadline)
        self._wait_for_memory(_used_gb(before), watch)
        return result

    def _when_free(self, spec: Experiment, watch: Watch) -> dict[str, Any]:
        """The machine before the run. Waits while somebody else uses the GPU, but not for ever: then the run says so in
        its warnings, and what it runs out of is not blamed on its batch."""
        until = time.monotonic() + FREE_S
        told = False
        while True:
            described = runner.describe(spec, self.visible)
            used = _used_gb(described)
            if self._first_sight_gb is None:
                self._first_sight_gb = used
            others = rundir.first_gpu(described).get("foreign_processes") or 0
            crowded = used is not None and used > (self._first_sight_gb or 0.0) + FREE_GB
            if not others and not crowded:
                return described
            if time.monotonic() > until or _asked(watch.asked, 1.0):
                watch.say(f"{self.name} is still in use by others: running all the same")
                return described
            if not told:
                told = True
                watch.say(f"{self.name}: waiting for {others} other processes and {gibibytes(used)} GiB to leave")

    def _wait_for_memory(self, before_gb: float | None, watch: Watch) -> None:
        """Until the driver shows the memory as free as before, or RETURN_S have passed: then that is said."""
        begin = time.monotonic()
        while before_gb is not None:
            used = _used_gb({"gpus": machine.gpus(self.visible)})
            if used is None or used <= before_gb + RETURNED_GB:
                return
            if time.monotonic() > begin + RETURN_S or _asked(watch.asked, _POLL_S):
                watch.say(
                    f"{self.name}: {gibibytes(used - before_gb)} GiB not returned {seconds(RETURN_S)} after a run"
                )
                return


def claim(job: Job) -> rundir.RunDir:
    """The job's directory, new; a run that was there is kept under `.superseded/`."""
    if job.run.path.exists():
        rundir.supersede(job.run)
    return rundir.claim_at(job.run.path)


def _used_gb(described: dict[str, Any]) -> float | None:
    return rundir.first_gpu(described).get("memory_used_before_gb")


def _asked(pipe: int, wait_s: float) -> bool:
    """Waits, and says whether the run is to end. Leaves the byte to whoever ends it."""
    return bool(select.select([pipe], [], [], wait_s)[0])


def local_places(gpus: Sequence[str], mock: bool) -> list[Here]:
    """One place for each of `gpus` (as --gpus names them); the default one for none. Raises MissingError for a GPU that
    is not there, SpecError for GPUs of different kinds: their runs are no repeats of each other."""
    if not gpus:
        return [Here("this machine")]
    if twice := [gpu for gpu in gpus if gpus.count(gpu) > 1]:
        raise SpecError(f"--gpus: GPU {twice[0]} stands there twice: a GPU takes one run at a time")
    names = {}
    for gpu in gpus:
        found = None if mock else machine.gpu(gpu)
        if found is None and not mock:
            raise MissingError(f"--gpus {gpu}: no such GPU on this machine (`nvidia-smi -L` lists them)")
        names[gpu] = (found or {}).get("name")
    if len(set(names.values())) > 1:
        told = ", ".join(f"{gpu} is {name}" for gpu, name in names.items())
        raise SpecError(f"--gpus: {told}: one sweep runs on one kind of GPU; start a sweep for each")
    return [Here(f"GPU {gpu}", gpu, shared=len(gpus) > 1) for gpu in gpus]

"""Cells as array tasks of a Slurm cluster, on a disk that its nodes share. The run directories say what is done, as
ever; a task that is in the queue when a sweep begins is one of an earlier sitting, and is waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGTERM
from typing import Any

from ftbench.errors import FtbenchError, MissingError, SpecError
from ftbench.launch import runner
from ftbench.launch.follow import Follower
from ftbench.launch.runner import FinishedRun
from ftbench.spec import slurm
from ftbench.spec.experiment import Experiment
from ftbench.store import rundir
from ftbench.sweep.execute import remote, slurm_obstacle
from ftbench.sweep.execute.gpu_slots import RunControl
from ftbench.sweep.execute.slurm_queue import Queue, QueueEntry, Task, machine_key, running
from ftbench.sweep.jobs import Job, read_standing

NODE = "node.json"  # what a node said of itself
_POLL_S = 0.5
_CANCEL_S = 60.0
_OBSTACLES = 2  # looks after which what stands in the way of a task is taken to stay
_LONGEST_END = 12  # looks at the queue at a task whose end its node does not confirm: a minute


def cluster_slots(
    on: str, spec: Experiment, source: Path, folder: Path, stack: ExitStack, say: Callable[[str], None]
) -> tuple[Sequence[SlurmSlot], dict[str, Any]]:
    """Return as many slots as cells may be in the queue, and the machine.json of a node. `source` is the spec's file,
    `folder` the experiment's; `say` hears what is waited for. Raise SpecError for a slurm.yaml that is wrong,
    MissingError without Slurm."""
    settings = slurm.load_settings(_settings_file(on, source))
    queue = Queue(settings, folder)
    described = _described(queue, spec, say)
    stack.callback(queue.tidy)
    adopted, gpu = queue.tasks(), runner.gpu_name(described)
    return [SlurmSlot(f"task {number + 1}", queue, gpu, adopted) for number in range(settings.tasks)], described


def _settings_file(on: str, source: Path) -> Path:
    name = on.removeprefix("slurm").removeprefix(":")
    files = [Path(name)] if name else [source.parent / slurm.NAME, Path(slurm.NAME)]
    if path := next((path for path in files if path.exists()), None):
        return path
    raise SpecError(
        f"--on {on}: there is no {' and no '.join(map(str, dict.fromkeys(files)))}: docs/how-to/cluster.md has one"
    )


def _described(queue: Queue, spec: Experiment, say: Callable[[str], None]) -> dict[str, Any]:
    """Return the machine.json of a node, from a task that looks there: once for a folder and what it asks for."""
    path = queue.folder / NODE
    key = machine_key(queue.settings, spec.launch.framework if spec.launch.mock == "off" else "mock")
    known = rundir.read_json(path)
    if known.get("key") == key:
        return dict(known["described"])
    (task,) = queue.submit([{"describe": spec.model_dump(mode="json")}])
    try:
        _wait(queue, task, say)
        outcome = task.outcome
    finally:
        queue.cancel(task)
    if "described" in outcome:
        rundir.write_json(path, {"key": key, "described": outcome["described"]})
        return dict(outcome["described"])
    words = outcome.get("error") or task.last_words
    if not words and queue.is_refused(task):
        raise MissingError("--on slurm: no node starts a task (`scontrol show node`, and slurmd's log there, say why)")
    if not words:
        raise MissingError(
            f"--on slurm: a node was to describe itself in {queue.folder} and left nothing there: --out must be on a "
            "disk that this machine and the nodes share"
        )
    raise MissingError(f"--on slurm: a node cannot run ftbench: {words}")


def _wait(queue: Queue, task: Task, say: Callable[[str], None]) -> None:
    """Wait until a task has left something or will leave nothing more, and say what it waits for. Raise MissingError
    where it cannot begin before somebody changes the cluster or what is asked of it."""
    seen: QueueEntry | None = None
    reason, endings, obstacles = "None", 0, 0
    while not (task.outcome or queue.is_gone(task) or queue.is_refused(task) or endings > _LONGEST_END):
        entry = queue.entry(task)
        if entry is not None and entry is not seen:
            queue.release(task)
            endings += entry.state == "COMPLETING"  # for ever where the node is gone whose word is waited for
            if entry.state == "PENDING" and entry.reason not in ("None", reason):
                say(f"a node is to describe itself, and its task {entry.text}; Ctrl-C takes it back")
            seen, reason = entry, entry.reason
            obstacle = slurm_obstacle.obstacle(queue, task)
            obstacles = obstacles + 1 if obstacle else 0
            if obstacles > _OBSTACLES:
                raise MissingError(f"--on slurm: {obstacle}")
        time.sleep(_POLL_S)


@dataclass(slots=True, eq=False)
class SlurmSlot:
    """A cell in Slurm's queue. All cells train on `gpu`; `adopted` are an earlier sitting's tasks by their runs."""

    name: str
    queue: Queue
    gpu: str | None
    adopted: dict[str, Task]
    trains: bool = field(default=False, init=False)

    def run(self, job: Job, source: bytes, control: RunControl) -> FinishedRun:
        """Submit a task, or take the one that is there, and wait for its run."""
        task = self.adopted.pop(job.run.run_id, None)
        if job.run.path.exists():
            if task is not None and read_standing(job.run).done:  # since the plan was made
                return remote.finished(job.run)
            rundir.archive(job.run)
            task = None
        try:
            return self._follow(job, task or self._submit(job, source, control), control)
        finally:
            self.trains = False

    def _follow(self, job: Job, task: Task, control: RunControl) -> FinishedRun:
        follower: Follower | None = None
        while not job.run.state.exists():
            _raise_for(task)
            if self.queue.is_gone(task) and not job.run.state.exists():
                return self._lost(job, task)
            if self.queue.is_away():
                control.say("the controller of Slurm does not answer: what runs goes on, the sweep waits for it")
            entry = self.queue.entry(task)
            self.trains = entry is not None and entry.state == "RUNNING"
            if reason := self.queue.release(task):
                if self.queue.is_refused(task):
                    self.queue.cancel(task)
                    return self._ended(job, "error", f"no node of Slurm's starts task {task.name} ({reason})")
                control.say(f"Slurm holds {task.name} back ({reason}): released")
            made = running(job.run.path.parent, job.run.run_id)
            if follower is None or follower.run != made:
                follower = Follower(made)
            follower.poll()
            control.show(f"{entry.text if entry else 'submitted'}: {follower.text()}")
            late = control.deadline is not None and time.monotonic() > control.deadline
            if late or control.stops_within(_POLL_S):
                return self._cancelled(job, task)
        return remote.finished(job.run)

    def _submit(self, job: Job, source: bytes, control: RunControl) -> Task:
        order = {
            "run": job.run.run_id, "spec": job.spec.model_dump(mode="json"), "sets": list(job.sets), "gpu": self.gpu,
            "shared": "--exclusive" not in self.queue.settings.options,
        }  # fmt: skip
        return self.queue.enter(order, source, control.stops_within)

    def _lost(self, job: Job, task: Task) -> FinishedRun:
        """Write down that a task is gone without a result, so that the plan begins the run again."""
        words = f": {task.last_words}" if task.last_words else ""
        reason = f"task {task.name} left Slurm's queue without a result (scancel, preemption, a lost node){words}"
        return self._ended(job, "error", reason, signal=int(SIGTERM))

    def _cancelled(self, job: Job, task: Task) -> FinishedRun:
        self.queue.cancel(task)
        until = time.monotonic() + _CANCEL_S
        while not job.run.state.exists() and not self.queue.is_gone(task) and time.monotonic() < until:
            time.sleep(_POLL_S)
        return self._ended(job, "interrupted", "interrupted by a signal, or the sweep's time budget ran out")

    def _ended(self, job: Job, state: str, reason: str, **more: Any) -> FinishedRun:
        try:
            return remote.ended(rundir.create_at(job.run.path), state, reason, **more)
        except FileExistsError:  # it came after all
            return remote.finished(job.run)


def _raise_for(task: Task) -> None:
    """Raise what ended a task before its run."""
    if "error" in (outcome := task.outcome):
        kind = {SpecError.exit_code: SpecError, MissingError.exit_code: MissingError}.get(outcome["code"], FtbenchError)
        raise kind(outcome["error"])

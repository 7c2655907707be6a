"""`sweep --on slurm`: each cell is an `sbatch` job on a disk that the nodes share.

Jobs are found again by their names, so a sweep that was killed continues with the jobs that are still in the queue.
A job is `python -m ftbench.cluster.slurm FOLDER`. It trains in that folder and moves the run to its final path at the
end. A job that Slurm requeues (preemption, a lost node) starts the run again.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGTERM
from typing import Any

from ftbench.cluster import remote
from ftbench.cluster.slurm_queue import ORDER, OUTCOME, Queue
from ftbench.errors import FtbenchError, MissingError, SpecError
from ftbench.launch import runner
from ftbench.launch.progress import Progress
from ftbench.launch.runner import FinishedRun, Order
from ftbench.spec import slurm
from ftbench.spec.experiment import Experiment
from ftbench.store import rundir
from ftbench.store.rundir import RunDir
from ftbench.sweep.gpu_slots import RunControl
from ftbench.sweep.output.live import UNFINISHED, unfinished
from ftbench.sweep.plan.base import Job, read_standing

NODE = "node"  # name of the job that describes a node, and of the file with its result
SHARED_S = 30.0  # longest wait for a file of another node to appear on the shared disk
CANCEL_S = 60.0
_POLL_S = 0.5


def slots(
    on: str, spec: Experiment, source: Path, folder: Path, notify: Callable[[str], None]
) -> tuple[Sequence[SlurmSlot], dict[str, Any]]:
    """Return one slot per job that may be in the queue, and the machine.json of a node."""
    settings = slurm.load_settings(_settings_file(on, source))
    queue = Queue(settings, folder)
    described = _describe_node(queue, spec, notify)
    gpu = runner.gpu_name(described)
    return [SlurmSlot(f"job {number + 1}", queue, gpu) for number in range(settings.tasks)], described


def _settings_file(on: str, source: Path) -> Path:
    kind, _, name = on.partition(":")
    if kind != "slurm":
        raise SpecError(f"--on {on}: allowed are slurm (with a slurm.yaml), and slurm:FILE")
    files = [Path(name)] if name else [source.parent / slurm.NAME, Path(slurm.NAME)]
    if path := next((path for path in files if path.exists()), None):
        return path
    raise SpecError(
        f"--on {on}: {' and '.join(map(str, dict.fromkeys(files)))} not found: docs/how-to/cluster.md has an example"
    )


def _describe_node(queue: Queue, spec: Experiment, notify: Callable[[str], None]) -> dict[str, Any]:
    """Return the machine.json of a node, written by a job. The result is kept for later sweeps of the folder."""
    launcher = spec.launch.framework if spec.launch.mock == "off" else "mock"
    key = json.dumps([queue.settings.model_dump(mode="json", exclude={"tasks", "time"}), launcher])
    file = queue.folder / UNFINISHED / f"{NODE}.json"
    known = rundir.read_json(file)
    if known.get("key") == key:
        return dict(known["described"])
    job = queue.submit(NODE, {"describe": spec.model_dump(mode="json")})
    try:
        outcome = _wait_for_outcome(queue, notify)
    finally:
        queue.cancel(job)
    if "described" in outcome:
        rundir.write_json(file, {"key": key, "described": outcome["described"]})
        return dict(outcome["described"])
    if reason := outcome.get("error") or queue.last_line(NODE):
        raise MissingError(f"--on slurm: a node cannot run ftbench: {reason}")
    raise MissingError(
        f"--on slurm: the job that describes a node wrote nothing to {queue.folder}: --out must be on a disk that this "
        "machine and the nodes share"
    )


def _wait_for_outcome(queue: Queue, notify: Callable[[str], None]) -> dict[str, Any]:
    """Wait for the job that describes a node. Return an empty outcome if it ends without a result."""
    text = ""
    while not (outcome := queue.outcome(NODE)):
        entry = queue.status(NODE)
        if entry is None or not entry[1].alive:
            return dict(_eventually(lambda: queue.outcome(NODE)))
        if entry[1].blocked:
            raise MissingError(
                f"--on slurm: Slurm does not start the job ({entry[1].reason}); see `scontrol show job {entry[0]}`, "
                "and change partition, time or options in slurm.yaml"
            )
        if entry[1].state == "PENDING" and entry[1].text != text:
            text = entry[1].text
            notify(f"the job that describes a node is {text}; Ctrl-C cancels it")
        time.sleep(_POLL_S)
    return outcome


def _eventually(read: Callable[[], Any]) -> Any:
    """Return the first true value of `read`, or its last value after SHARED_S seconds."""
    end = time.monotonic() + SHARED_S
    while not (value := read()) and time.monotonic() < end:
        time.sleep(_POLL_S)
    return value


@dataclass(slots=True, eq=False)
class SlurmSlot:
    """One job at a time in Slurm's queue. All cells must train on the GPU `gpu`."""

    name: str
    queue: Queue
    gpu: str | None
    trains: bool = field(default=False, init=False)

    def run(self, job: Job, source: bytes, control: RunControl) -> FinishedRun:
        """Submit a job, or continue with the one of an earlier session, and wait for its run."""
        run_id, name = job.run.run_id, self.queue.name(job.run.run_id)
        if name in self.queue.earlier and read_standing(job.run).done:  # since the plan was made
            return remote.finished(job.run)
        self.queue.earlier.discard(name)
        if job.run.path.exists():
            rundir.archive(job.run)
        try:
            entry = self.queue.status(run_id)
            alive = entry is not None and entry[1].alive
            order = {} if alive else self._order(job, source)
            number = entry[0] if entry and alive else self.queue.submit(run_id, order, control.stops_within)
            result = self._follow(job, number, control)
        finally:
            self.trains = False
        self.queue.tidy(run_id)
        return result

    def _order(self, job: Job, source: bytes) -> dict[str, Any]:
        return {
            "run": job.run.run_id, "spec": job.spec.model_dump(mode="json"), "sets": list(job.sets), "gpu": self.gpu,
            "source": source.decode(errors="replace"), "shared": "--exclusive" not in self.queue.settings.options,
        }  # fmt: skip

    def _follow(self, job: Job, number: str, control: RunControl) -> FinishedRun:
        progress: Progress | None = None
        while not job.run.state.exists():
            entry = self.queue.status(job.run.run_id)
            self.trains = entry is not None and entry[1].state == "RUNNING"
            if entry is None or not entry[1].alive:
                return self._without_result(job, number, entry[1].state if entry else "UNKNOWN", control)
            if entry[1].blocked:
                self.queue.cancel(number)
                return _record(job.run, "error", f"Slurm does not start job {number} ({entry[1].reason})")
            path = unfinished(job.run.path.parent, job.run.run_id)
            if progress is None or progress.run.path != path:
                progress = Progress(RunDir(path))
            progress.poll()
            control.show(f"{entry[1].text}: {progress.text()}")
            late = control.deadline is not None and time.monotonic() > control.deadline
            if late or control.stops_within(_POLL_S):
                return self._cancel(job, number)
        return remote.finished(job.run)

    def _without_result(self, job: Job, number: str, state: str, control: RunControl) -> FinishedRun:
        """Record a job that has ended before it moved its run to its final path."""
        run_id = job.run.run_id
        _eventually(lambda: job.run.state.exists() or self.queue.outcome(run_id))
        if job.run.state.exists():
            return remote.finished(job.run)
        if (entry := self.queue.status(run_id)) and entry[1].alive:  # requeued
            return self._follow(job, number, control)
        state = self.queue.final_state(number) if state == "UNKNOWN" else state
        outcome, name = self.queue.outcome(run_id), f"Slurm job {number}"
        if "error" in outcome:
            kinds = {SpecError.exit_code: SpecError, MissingError.exit_code: MissingError}
            raise kinds.get(outcome["code"], FtbenchError)(outcome["error"])
        if state == "TIMEOUT":
            return _record(job.run, "timeout", f"{name}: time limit reached; raise `time` in slurm.yaml")
        if state == "OUT_OF_MEMORY":
            reason = f"{name}: out of host memory; raise --mem in the options of slurm.yaml"
            return _record(job.run, "oom", reason, oom={"kind": "kernel"})
        line = self.queue.last_line(run_id)
        reason = f"{name} ended without a result ({state}){f': {line}' if line else ''}"
        return _record(job.run, "error", reason, signal=int(SIGTERM))  # the plan retries it

    def _cancel(self, job: Job, number: str) -> FinishedRun:
        self.queue.cancel(number)
        until = time.monotonic() + CANCEL_S
        while not job.run.state.exists() and time.monotonic() < until:
            entry = self.queue.status(job.run.run_id)
            if entry is None or not entry[1].alive:
                break
            time.sleep(_POLL_S)
        return _record(job.run, "interrupted", "interrupted by a signal, or the sweep's time budget ran out")


def _record(run: RunDir, state: str, reason: str, **more: Any) -> FinishedRun:
    """Create the directory of a run without a result, unless the result has arrived."""
    try:
        return remote.ended(rundir.create_at(run.path), state, reason, **more)
    except FileExistsError:
        return remote.finished(run)


def main(folder: Path) -> int:
    """Execute the order in a job's folder on this node, and return the exit code."""
    order = rundir.read_json(folder / ORDER)
    try:
        if "describe" in order:
            rundir.write_json(folder / OUTCOME, {"described": remote.describe(order["describe"])})
            return 0
        return _train(folder, order)
    except FtbenchError as error:
        rundir.write_json(folder / OUTCOME, {"error": str(error), "code": error.exit_code})
        return error.exit_code


def _train(folder: Path, order: dict[str, Any]) -> int:
    destination, own = RunDir(folder.parents[1] / order["run"]), RunDir(folder / order["run"])
    if destination.state.exists():
        print("the run is already finished")
        return 0
    if own.path.exists():  # left by an attempt that was requeued
        rundir.archive(own, destination)
    spec = Experiment.model_validate(order["spec"])
    request = Order(spec, order["source"].encode(), order["sets"], folder.parents[2])
    result = remote.train(lambda: rundir.create_at(own.path), request, order["gpu"], order["shared"], print)
    if read_standing(own).done and not read_standing(own).killed:
        with suppress(OSError):  # not empty: the run is there already
            os.rename(own.path, destination.path)
            return result.exit_code
    rundir.archive(own, destination)
    print(f"{result.summary.state}: {result.summary.reason}")
    return FtbenchError.exit_code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

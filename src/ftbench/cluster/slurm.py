"""`sweep --on slurm`: each cell is an `sbatch --wait` job. All nodes share a disk.

A job runs `python -m ftbench.cluster.slurm FOLDER`. FOLDER is `.slurm/<run>/` in the experiment's folder. The job
trains in FOLDER, and then moves the run to its final path. If Slurm requeues the job (preemption, a lost node), the run
starts again. After a sweep was killed, the next session submits the unfinished cells again. Jobs of one cell have the
same name and run one after the other (`--dependency=singleton`). A job ends immediately if the run is already finished.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGTERM
from typing import Any

from ftbench.cluster import SETTINGS, SlurmSettings, load_settings, remote
from ftbench.core.processes import run_program
from ftbench.errors import FtbenchError, MissingError, SpecError
from ftbench.launch import runner
from ftbench.launch.process import last_line
from ftbench.launch.process_tree import die_with_parent
from ftbench.launch.progress import Progress
from ftbench.launch.runner import FinishedRun, RunRequest
from ftbench.spec.experiment import Experiment
from ftbench.store import rundir
from ftbench.store.rundir import RunDir
from ftbench.sweep.gpu_slots import RunControl
from ftbench.sweep.output.status import UNFINISHED, unfinished
from ftbench.sweep.plan.base import Job, read_status

ORDER, OUTCOME, SCRIPT, LOG, ERRORS = "order.json", "outcome.json", "job.sh", "log.txt", "sbatch.txt"
NODE = "node"  # name of the job that describes a node, and of the file with its result
SHARED_S = 30.0  # longest wait for a file of another node to appear on the shared disk
AWAY_S = 1800.0  # longest time without an answer of Slurm's controller
_RETRY_S = 30.0
_POLL_S = 0.5
_ANSWER_S = 60.0  # longest wait for scancel and scontrol
# Errors of sbatch while the controller is not reachable.
_AWAY = ("Unable to contact slurm controller", "Socket timed out")


def slots(
    on: str, spec: Experiment, source: Path, folder: Path, notify: Callable[[str], None]
) -> tuple[Sequence[SlurmSlot], dict[str, Any]]:
    """Return one slot per job that may be queued at the same time, and the content of a node's machine.json."""
    settings, folder = load_settings(on, source), folder.resolve()
    described = _describe_node(settings, folder, spec, notify)
    gpu = runner.gpu_name(described)
    return [SlurmSlot(f"job {number + 1}", settings, gpu) for number in range(settings.tasks)], described


def _describe_node(
    settings: SlurmSettings, folder: Path, spec: Experiment, notify: Callable[[str], None]
) -> dict[str, Any]:
    """Return the content of a node's machine.json, from a job on the node or from an earlier sweep."""
    launcher = spec.launch.framework if spec.launch.mock == "off" else "mock"
    key = json.dumps([settings.model_dump(mode="json", exclude={"tasks", "time"}), launcher, spec.launch.gpus])
    file, job = folder / UNFINISHED / f"{NODE}.json", folder / UNFINISHED / NODE
    known = rundir.read_json(file)
    if known.get("key") == key:
        return dict(known["described"])
    notify("waiting for the job that describes a node; `squeue --me` shows it, Ctrl-C cancels it")
    with _submitted(settings, job, {"describe": spec.model_dump(mode="json")}) as sbatch:
        while sbatch.poll() is None and not (job / OUTCOME).exists():
            time.sleep(_POLL_S)
        outcome: dict[str, Any] = _wait_for(lambda: rundir.read_json(job / OUTCOME))
        if not outcome:
            _require_accepted(job, sbatch)
    if "described" in outcome:
        rundir.write_json(file, {"key": key, "described": outcome["described"]})
        return dict(outcome["described"])
    if reason := outcome.get("error") or last_line(job / LOG):
        raise MissingError(f"--on slurm: a node cannot run ftbench: {reason}")
    raise MissingError(
        f"--on slurm: the job that describes a node wrote nothing to {folder}: --out must be on a disk that this "
        "machine and the nodes share"
    )


@contextmanager
def _submitted(settings: SlurmSettings, folder: Path, order: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    """Submit a job, and yield the process of `sbatch --wait`. The process ends when the job ends. An exception in the
    `with` block cancels the job."""
    python = shlex.quote(settings.python or sys.executable)
    task = f"{python} -P -m ftbench.cluster.slurm {shlex.quote(str(folder))}"
    with rundir.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / OUTCOME).unlink(missing_ok=True)
    rundir.write_text(folder / SCRIPT, f"#!/bin/bash\n{settings.preamble}\nexec {task}\n")
    rundir.write_json(folder / ORDER, order)
    name = f"ftbench-{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}"
    given = {"partition": settings.partition, "time": settings.time, "gres": settings.gres}
    command = [
        "sbatch", *settings.options, "--wait", "--parsable", "--requeue", "--dependency=singleton",
        f"--job-name={name}", f"--output={folder / LOG}", "--open-mode=append",
        *(f"--{key}={value}" for key, value in given.items() if value is not None), str(folder / SCRIPT),
    ]  # fmt: skip
    try:
        with (folder / ERRORS).open("w") as errors:
            sbatch = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True,
                start_new_session=True, preexec_fn=die_with_parent,
            )  # fmt: skip
    except OSError as error:
        raise MissingError(f"--on slurm: sbatch: {error.strerror}: start the sweep where `sbatch` works") from None
    with sbatch:
        try:
            yield sbatch
        except BaseException as error:
            if problem := _cancel(name):
                error.add_note(problem)
            raise
        finally:
            sbatch.kill()


def _cancel(name: str) -> str:
    """Cancel the jobs with a name. Return an error message if this fails, else an empty string."""
    command = ["scancel", "--me", f"--name={name}"]
    with suppress(OSError):
        if run_program(command, _ANSWER_S).returncode == 0:
            return ""
    return f"scancel failed and its job may still run: {' '.join(command)}"


def _require_accepted(folder: Path, sbatch: subprocess.Popen[str]) -> str:
    """Return the number of the job. Raise SpecError if sbatch refused the job. Raise _UnreachableError if Slurm's
    controller did not answer."""
    assert sbatch.stdout is not None
    if number := sbatch.stdout.read().strip().partition(";")[0]:
        return number
    reason = last_line(folder / ERRORS).removeprefix("sbatch: error: ")
    if any(text in reason for text in _AWAY):
        raise _UnreachableError(f"--on slurm: {reason}")
    raise SpecError(f"--on slurm: sbatch refuses the job: {reason}")


def _wait_for(read: Callable[[], Any]) -> Any:
    """Call `read` for at most SHARED_S seconds, until its value is not empty or false. Return the last value."""
    end = time.monotonic() + SHARED_S
    while not (value := read()) and time.monotonic() < end:
        time.sleep(_POLL_S)
    return value


class _UnreachableError(MissingError):
    """Raised if the controller of Slurm is not reachable."""


@dataclass(slots=True)
class SlurmSlot:
    """A slot that runs one Slurm job at a time. `gpu` is the GPU model that each node must have."""

    name: str
    settings: SlurmSettings
    gpu: str | None
    trains: bool = field(default=False, init=False)

    def run(self, job: Job, source: bytes, control: RunControl) -> FinishedRun:
        """Submit a job and wait for the result. If the controller is not reachable, submit the job again later."""
        run = job.run
        if run.path.exists():
            rundir.archive(run)
        order = {
            "run": run.run_id, "spec": job.spec.model_dump(mode="json"), "sets": list(job.sets), "gpu": self.gpu,
            "source": source.decode(errors="replace"), "shared": "--exclusive" not in self.settings.options,
        }  # fmt: skip
        folder, end = run.path.parent.resolve() / UNFINISHED / run.run_id, time.monotonic() + AWAY_S
        while True:
            try:
                with _submitted(self.settings, folder, order) as sbatch:
                    return self._wait(job, folder, sbatch, control)
            except _UnreachableError:
                if time.monotonic() > end or control.stops_within(_RETRY_S):
                    raise
            except InterruptedError as error:
                reasons = ["interrupted, or the sweep's time budget ran out", *getattr(error, "__notes__", ())]
                return remote.record(run, job.spec, "interrupted", "; ".join(reasons))
            finally:
                self.trains = False

    def _wait(self, job: Job, folder: Path, sbatch: subprocess.Popen[str], control: RunControl) -> FinishedRun:
        run = job.run
        progress: Progress | None = None
        while sbatch.poll() is None and not run.state.exists():
            path = unfinished(run.path.parent, run.run_id)
            self.trains = path.exists()
            if progress is None or progress.run.path != path:
                progress = Progress(RunDir(path))
            progress.poll()
            control.show(progress.text() if self.trains else "waiting in Slurm's queue")
            late = control.deadline is not None and time.monotonic() > control.deadline
            if late or control.stops_within(_POLL_S):
                raise InterruptedError
        if run.state.exists():
            return remote.finished(run)
        return _without_result(run, job.spec, self.gpu, folder, _require_accepted(folder, sbatch))


def _without_result(run: RunDir, spec: Experiment, gpu: str | None, folder: Path, number: str) -> FinishedRun:
    """Record and return the result of a job that ended without a state file in its run directory."""
    _wait_for(lambda: run.state.exists() or (folder / OUTCOME).exists())
    outcome = rundir.read_json(folder / OUTCOME)
    if "error" in outcome and not run.state.exists():
        kinds = {SpecError.exit_code: SpecError, MissingError.exit_code: MissingError}
        raise kinds.get(outcome["code"], FtbenchError)(outcome["error"])
    shown = ""
    with suppress(OSError):
        shown = run_program(["scontrol", "show", "job", number, "-o"], _ANSWER_S).stdout
    state, name = shown.partition("JobState=")[2].partition(" ")[0] or "UNKNOWN", f"Slurm job {number}"
    if state == "TIMEOUT":
        return remote.record(run, spec, "timeout", f"{name}: time limit reached; raise `time` in {SETTINGS}", gpu)
    if state == "OUT_OF_MEMORY":
        reason = f"{name}: out of host memory; raise --mem in the options of {SETTINGS}"
        return remote.record(run, spec, "oom", reason, gpu, oom={"kind": "kernel"})
    line = last_line(folder / LOG)
    reason = f"{name} ended without a result ({state}){f': {line}' if line else ''}"
    return remote.record(run, spec, "error", reason, gpu, signal=int(SIGTERM))  # the plan retries it


# --- on the node -----------------------------------------------------------------------------------------------------


def main(folder: Path) -> int:
    """Execute the job described by order.json in `folder`, and return the exit code."""
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
    """Train in the job's folder, move the run to its final path, and return the exit code."""
    destination, own = RunDir(folder.parents[1] / order["run"]), RunDir(folder / order["run"])
    if destination.state.exists():
        print("the run is already finished")
        return 0
    if own.path.exists():  # left by an attempt that was requeued
        rundir.archive(own, destination)
    spec = Experiment.model_validate(order["spec"])
    request = RunRequest(spec, order["source"].encode(), order["sets"], folder.parents[2])
    result = remote.train(own.path, request, order["gpu"], order["shared"])
    if read_status(own).done and not read_status(own).killed:
        if rundir.read_json(destination.state).get("state") == "interrupted":  # Ctrl-C came before the end of the job
            rundir.archive(destination)
        with suppress(OSError):  # the destination already has the run
            os.rename(own.path, destination.path)
            return result.exit_code
    rundir.archive(own, destination)
    print(f"{result.summary.state}: {result.summary.reason}")
    return FtbenchError.exit_code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

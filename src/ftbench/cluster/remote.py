"""Functions for Slurm and Ray: describe a node, train on a node, and record a run that ended without a result."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from ftbench.errors import FtbenchError, MissingError
from ftbench.launch import process, runner
from ftbench.launch.runner import FinishedRun, RunRequest
from ftbench.spec.experiment import Experiment
from ftbench.store import rundir, summary
from ftbench.store.rundir import RunDir
from ftbench.sweep.gpu_slots import LocalSlot, RunControl


def describe(values: dict[str, Any]) -> dict[str, Any]:
    """Return the content of machine.json for this node. `values` is the spec as a dictionary."""
    return runner.describe(Experiment.model_validate(values))


def train(path: Path, request: RunRequest, gpu: str | None, shared: bool) -> FinishedRun:
    """Train on this node in the new directory `path`, and return the result. SIGTERM ends the run.

    Raise MissingError if the node's GPU is not `gpu`, because the runs of a sweep must be comparable.
    """
    if (name := runner.gpu_name(runner.describe(request.spec))) != gpu:
        raise MissingError(
            f"this node has {name or 'no GPU'}, but the sweep uses {gpu or 'none'}: request one kind of GPU (Slurm: "
            "gres, or options: [--constraint=…])"
        )
    with process.signals() as stop_pipe:
        control = RunControl(stop_pipe, None, lambda text: None)
        return LocalSlot("GPU", shared=shared).train(rundir.create_at(path), request, control)


def record(run: RunDir, spec: Experiment, state: str, reason: str, gpu: str | None = None, **more: Any) -> FinishedRun:
    """Write the files of a run without a final state. Return the run's summary and code. `gpu` is the nodes' GPU."""
    with suppress(FileExistsError):
        rundir.create_at(run.path)
    if not rundir.read_json(run.state).get("ended_at"):
        document = {"schema": rundir.SCHEMA, "state": state, "reason": reason, "ended_at": rundir.now(), **more}
        rundir.write_json(run.spec_json, {"schema": rundir.SCHEMA, **spec.model_dump(mode="json")})
        if gpu:
            rundir.write_json(run.machine, {"gpus": [{"name": gpu}]})
        rundir.write_json(run.state, document)
        run.reserve.unlink(missing_ok=True)
    return finished(run)


def finished(run: RunDir) -> FinishedRun:
    """Return the result of a run that has ended: its summary and exit code."""
    summarised = summary.summarise(run)
    return FinishedRun(run, summarised, 0 if summarised.state == "ok" else FtbenchError.exit_code)

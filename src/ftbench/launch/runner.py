"""Execute one run: check the spec, create the run directory, start and watch the worker, and write the summary."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftbench.core.rows import RunSummary
from ftbench.errors import MissingError, SpecError
from ftbench.launch import checks, outcome, process, ranks
from ftbench.launch.checks import launcher_of
from ftbench.launch.progress import Progress, Watchdog
from ftbench.spec import identity
from ftbench.spec.experiment import Experiment, resolve
from ftbench.spec.load import load
from ftbench.spec.model_argument import spec_text
from ftbench.store import machine, rundir, summary
from ftbench.store.rundir import RunDir

SUMMARY_S = 60.0  # longest wait for node 0's summary after the ranks have ended


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A finished run and the exit code of its command."""

    run: RunDir
    summary: RunSummary
    exit_code: int

    def document(self) -> dict[str, Any]:
        """Return the document for `--json`."""
        figures = summary.as_dict(self.summary)
        return {"run_dir": str(self.run.path), "state": self.summary.state, "summary": figures}


@dataclass(frozen=True, slots=True)
class RunRequest:
    """The input of a run: the resolved spec, the content of its file, and the `--set` changes.

    `store` is the folder of all results. If it is None, use the parent of the experiment's folder.
    """

    spec: Experiment
    source: bytes
    sets: Sequence[str]
    store: Path | None = None


def run(
    spec_path: Path,
    sets: Sequence[str],
    out: Path,
    on_start: Callable[[RunDir], None] = lambda run: None,
    on_tick: Callable[[Progress], None] = lambda progress: None,
    on_checked: Callable[[Experiment, dict[str, Any]], None] = lambda spec, described: None,
) -> FinishedRun:
    """Train a spec once in a new run directory, and return the result.

    Args:
        out: Folder of all results. `sets` are the `--set` changes.
        on_start: Called with the new run directory. `on_tick` is called about twice per second with the progress.
        on_checked: Called with the resolved spec and the content of machine.json, before the directory is created.

    Raises:
        SpecError: If the spec is invalid.
        MissingError: If the spec cannot run on this machine.
    """
    spec = load(spec_path, sets)
    described = describe(spec)
    spec = resolve(spec, checks.capability(described))
    checks.check(spec, described, spec.launch.nodes)
    checks.check_hub(spec)
    checks.check_disk(out)
    on_checked(spec, described)
    if node := ranks.node_number(spec):
        return _join(spec, node, described, on_start)
    created = rundir.create(out, experiment(spec), identity.slug(spec, gpu_name(described)))
    on_start(created)
    with process.signals() as signals_pipe:
        return execute(created, RunRequest(spec, spec_text(spec_path), sets), described, signals_pipe, on_tick)


def _join(spec: Experiment, node: int, described: dict[str, Any], on_start: Callable[[RunDir], None]) -> FinishedRun:
    """Run the ranks of this node in the run directory of node 0. Wait for the summary of node 0, and return the result.

    Raise MissingError if the directory is not reachable. Raise SpecError if node 0 trains another spec.
    """
    from ftbench.cluster.nodes import receive_path

    run = RunDir(receive_path(node))
    if not (values := rundir.read_json(run.spec_json)):
        raise MissingError(f"{run.path}: not found on this machine; all nodes need a shared disk for --out")
    known = {key: value for key, value in values.items() if key in Experiment.model_fields}
    if identity.fingerprint(Experiment.model_validate(known)) != identity.fingerprint(spec):
        raise SpecError("node 0 trains another spec: give all nodes the same ftbench, the same file and the same --set")
    rundir.write_json(run.path / f"machine.node{node}.json", described)
    on_start(run)
    launcher, log = launcher_of(spec), run.path / f"log.node{node}.txt"
    with process.signals() as signals_pipe:
        process.run_child(launcher.command(spec, run), launcher.environment(os.environ, spec), log, signals_pipe)
    end = time.monotonic() + SUMMARY_S
    while not run.summary.exists() and time.monotonic() < end:
        time.sleep(0.2)
    return FinishedRun(run, summary.summarise(run), outcome.exit_code(rundir.read_json(run.state)))


def experiment(spec: Experiment) -> str:
    """Return the name of the folder for the runs of a spec. Mock runs have a separate folder."""
    return spec.name if spec.launch.mock == "off" else f"{spec.name}-mock"


def describe(spec: Experiment, visible: str | None = None) -> dict[str, Any]:
    """Return the content of machine.json with the GPUs that the spec uses. `visible`: CUDA_VISIBLE_DEVICES or None."""
    return {**machine.host(), "gpus": launcher_of(spec).devices(spec, visible)}


def gpu_name(described: dict[str, Any]) -> str | None:
    return rundir.first_gpu(described).get("name")


def execute(
    created: RunDir,
    request: RunRequest,
    described: dict[str, Any],
    signals_pipe: int,
    on_tick: Callable[[Progress], None] = lambda progress: None,
    environment: Mapping[str, str] | None = None,
    deadline: float | None = None,
) -> FinishedRun:
    """Train a spec in a new run directory, write state.json and summary.json, and return the result.

    Args:
        request: The spec, its file and the `--set` changes. `described` is the content of machine.json.
        signals_pipe: Read end of a pipe. A byte in the pipe ends the worker. The files are written in any case.
        on_tick: Called about twice per second with the progress.
        environment: Environment variables that are added to those of this process.
        deadline: End of the sweep's time budget, in seconds of the monotonic clock.

    Raises:
        MissingError: If the disk is full, or if the process cannot be started.
    """
    spec = request.spec
    with rundir.writing(created.path):
        created.spec_yaml.write_bytes(request.source)
        resolved = {"schema": rundir.SCHEMA, **spec.model_dump(mode="json"), "set": list(request.sets)}
        rundir.write_json(created.spec_json, resolved)
        if spec.resolved:
            rundir.write_json(created.applied, {"resolved": spec.resolved})
        best = machine.ceilings(request.store or created.path.parents[1], gpu_name(described))
        rundir.write_json(created.machine, described | {"ceilings": best})
        progress = Progress(created)
        watchdog = Watchdog(spec, progress, deadline)

        def watch() -> process.Stop | None:
            progress.poll()
            on_tick(progress)
            return watchdog.check()

        variables = launcher_of(spec).environment({**os.environ, **(environment or {})}, spec)
        ended = process.run_child(launcher_of(spec).command(spec, created), variables, created.log, signals_pipe, watch)
        state, summarised = outcome.finish(created, ended)
        return FinishedRun(created, summarised, outcome.exit_code(state))

"""One run: check, claim a directory, write spec and machine, launch, watch, summarise. Always leaves a state."""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftbench.core.redact import without_secrets
from ftbench.core.rows import RunSummary
from ftbench.errors import MissingError, SpecError
from ftbench.launch import checkpoints, ending, family, nodes, process
from ftbench.launch.follow import Follower, Watchdog
from ftbench.launch.launchers import command_of, launcher_of
from ftbench.launch.ranks import too_many
from ftbench.profile import files as profiles
from ftbench.profile.trace import TraceError
from ftbench.spec import identity
from ftbench.spec.datasets import check_file
from ftbench.spec.experiment import Experiment, resolve
from ftbench.spec.incompatibilities import incompatibilities
from ftbench.spec.load import load
from ftbench.spec.objectives import reward_problem
from ftbench.store import ceilings, digests, health, machine, ranks, rundir, summary
from ftbench.store.rundir import RunDir

MINIMUM_FREE_BYTES = 32 * 2**20
_PIECE = 2**22  # characters of a log that are looked at together
SUMMARY_S = 60.0  # how long node 0 may take to make a summary once all ranks have ended


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A finished run and the exit code its command ends with."""

    run: RunDir
    summary: RunSummary
    exit_code: int

    def document(self) -> dict[str, Any]:
        """Return what `--json` prints of it."""
        figures = summary.as_dict(self.summary)
        return {"run_dir": str(self.run.path), "state": self.summary.state, "summary": figures}


@dataclass(frozen=True, slots=True)
class Order:
    """A resolved spec, the text of its file, the changes to that, and the store where the run is made elsewhere."""

    spec: Experiment
    source: bytes
    sets: Sequence[str]
    store: Path | None = None


def run(
    spec_path: Path,
    sets: Sequence[str],
    out: Path,
    on_start: Callable[[RunDir], None] = lambda run: None,
    on_tick: Callable[[Follower], None] = lambda follower: None,
    on_checked: Callable[[Experiment, dict[str, Any]], None] = lambda spec, described: None,
) -> FinishedRun:
    """Train the spec once; `on_checked` hears of the resolved spec and this machine before anything is claimed. Raises
    SpecError or MissingError before anything is loaded; in a claimed directory every end is a state."""
    spec = load(spec_path, sets)
    family.end_orphans()
    described = describe(spec)
    spec = resolve(spec, capability(described))
    check(spec, described, spec.launch.nodes)
    check_disk(out)
    on_checked(spec, described)
    if node := nodes.number(spec):
        return _help(spec, node, described, on_start)
    claimed = rundir.create(out, experiment(spec), identity.slug(spec, gpu_name(described)))
    on_start(claimed)
    with process.signals() as signals_pipe:
        return carry_out(claimed, Order(spec, spec_path.read_bytes(), sets), described, signals_pipe, on_tick)


def _help(spec: Experiment, node: int, described: dict[str, Any], on_start: Callable[[RunDir], None]) -> FinishedRun:
    """Carry out the ranks of this machine in the directory that node 0 claimed; return the run that it makes of all.
    Raise MissingError where that cannot be reached, SpecError for another spec than its."""
    claimed = RunDir(nodes.ask(), node=node)
    if not (values := rundir.read_json(claimed.spec_json)):
        raise MissingError(f"{claimed.path}: not on this machine: nodes share the disk that --out lies on")
    known = {key: value for key, value in values.items() if key in Experiment.model_fields}
    try:
        same = identity.fingerprint(Experiment.model_validate(known)) == identity.fingerprint(spec)
    except ValueError:
        raise MissingError("node 0 has another version of ftbench: install the same on each") from None
    if not same:
        raise SpecError("node 0 trains another spec: give each node the same file, and the same --set")
    rundir.write_json(claimed.machine, described)
    on_start(claimed)
    with process.signals() as signals_pipe:
        variables = launcher_of(spec).environment(os.environ, spec)
        process.run_child(command_of(spec, claimed), variables, claimed.log, signals_pipe)
    end = time.monotonic() + SUMMARY_S
    while not claimed.summary.exists() and time.monotonic() < end:
        time.sleep(0.2)
    run, state = RunDir(claimed.path), rundir.read_json(claimed.state)
    return FinishedRun(run, summary.summarise(run), ending.exit_code(state))


def experiment(spec: Experiment) -> str:
    """Return the folder of a spec's runs; what a mock pretends does not lie beside what was measured."""
    return spec.name if spec.launch.mock == "off" else f"{spec.name}-mock"


def describe(spec: Experiment, visible: str | None = None) -> dict[str, Any]:
    """Return machine.json with the GPUs that the spec trains on. `visible` names them as CUDA_VISIBLE_DEVICES does."""
    return {**machine.host(), "gpus": launcher_of(spec).devices(spec, visible)}


def gpu_name(described: dict[str, Any]) -> str | None:
    return rundir.first_gpu(described).get("name")


def carry_out(
    claimed: RunDir,
    order: Order,
    described: dict[str, Any],
    signals_pipe: int,
    on_tick: Callable[[Follower], None] = lambda follower: None,
    environment: Mapping[str, str] | None = None,
    deadline: float | None = None,
) -> FinishedRun:
    """Train in a claimed directory and leave state.json and summary.json there. A signal (a byte in the pipe
    `signals_pipe`) ends the worker, and so does the sweep's `deadline` (monotonic clock, s); one that comes later does
    not keep the files from being written. `environment` adds variables to this process's. Raises MissingError where the
    disk or the machine has no room."""
    spec = order.spec
    try:
        claimed.spec_yaml.write_bytes(order.source)
        resolved = {"schema": rundir.SCHEMA, **spec.model_dump(mode="json"), "set": list(order.sets)}
        rundir.write_json(claimed.spec_json, resolved)
        if spec.resolved:
            rundir.write_json(claimed.applied, {"resolved": spec.resolved})
        best = ceilings.of(order.store or claimed.path.parents[1], gpu_name(described))
        rundir.write_json(claimed.machine, described | {"ceilings": best})
        follower = Follower(claimed)
        watchdog = Watchdog(spec, follower, deadline)

        def watch() -> process.Stop | None:
            follower.poll()
            on_tick(follower)
            return watchdog.check()

        variables = launcher_of(spec).environment({**os.environ, **(environment or {})}, spec)
        ended = process.run_child(command_of(spec, claimed), variables, claimed.log, signals_pipe, watch)
        return _close(claimed, ended)
    except OSError as error:  # a full disk, a machine without room for another process
        raise MissingError(
            f"{claimed.path}: {error.strerror}; free some space, or write elsewhere with --out"
        ) from None


def capability(described: dict[str, Any]) -> tuple[int, int] | None:
    """Return the compute capability of the GPU in a machine.json; None without a GPU."""
    numbers = rundir.first_gpu(described).get("compute_capability")
    return (int(numbers[0]), int(numbers[1])) if numbers else None


def check(spec: Experiment, described: dict[str, Any], most_nodes: int = 1) -> None:
    """Raise SpecError for a file that is not there, MissingError for what cannot work on this machine, or on so many
    of them, or is not installed there."""
    sentences = refused(spec, described, most_nodes)
    if sentences and not _path_problems(spec):
        raise MissingError("\n".join(sentences))
    check_needed(spec, sentences)


def refused(spec: Experiment, described: dict[str, Any], most_nodes: int = 1) -> list[str]:
    """Return why a resolved spec cannot work on this machine, a sentence each. What no machine can do was refused as
    the spec was read: left is what `auto` became here."""
    others = launcher_of(spec).refusals(spec, capability(described)) + too_many(spec, described)
    if spec.launch.nodes > most_nodes:
        others.append(
            f"launch.nodes: {spec.launch.nodes} machines take part by `ftbench run` on each of them, one run at a "
            "time: set it to 1 here"
        )
    return incompatibilities(spec) + others


def check_needed(spec: Experiment, others: Sequence[str] = ()) -> None:
    """Raise SpecError for a file that is not there, with `others` behind it, DataError for rows that cannot be used,
    MissingError for what is not installed."""
    if wrong := _path_problems(spec):
        raise SpecError(*wrong, *others)
    check_file(spec.dataset, spec.objective.pairs)
    launcher_of(spec).check_installed(spec)


def _path_problems(spec: Experiment) -> list[str]:
    problems = []
    if spec.dataset.path and not Path(spec.dataset.path).exists():
        problems.append(f"dataset.path: {spec.dataset.path}: no such file or folder")
    if spec.model.path and spec.model.weights == "pretrained":
        problem = checkpoints.problem(Path(spec.model.path))
        problems += [f"model.path: {problem}"] if problem else []
    if spec.model.path and spec.model.weights == "random":
        file = Path(spec.model.path)
        if not (file / "config.json" if file.is_dir() else file).is_file():
            problems.append(f"model.path: {spec.model.path}: no such config.json")
    sentences = map(reward_problem, getattr(spec.objective, "reward", None) or ())
    return problems + [f"objective.reward: {sentence}" for sentence in sentences if sentence]


def check_disk(out: Path) -> None:
    whole = Path(os.path.realpath(out))
    existing = next(path for path in (whole, *whole.parents) if path.exists())
    if not os.access(existing, os.W_OK) or not existing.is_dir():
        raise MissingError(f"{existing}: cannot be written; choose another place with --out")
    if (free := shutil.disk_usage(existing).free) < MINIMUM_FREE_BYTES:
        raise MissingError(f"{existing}: only {free / 2**20:.0f} MiB free; free some, or write elsewhere with --out")


def _close(run: RunDir, ended: process.Exit) -> FinishedRun:
    """Write state and summary. Raises MissingError where the disk takes neither."""
    state = ending.final_state(run, ended)
    try:
        ranks.write_merged(run)
        state |= _profile(run)
        state, summarised = _conclude(run, state)
        _redact_logs(run)
    except MissingError as error:
        kept = f"\nthe steps that were finished are in {run.steps}" if run.steps.exists() else ""
        raise MissingError(f"{error}{kept}") from None
    run.reserve.unlink(missing_ok=True)
    return FinishedRun(run, summarised, ending.exit_code(state))


def _conclude(run: RunDir, state: dict[str, Any]) -> tuple[dict[str, Any], RunSummary]:
    """Write state, summary and digests of a run whose steps are all there; return the state, which is `not finite` of
    one that ended well without learning by numbers, unless it was spoiled on purpose, and the summary."""
    summarised = summary.summarise(run, state)
    spoiled = rundir.read_json(run.spec_json).get("measure", {}).get("control", "off") != "off"
    if state["state"] == "ok" and summarised.learning.get("state") == rundir.NOT_FINITE and not spoiled:
        summarised.state, summarised.reason = rundir.NOT_FINITE, health.reason(summarised.learning, summarised.warnings)
        state |= {"state": summarised.state, "reason": summarised.reason}
    rundir.write_json(run.state, state)
    rundir.write_json(run.summary, summary.as_dict(summarised))
    digests.write(run)
    return state, summarised


def _redact_logs(run: RunDir) -> None:
    """Take secrets out of what the child and its libraries have printed, as out of everything else that is shown."""
    for log in run.path.glob("log*.txt"):
        if all(without_secrets(piece) == piece for piece in _pieces(log)):
            continue
        temporary = log.with_name(f".{log.name}.{os.getpid()}")
        try:
            with temporary.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
                file.writelines(map(without_secrets, _pieces(log)))
            os.replace(temporary, log)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise rundir.disk_error(log, error) from None


def _pieces(log: Path) -> Iterator[str]:
    """Yield a log of any length in pieces of whole lines, as far as they end."""
    with log.open(encoding="utf-8", errors="surrogateescape", newline="") as file:
        while piece := file.read(_PIECE) + file.readline(_PIECE):
            yield piece


def _profile(run: RunDir) -> dict[str, Any]:
    """Make the profile out of what the worker recorded; return what the state becomes where that cannot be read."""
    try:
        profiles.finish(run)
    except TraceError as error:
        return {"state": "error", "reason": str(error)}
    return {}


def tidy(run: RunDir) -> None:
    """Give a run whose parent did not end in peace what that would have: a summary, and no more than its files."""
    if not run.reserve.exists():
        return
    _redact_logs(run)
    state = rundir.read_json(run.state)
    if state.get("state") in ("ok", "oom", "timeout", "error"):
        ranks.write_merged(run)
        _conclude(run, {key: value for key, value in state.items() if key != "owner"})
        run.reserve.unlink(missing_ok=True)

"""One run: check, claim a directory, write spec and machine, launch, watch, summarise. Always leaves a state."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftbench import machine, rundir, summary
from ftbench.core import oom
from ftbench.core.rows import RunSummary
from ftbench.errors import INTERRUPTED, FtbenchError, MissingError, SpecError
from ftbench.launch import process, trl
from ftbench.rundir import RunDir
from ftbench.spec import identity
from ftbench.spec.experiment import Experiment, impossible, refused_here, resolve
from ftbench.spec.load import load

MINIMUM_FREE_BYTES = 32 * 2**20
_LOG_TAIL = 64 * 1024


@dataclass(frozen=True, slots=True)
class Result:
    """A finished run and the exit code its command ends with."""

    run: RunDir
    summary: RunSummary
    exit_code: int


def run(
    spec_path: Path,
    sets: Sequence[str],
    out: Path,
    on_start: Callable[[RunDir], None] = lambda run: None,
    on_tick: Callable[[], None] = lambda: None,
) -> Result:
    """Trains the spec once. Raises SpecError or MissingError before anything is loaded; once a directory is claimed,
    every end is a state in it."""
    described = machine.describe()
    spec = resolve(load(spec_path, sets), capability(described))
    check(spec, described)
    _check_disk(out)
    claimed = rundir.claim(out, spec.name, identity.slug(spec))
    with process.signals() as asked:
        try:
            shutil.copyfile(spec_path, claimed.spec_yaml)
            resolved = {"schema": rundir.SCHEMA, **spec.model_dump(mode="json"), "set": list(sets)}
            rundir.write_json(claimed.spec_json, resolved)
            rundir.write_json(claimed.machine, described)
            on_start(claimed)
            return execute(claimed, spec, asked, on_tick)
        except OSError as error:  # a full disk, a machine without room for another process
            raise MissingError(
                f"{claimed.path}: {error.strerror}; free some space, or write elsewhere with --out"
            ) from None


def capability(described: dict[str, Any]) -> tuple[int, int] | None:
    """The compute capability of the GPU in a machine.json; None without a GPU."""
    found = (described["gpu"] or {}).get("compute_capability")
    return (int(found[0]), int(found[1])) if found else None


def check(spec: Experiment, described: dict[str, Any]) -> None:
    """Raises SpecError for what cannot work on this machine, MissingError for what is not installed."""
    problems = impossible(spec) + refused_here(spec, capability(described)) + _path_problems(spec)
    if problems:
        raise SpecError(*problems)
    trl.check_installed(spec)


def _path_problems(spec: Experiment) -> list[str]:
    found = []
    if spec.dataset.path and not Path(spec.dataset.path).is_file():
        found.append(f"dataset.path: {spec.dataset.path}: no such file")
    if spec.model.path and spec.model.weights == "pretrained":
        folder = Path(spec.model.path)
        if not folder.is_dir():
            found.append(f"model.path: {folder}: no such directory")
        elif not (folder / "config.json").is_file():
            found.append(f"model.path: {folder}: holds no config.json, so it is no model directory")
        elif not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
            found.append(
                f"model.path: {folder}: holds a config.json and no weights (*.safetensors); copy them there, or set "
                "model.weights=random to measure the same shape without them"
            )
    if spec.model.path and spec.model.weights == "random" and not Path(spec.model.path).exists():
        found.append(f"model.path: {spec.model.path}: no such config.json")
    return found


def _check_disk(out: Path) -> None:
    existing = next(path for path in (out.resolve(), *out.resolve().parents) if path.exists())
    if not os.access(existing, os.W_OK) or not existing.is_dir():
        raise MissingError(f"{existing}: cannot be written; choose another place with --out")
    if (free := shutil.disk_usage(existing).free) < MINIMUM_FREE_BYTES:
        raise MissingError(f"{existing}: only {free / 2**20:.0f} MiB free; free some, or write elsewhere with --out")


def execute(run: RunDir, spec: Experiment, asked: int, on_tick: Callable[[], None]) -> Result:
    """Launches the worker of a claimed directory, waits for it and leaves state.json and summary.json. A signal (a
    byte in the pipe `asked`) ends the worker; one that comes later does not keep the files from being written."""
    environment = trl.environment(os.environ)
    ended = process.run_child(trl.command(run), environment, run.log, asked, spec.launch.timeout_s, on_tick)
    return _close(run, spec, ended)


def _close(run: RunDir, spec: Experiment, ended: process.Exit) -> Result:
    """Writes state and summary; raises MissingError where the disk takes neither."""
    state = _final_state(run, ended, spec)
    try:
        rundir.write_json(run.state, state)
        found = summary.summarise(run)
        rundir.write_json(run.summary, summary.as_dict(found))
    except MissingError as error:
        raise MissingError(f"{error}\nthe steps that were finished are in {run.steps}") from None
    run.reserve.unlink(missing_ok=True)
    return Result(run, found, _exit_code(state))


def _final_state(run: RunDir, ended: process.Exit, spec: Experiment) -> dict[str, Any]:
    """The child's own word where it had one; otherwise what its exit says."""
    state = rundir.read_json(run.state)
    told = state.get("state")
    if ended.why == "timeout":
        state |= {"state": "timeout", "reason": f"not done after launch.timeout_s = {spec.launch.timeout_s:g} seconds"}
    elif ended.why == "interrupted":
        state |= {"state": "interrupted", "reason": "interrupted by a signal"}
    elif told in (None, "running") or (told == "ok" and ended.code != 0):
        state |= _from_exit(run, ended)
    state.pop("owner", None)
    return state | {"ended_at": rundir.now(), "wall_s": ended.wall_s, "child_exit": ended.code}


def _from_exit(run: RunDir, ended: process.Exit) -> dict[str, Any]:
    tail = _log_tail(run)
    where = run.log.name
    if ended.kernel_oom:
        return {"state": "oom", "reason": "the kernel's OOM killer ended it: host memory ran out",
                "oom": oom.Oom("kernel").as_dict()}  # fmt: skip
    if (found := oom.recognise(tail)) is not None:
        return {"state": "oom", "reason": f"out of memory ({found.kind})", "oom": found.as_dict()}
    if ended.code < 0:
        return {"state": "error", "reason": f"killed by signal {-ended.code} from outside; see {where}"}
    last = next((line.strip() for line in reversed(tail.splitlines()) if line.strip()), "no output")
    return {"state": "error", "reason": f"ended with exit code {ended.code} and no word: {last[:300]}"}


def _log_tail(run: RunDir) -> str:
    try:
        with run.log.open("rb") as file:
            file.seek(max(0, run.log.stat().st_size - _LOG_TAIL))
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


def _exit_code(state: dict[str, Any]) -> int:
    if state["state"] == "ok":
        return 0
    if state["state"] == "interrupted":
        return INTERRUPTED
    return int(state.get("exit_code", FtbenchError.exit_code))


def progress(run: RunDir) -> str:
    """One line on where a run stands, from the end of its steps.csv; empty before the first step."""
    steps, _ = rundir.read_steps(run.steps) if run.steps.exists() else ([], [])
    if not steps:
        phases = rundir.read_json(run.phases).get("phases", [])
        return str(phases[-1]["name"]).replace("_", " ") if phases else "starting"
    last = steps[-1]
    share = f"{last.progress_ratio:.0%}" if last.progress_ratio is not None else ""
    speed = f"{last.real_tokens / last.step_time_s:,.0f} tokens/s" if last.real_tokens and last.step_time_s else ""
    memory = f"{last.peak_memory_gb:.2f} GiB" if last.peak_memory_gb is not None else ""
    loss = f"loss {last.loss:.3f}" if last.loss is not None else ""
    return " · ".join(part for part in (f"step {last.step}", share, speed, memory, loss) if part)

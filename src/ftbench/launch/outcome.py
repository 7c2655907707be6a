"""Finish a run: write the final state and the summary, and remove secrets from the logs."""

import signal
from dataclasses import asdict
from typing import Any

from ftbench.core import oom
from ftbench.core.redact import without_secrets
from ftbench.core.rows import RunSummary
from ftbench.errors import INTERRUPTED, FtbenchError, MissingError
from ftbench.launch import process
from ftbench.store import ranks, run_warnings, rundir, summary
from ftbench.store.rundir import RunDir


def finish(run: RunDir, ended: process.Exit) -> tuple[dict[str, Any], RunSummary]:
    """Write the state and the summary of an ended run, and return both. Raise MissingError if the disk is full."""
    return _complete(run, final_state(run, ended))


def finish_killed(run: RunDir) -> None:
    """Write the missing files of a run if ftbench was killed and the worker ended later."""
    state = rundir.read_json(run.state)
    if run.reserve.exists() and state.get("state") in ("ok", "oom", "timeout", "error"):
        _complete(run, {key: value for key, value in state.items() if key != "owner"})


def _complete(run: RunDir, state: dict[str, Any]) -> tuple[dict[str, Any], RunSummary]:
    """Merge the steps of all ranks, write profile, state and summary, and redact the logs. Return (state, summary)."""
    try:
        ranks.write_merged(run)
        state |= _finish_profile(run)
        state, summarised = _write_results(run, state)
        _redact_logs(run)
    except MissingError as error:
        kept = f"\nthe finished steps are in {run.steps}" if run.steps.exists() else ""
        raise MissingError(f"{error}{kept}") from None
    run.reserve.unlink(missing_ok=True)
    return state, summarised


def final_state(run: RunDir, ended: process.Exit) -> dict[str, Any]:
    """Return the final state of a run. If the worker did not write a result, use the worker's exit code and log."""
    state = rundir.read_json(run.state)
    written = state.get("state")
    rank, behind = state.get("rank"), state.pop("behind", None)
    if ended.stop is not None and (written, ended.code) != ("ok", 0):  # a signal after `ok` does not matter
        hung = f"; rank {rank} is behind the others: {behind}" if behind and ended.stop.state == "timeout" else ""
        state |= {"state": ended.stop.state, "reason": f"{ended.stop.reason}{hung}"}
    elif written in (None, "running") or (written == "ok" and ended.code > 0):  # a kill after `ok` does not matter
        state |= _from_exit(run, ended)
    if rank is not None and not behind and "reason" in state:
        state["reason"] = f"rank {rank}: {state['reason']}"
    state.pop("owner", None)
    return state | {"ended_at": rundir.now(), "wall_s": ended.wall_s, "child_exit": ended.code}


def _from_exit(run: RunDir, ended: process.Exit) -> dict[str, Any]:
    if ended.kernel_oom:
        return {"state": "oom", "reason": "the kernel's OOM killer ended it: host memory ran out",
                "oom": asdict(oom.Oom("kernel"))}  # fmt: skip
    if (recognised := oom.recognise(process.log_tail(run.log))) is not None:
        return {"state": "oom", "reason": f"out of memory ({recognised.kind})", "oom": asdict(recognised)}
    if ended.code < 0:
        name = signal.Signals(-ended.code).name
        how = "killed by {} from outside" if -ended.code in rundir.CUT_SHORT else "crashed with {}"
        return {"state": "error", "reason": f"{how.format(name)}; see {run.log.name}", "signal": -ended.code}
    last = process.last_line(run.log) or "no output"
    return {"state": "error", "reason": f"exit code {ended.code} without a result: {last}"}


def exit_code(state: dict[str, Any]) -> int:
    """Return the exit code of `ftbench run` for a run with this state."""
    if state["state"] == "ok":
        return 0
    if state["state"] == "interrupted":
        return INTERRUPTED
    return int(state.get("exit_code", FtbenchError.exit_code))


def _write_results(run: RunDir, state: dict[str, Any]) -> tuple[dict[str, Any], RunSummary]:
    """Write state.json and summary.json, and return both.

    A successful run with NaN or infinite losses gets the state `not finite`. A control run keeps the state `ok`.
    """
    summarised = summary.summarise(run, state)
    is_control = rundir.read_json(run.spec_json).get("measure", {}).get("control", "off") != "off"
    if state["state"] == "ok" and summarised.learning.get("state") == rundir.NOT_FINITE and not is_control:
        reason = run_warnings.not_finite_reason(summarised.learning, summarised.warnings)
        summarised.state, summarised.reason = rundir.NOT_FINITE, reason
        state |= {"state": rundir.NOT_FINITE, "reason": reason}
    rundir.write_json(run.state, state)
    rundir.write_json(run.summary, summary.as_dict(summarised))
    return state, summarised


def _finish_profile(run: RunDir) -> dict[str, Any]:
    """Write the profile from the worker's traces. If one is unreadable, return {"state": "error", "reason": text}."""
    if not run.profile.is_dir():
        return {}
    from ftbench.profile import analyse
    from ftbench.profile.trace import TraceError

    try:
        analyse.finish(run)
    except TraceError as error:
        return {"state": "error", "reason": str(error)}
    return {}


def _redact_logs(run: RunDir) -> None:
    """Remove secrets from the logs of the worker and its libraries."""
    for log in run.path.glob("log*.txt"):
        text = log.read_bytes().decode(errors="backslashreplace")
        if (clean := without_secrets(text)) != text:
            rundir.write_text(log, clean)

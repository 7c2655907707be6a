"""How a run has ended: the child's own word where it had one, otherwise what its exit and its log say."""

import signal
from dataclasses import asdict
from typing import Any

from ftbench.core import oom
from ftbench.errors import INTERRUPTED, FtbenchError
from ftbench.launch import process
from ftbench.store import rundir
from ftbench.store.rundir import RunDir

_LOG_TAIL = 64 * 1024


def final_state(run: RunDir, ended: process.Exit) -> dict[str, Any]:
    """Return the child's own word where it had one; otherwise what its exit says."""
    state = rundir.read_json(run.state)
    word = state.get("state")
    rank, behind = state.get("rank"), state.pop("behind", None)
    if ended.stop is not None:
        hung = f"; rank {rank} is behind the others: {behind}" if behind and ended.stop.state == "timeout" else ""
        state |= {"state": ended.stop.state, "reason": f"{ended.stop.reason}{hung}"}
    elif word in (None, "running") or (word == "ok" and ended.code > 0):  # ok, then killed on its way out, is ok
        state |= _from_exit(run, ended)
    if rank is not None and not behind:
        state["reason"] = f"rank {rank}: {state['reason']}"
    state.pop("owner", None)
    return state | {"ended_at": rundir.now(), "wall_s": ended.wall_s, "child_exit": ended.code}


def _from_exit(run: RunDir, ended: process.Exit) -> dict[str, Any]:
    tail = _log_tail(run)
    where = run.log.name
    if ended.kernel_oom:
        return {"state": "oom", "reason": "the kernel's OOM killer ended it: host memory ran out",
                "oom": asdict(oom.Oom("kernel"))}  # fmt: skip
    if (recognised := oom.recognise(tail)) is not None:
        return {"state": "oom", "reason": f"out of memory ({recognised.kind})", "oom": asdict(recognised)}
    if ended.code < 0:
        name = signal.Signals(-ended.code).name
        whose = "killed by {} from outside" if -ended.code in rundir.CUT_SHORT else "crashed with {}"
        return {"state": "error", "reason": f"{whose.format(name)}; see {where}", "signal": -ended.code}
    last = next((line.strip() for line in reversed(tail.splitlines()) if line.strip()), "no output")
    return {"state": "error", "reason": f"ended with exit code {ended.code} and no word: {last[:300]}"}


def _log_tail(run: RunDir) -> str:
    try:
        with run.log.open("rb") as file:
            file.seek(max(0, run.log.stat().st_size - _LOG_TAIL))
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


def exit_code(state: dict[str, Any]) -> int:
    """Return the exit code of a command whose run has this state."""
    if state["state"] == "ok":
        return 0
    if state["state"] == "interrupted":
        return INTERRUPTED
    return int(state.get("exit_code", FtbenchError.exit_code))

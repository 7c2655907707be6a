"""Where a sweep stands, asked from another shell."""

import calendar
import time
from pathlib import Path
from typing import Any

from ftbench.errors import SpecError
from ftbench.launch.follow import Follower
from ftbench.store.rundir import read_document
from ftbench.sweep.execute import slurm_queue
from ftbench.sweep.execute.journal import is_held
from ftbench.sweep.jobs import FAILED, Standing
from ftbench.sweep.output.table import BOARD
from ftbench.sweep.output.view import counted


def status(folder: Path) -> dict[str, Any]:
    """Return the board of the sweep in `folder` (the experiment's, `results/<name>`), whether its process is alive, and
    a line on each run that is on. Raise SpecError where there is no sweep."""
    board, problem = read_document(folder / BOARD)
    if problem is not None:
        raise SpecError(f"{folder}: {problem}; the next run of the sweep writes it anew")
    if not board:
        inside = sorted(str(path.parent) for path in folder.glob(f"*/{BOARD}")) if folder.is_dir() else []
        raise SpecError(f"{folder}: holds no sweep" + (f"; did you mean {', '.join(inside)}?" if inside else ""))
    alive = is_held(folder)
    running, names = {}, {job["run"] for job in board["jobs"]}
    for name in (name for name in board["running"] if alive and name in names):
        follower = Follower(slurm_queue.running(folder, name))
        follower.poll()
        running[name] = follower.text()
    return board | {"alive": alive, "running": running, "folder": str(folder)}


def as_text(board: dict[str, Any]) -> str:
    """Return the same for people."""
    jobs = {job["run"]: job for job in board["jobs"]}
    cut_short = {} if board["alive"] else {"running": "pending"}
    standings = [Standing(cut_short.get(job["state"], job["state"])) for job in jobs.values()]
    lines = [f"{board['folder']}: {counted(standings, _left_s(board) if board['alive'] else None)}"]
    lines += [f"  running  {jobs[run]['what']}: {text}" for run, text in board["running"].items()]
    lines += [
        f"  {job['state']:<8} {job['what']}: {job.get('reason')}"
        for job in jobs.values() if job["state"] in (*FAILED, "oom", "skipped")
    ]  # fmt: skip
    left = sum(not standing.done for standing in standings)
    if not board["alive"] and left:
        lines.append(f"  not running since {board['at']}: the same command goes on where it stopped")
    lines.append(f"  table    {Path(board['folder']) / 'summary.md'}")
    return "\n".join(lines)


def _left_s(board: dict[str, Any]) -> float | None:
    """Return what is left of the seconds that were left as the board was written."""
    try:
        since = time.time() - calendar.timegm(time.strptime(board["at"], "%Y-%m-%dT%H:%M:%SZ"))
    except ValueError:
        return None
    return None if board["left_s"] is None else max(0.0, board["left_s"] - max(0.0, since))

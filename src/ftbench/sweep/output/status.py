"""Describe the progress of a sweep, also for `sweep --status` in another shell."""

import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ftbench.core.rows import RunSummary
from ftbench.core.table import wrapped
from ftbench.core.units import gibibytes, rate, seconds, some
from ftbench.errors import SpecError
from ftbench.launch.progress import Progress
from ftbench.store.rundir import RunDir, read_document
from ftbench.sweep.lock import is_held
from ftbench.sweep.output.table import BOARD
from ftbench.sweep.plan.base import FAILED, JobStatus

UNFINISHED = ".slurm"  # Slurm jobs write an unfinished run NAME to .slurm/NAME/NAME


def counted(statuses: Iterable[JobStatus], left_s: float | None) -> str:
    """Return the progress as text, such as `12 ok · 1 oom · 2 skipped · 9 runs left · about 1 h 20 min`."""
    states = Counter(status.state for status in statuses)
    failed = sum(states[name] for name in FAILED)
    left = states["pending"] + states["running"] + states["interrupted"]
    counts = {"ok": states["ok"], "oom": states["oom"], "failed": failed, "skipped": states["skipped"]}
    parts = [f"{count} {name}" for name, count in counts.items() if count]
    parts += [f"{some(left, 'run')} left"] if left else []
    about = f"about {left_s:.0f} s" if left_s and left_s < 120 else f"about {seconds(left_s)}"
    return " · ".join([*parts, *([about] if left_s and left else [])])


def ended(what: str, summary: RunSummary, wall_s: float | None) -> str:
    """Return one line of text about a finished run: the state, then speed and memory, or the reason for a failure."""
    if summary.state != "ok":
        return f"{summary.state}  {what}: {summary.reason}"
    speed, peak = summary.tokens_per_s.get("real"), summary.memory_gb.get("allocated_peak")
    parts = [
        f"{seconds(summary.step_time_s['median'])} per step" if summary.step_time_s else "",
        f"{rate(speed)} tokens/s" if speed else "",
        f"{gibibytes(peak)} GiB" if peak else "",
        f"in {seconds(wall_s)}" if wall_s else "",
    ]
    return f"ok  {what}: " + ", ".join(part for part in parts if part)


def status(folder: Path) -> dict[str, Any]:
    """Return the content of an experiment's sweep.json, with the progress of each running job as text.

    The key `alive` is True if the sweep is running. Raise SpecError if the folder does not have a sweep.
    """
    if folder.is_file():
        raise SpecError(f"{folder}: a file, not a folder; name the folder of the sweep, DIR/NAME below --out DIR")
    board, problem = read_document(folder / BOARD)
    if problem is not None:
        raise SpecError(f"{folder}: {problem}; the next run of the sweep writes it again")
    if not board:
        inside = ", ".join(sorted(str(path.parent) for path in folder.glob(f"*/{BOARD}")))
        hint = f"did you mean {inside}?" if inside else "name the folder of the sweep, DIR/NAME below --out DIR"
        raise SpecError(f"{folder}: no sweep found; {hint}")
    alive = is_held(folder)
    running, names = {}, {job["run"] for job in board["jobs"]}
    for name in (name for name in board["running"] if alive and name in names):
        progress = Progress(RunDir(unfinished(folder, name)))
        progress.poll()
        running[name] = progress.text()
    return board | {"alive": alive, "running": running, "folder": str(folder)}


def unfinished(folder: Path, name: str) -> Path:
    """Return the directory of a running job. The directory of a Slurm job is in `.slurm/` until the job ends."""
    path = folder / name
    return path if path.exists() else folder / UNFINISHED / name / name


def as_text(board: dict[str, Any]) -> str:
    """Return the status of a sweep as text. `board` is the result of `status`."""
    jobs = {job["run"]: job for job in board["jobs"]}
    stopped = {} if board["alive"] else {"running": "pending"}
    statuses = [JobStatus(stopped.get(job["state"], job["state"])) for job in jobs.values()]
    ends_at = board.get("ends_at") if board["alive"] else None
    lines = [f"{board['folder']}: {counted(statuses, ends_at and max(0.0, ends_at - time.time()))}"]
    lines += [f"  running  {jobs[run]['what']}: {text}" for run, text in board["running"].items()]
    lines += [
        f"  {job['state']:<8} {job['what']}: {job.get('reason')}"
        for job in jobs.values() if job["state"] in (*FAILED, "oom", "skipped")
    ]  # fmt: skip
    if not board["alive"] and any(not status.done for status in statuses):
        lines.append(f"  stopped, last change at {board['at']}: run the same command to continue")
    if (table := Path(board["folder"]) / "summary.md").exists():  # written after the first run
        lines.append(f"  table    {table}")
    return "\n".join(wrapped(line, 11) for line in lines)

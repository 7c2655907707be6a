"""Progress of a sweep: the live view on stderr, and `sweep --status` from another shell."""

from __future__ import annotations

import calendar
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ftbench.core import processes
from ftbench.core.rows import RunSummary
from ftbench.core.units import gibibytes, rate, seconds, some
from ftbench.errors import SpecError
from ftbench.launch.progress import Progress
from ftbench.store.rundir import RunDir, read_document
from ftbench.sweep.journal import is_held
from ftbench.sweep.output.table import BOARD
from ftbench.sweep.plan.base import FAILED, Standing

REFRESH_S = 1.0  # the view uses the CPU of the measured run
UNFINISHED = ".slurm"  # folder with the unfinished runs of Slurm jobs, each in a folder of its name


class _Console(Console):
    """A console on stderr that continues without a reader; rich would end the process."""

    def on_broken_pipe(self) -> None:
        processes.discard_stderr()


class LiveView:
    """Context manager that shows progress: live on a terminal, else a report every `log_every_s` seconds."""

    def __init__(self, log_every_s: float | None = None) -> None:
        self._log_every_s, self._logged = log_every_s, time.monotonic()
        self._console = _Console(stderr=True, highlight=False, soft_wrap=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=True) if sys.stderr.isatty() else None
        self._shown = 0.0

    def __enter__(self) -> LiveView:
        if self._live:
            with processes.optional_stderr():
                self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            with processes.optional_stderr():
                self._live.stop()

    def event(self, text: str) -> None:
        """Print a line with the time."""
        with processes.optional_stderr():
            self._console.print(Text(f"{time.strftime('%H:%M:%S')}  {text}"))

    def show(self, counted: str, running: Sequence[str]) -> None:
        """Show the running jobs and the counts."""
        if self._live and time.monotonic() - self._shown >= REFRESH_S:
            self._shown = time.monotonic()
            lines = [fitting(f"  {line}", self._console.width) for line in (*running, counted)]
            with processes.optional_stderr():
                self._live.update(Group(*map(Text, lines)), refresh=True)
        elif not self._live and self._log_every_s and time.monotonic() - self._logged >= self._log_every_s:
            self._logged = time.monotonic()
            for line in (*running, counted):
                self.event(line)


def fitting(line: str, width: int) -> str:
    """Drop the last parts of `… · 52 % · 149 tokens/s` until the line fits the width."""
    while len(line) > width and " · " in line:
        line = line.rpartition(" · ")[0]
    return line


def counted(standings: Iterable[Standing], left_s: float | None) -> str:
    """Return `12 ok · 1 oom · 2 skipped · 9 runs left · about 1 h 20 min`."""
    states = Counter(standing.state for standing in standings)
    failed = sum(states[name] for name in FAILED)
    left = states["pending"] + states["running"] + states["interrupted"]
    counts = {"ok": states["ok"], "oom": states["oom"], "failed": failed, "skipped": states["skipped"]}
    parts = [f"{count} {name}" for name, count in counts.items() if count]
    parts += [f"{some(left, 'run')} left"] if left else []
    about = f"about {left_s:.0f} s" if left_s and left_s < 120 else f"about {seconds(left_s)}"
    return " · ".join([*parts, *([about] if left_s and left else [])])


def ended(what: str, summary: RunSummary, wall_s: float | None) -> str:
    """Return one line about a finished run."""
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
    """Return sweep.json of an experiment's folder, whether the sweep is running, and a line for each running job.

    Raise SpecError if the folder has no sweep.
    """
    board, problem = read_document(folder / BOARD)
    if problem is not None:
        raise SpecError(f"{folder}: {problem}; the next run of the sweep writes it again")
    if not board:
        inside = sorted(str(path.parent) for path in folder.glob(f"*/{BOARD}")) if folder.is_dir() else []
        raise SpecError(f"{folder}: no sweep found" + (f"; did you mean {', '.join(inside)}?" if inside else ""))
    alive = is_held(folder)
    running, names = {}, {job["run"] for job in board["jobs"]}
    for name in (name for name in board["running"] if alive and name in names):
        progress = Progress(RunDir(unfinished(folder, name)))
        progress.poll()
        running[name] = progress.text()
    return board | {"alive": alive, "running": running, "folder": str(folder)}


def unfinished(folder: Path, name: str) -> Path:
    """Return the directory of a running job. Slurm jobs move theirs to its final path when they end."""
    path = folder / name
    return path if path.exists() else folder / UNFINISHED / name / name


def as_text(board: dict[str, Any]) -> str:
    """Return the result of `status` as text."""
    jobs = {job["run"]: job for job in board["jobs"]}
    stopped = {} if board["alive"] else {"running": "pending"}
    standings = [Standing(stopped.get(job["state"], job["state"])) for job in jobs.values()]
    lines = [f"{board['folder']}: {counted(standings, _left_s(board) if board['alive'] else None)}"]
    lines += [f"  running  {jobs[run]['what']}: {text}" for run, text in board["running"].items()]
    lines += [
        f"  {job['state']:<8} {job['what']}: {job.get('reason')}"
        for job in jobs.values() if job["state"] in (*FAILED, "oom", "skipped")
    ]  # fmt: skip
    left = sum(not standing.done for standing in standings)
    if not board["alive"] and left:
        lines.append(f"  stopped at {board['at']}: run the same command to continue")
    lines.append(f"  table    {Path(board['folder']) / 'summary.md'}")
    return "\n".join(lines)


def _left_s(board: dict[str, Any]) -> float | None:
    """Return the remaining seconds in sweep.json less the time since it was written."""
    try:
        since = time.time() - calendar.timegm(time.strptime(board["at"], "%Y-%m-%dT%H:%M:%SZ"))
    except ValueError:
        return None
    return None if board["left_s"] is None else max(0.0, board["left_s"] - max(0.0, since))

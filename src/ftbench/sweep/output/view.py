"""What a sweep shows while it runs, on stderr: a live view on a terminal, a line an event elsewhere."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ftbench.core.rows import RunSummary
from ftbench.core.units import gibibytes, rate, seconds, some
from ftbench.sweep.jobs import FAILED, Standing

REFRESH_S = 1.0  # the view shares the CPU with what is measured


class LiveView:
    """A context that shows how a sweep goes; off a terminal what is on, every `log_every_s` seconds."""

    def __init__(self, log_every_s: float | None = None) -> None:
        self._log_every_s, self._logged = log_every_s, time.monotonic()
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=True) if sys.stderr.isatty() else None
        self._shown = 0.0

    def __enter__(self) -> LiveView:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def event(self, text: str) -> None:
        """Print a line with the time."""
        self._console.print(Text(f"{time.strftime('%H:%M:%S')}  {text}"))

    def show(self, counted: str, running: Sequence[str]) -> None:
        """Show the state of things, on a terminal no more often than once a second."""
        if self._live and time.monotonic() - self._shown >= REFRESH_S:
            self._shown = time.monotonic()
            lines = [fitting(f"  {line}", self._console.width) for line in (*running, counted)]
            self._live.update(Group(*map(Text, lines)), refresh=True)
        elif not self._live and self._log_every_s and time.monotonic() - self._logged >= self._log_every_s:
            self._logged = time.monotonic()
            for line in (*running, counted):
                self.event(line)


def fitting(line: str, width: int) -> str:
    """Return a line without the last of its parts (`… · 52 % · 149 tokens/s`) that a terminal has no room for."""
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
    """Return one line on a run that has ended."""
    if summary.state != "ok":
        return f"{summary.state}  {what}: {summary.reason}"
    speed, peak = summary.tokens_per_s.get("real"), summary.memory_gb.get("allocated_peak")
    parts = [
        f"{seconds(summary.step_time_s['median'])} a step" if summary.step_time_s else "",
        f"{rate(speed)} tokens/s" if speed else "",
        f"{gibibytes(peak)} GiB" if peak else "",
        f"in {seconds(wall_s)}" if wall_s else "",
    ]
    return f"ok  {what}: " + ", ".join(part for part in parts if part)

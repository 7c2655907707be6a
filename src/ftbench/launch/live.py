"""Show the progress of running trainings on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ftbench.core import processes
from ftbench.core.table import wrapped

REFRESH_S = 1.0  # the view uses the CPU of the measured run
_LOG_LINE = 110  # maximum length of a progress line in a log, without the time


class _Console(Console):
    """A console on stderr that ignores a closed pipe. rich's console would end the process."""

    def on_broken_pipe(self) -> None:
        processes.discard_stderr()


class LiveView:
    """Context manager that shows progress on stderr. On a terminal, the same lines are updated. Otherwise, new lines
    are printed every `log_every_s` seconds."""

    def __init__(self, log_every_s: float | None = None) -> None:
        self._log_every_s, self._shown = log_every_s, time.monotonic()
        self._console = _Console(stderr=True, highlight=False, soft_wrap=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=True) if sys.stderr.isatty() else None

    def __enter__(self) -> LiveView:
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            with processes.optional_stderr():
                self._live.stop()

    def event(self, text: str) -> None:
        """Print a line of text that begins with the current time."""
        with processes.optional_stderr():
            self._console.print(Text(wrapped(f"{time.strftime('%H:%M:%S')}  {text}", 10)))

    def show(self, lines: Sequence[str]) -> None:
        """Show the lines, at most once per interval. On a terminal, the live display starts with the first call."""
        every = REFRESH_S if self._live else self._log_every_s
        if not every or time.monotonic() - self._shown < every:
            return
        self._shown = time.monotonic()
        if self._live:
            fitted = [Text(fitting(f"  {line}", self._console.width)) for line in lines]
            with processes.optional_stderr():
                self._live.start()
                self._live.update(Group(*fitted), refresh=True)
        else:
            for line in lines:
                self.event(fitting(line, _LOG_LINE))


def fitting(line: str, width: int) -> str:
    """Shorten a line such as `cell: step 3 · 149 tokens/s · loss 2.1 · about 9 s left` to a width. First drop the last
    parts, then the start of the cell's name."""
    while len(line) > width and line.count(" · ") > 3:
        line = line.rpartition(" · ")[0]
    name, _, rest = line.rpartition(": ")
    kept = width - len(rest) - 5
    return f"  …{name[-kept:]}: {rest}" if len(line) > width and 0 < kept < len(name) else line[:width]

"""The phases of a run: contiguous from the process's start, written to phases.json whenever they change."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ftbench.core.processes import process_start
from ftbench.store.rundir import RunDir, read_json, write_json

SCHEMA = 1


class Phases:
    """A list of `{name, start_s, end_s, peak_memory_gb, peak_reserved_gb}`. The last phase is open.

    With `resumed`, the list of a process that another interpreter replaced is continued.
    """

    def __init__(self, run: RunDir, first: str, resumed: bool = False) -> None:
        self._run = run
        self._origin = time.monotonic() - _process_age_s()
        before = read_json(run.phases).get("phases") if resumed else None
        self._list: list[dict[str, Any]] = before or [{"name": first, "start_s": 0.0}]
        self.read_peaks: Callable[[], dict[str, float]] = dict  # replaced when the device is known
        self._write()

    @property
    def current(self) -> str:
        return str(self._list[-1]["name"])

    def enter(self, name: str) -> None:
        """End the current phase and start another one."""
        self._end()
        self._list.append({"name": name, "start_s": self._list[-1]["end_s"]})
        self._write()

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Enter another phase for a block, then return to the current one."""
        before = self.current
        self.enter(name)
        try:
            yield
        finally:
            self.enter(before)

    def close(self) -> None:
        """End the last phase."""
        self._end()
        self._write()

    def _end(self) -> None:
        self._list[-1] |= {"end_s": time.monotonic() - self._origin, **self.read_peaks()}

    def _write(self) -> None:
        write_json(self._run.phases, {"schema": SCHEMA, "phases": self._list})


def _process_age_s() -> float:
    """Return the seconds since this process started, so that the first phase includes the interpreter's startup."""
    started = process_start(os.getpid())
    if started is None:
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK"))

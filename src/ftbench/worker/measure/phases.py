"""What the process was doing when: contiguous phases from the process's start, written to phases.json as they change,
so that a killed run tells how far it came."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ftbench.store.process_identity import process_start
from ftbench.store.rundir import RunDir, read_json, write_json

SCHEMA = 1


class Phases:
    """A list of `{name, start_s, end_s, peak_memory_gb, peak_reserved_gb}`; the last one is open while it runs.
    `resumed` by a process that another interpreter has taken over, the list goes on."""

    def __init__(self, run: RunDir, first: str, resumed: bool = False) -> None:
        self._run = run
        self._origin = time.monotonic() - _process_age_s()
        before = read_json(run.phases).get("phases") if resumed else None
        self._list: list[dict[str, Any]] = before or [{"name": first, "start_s": 0.0}]
        self.read_peaks: Callable[[], dict[str, float]] = dict  # set once there is a device to ask
        self._write()

    @property
    def current(self) -> str:
        return str(self._list[-1]["name"])

    def enter(self, name: str) -> None:
        """End the current phase and begin another at the same instant."""
        self._end()
        self._list.append({"name": name, "start_s": self._list[-1]["end_s"]})
        self._write()

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Enter another phase for the length of a block, then the phase before it again."""
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
    """Return the seconds since this process began: the interpreter's own start belongs to the first phase."""
    begun = process_start(os.getpid())
    if begun is None:
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - begun / os.sysconf("SC_CLK_TCK"))

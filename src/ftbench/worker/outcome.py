"""Write the phases and the outcome of a worker process, and exit the process."""

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, NoReturn

from ftbench.core import oom
from ftbench.core.processes import process_start
from ftbench.errors import FtbenchError
from ftbench.store.rundir import RunDir, read_json, write_json

# Errors of gloo, NCCL and their store after another rank ended. The run reports the reason of the other rank.
_LOST_ANOTHER = re.compile(r"gloo|NCCL|DistBackendError|DistNetworkError|DistStoreError|Connection (closed|reset)")

_OF_LOADER = "in DataLoader worker process"
_SCHEMA = 1  # version of phases.json


class Phases:
    """The phases of a run, in the format `{name, start_s, end_s, peak_memory_gb, peak_reserved_gb}`.

    The first phase starts with the process, and there are no gaps. The last phase is open. Every change rewrites
    phases.json. If `resumed` is True, continue the phases of the interpreter that this process ran before.
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
        """Enter another phase inside this context. Afterwards, return to the previous phase."""
        before = self.current
        self.enter(name)
        try:
            yield
        finally:
            self.enter(before)

    def touch(self) -> None:
        """Update the time of phases.json, which tells the parent that a long phase is still making progress."""
        os.utime(self._run.phases)

    def close(self) -> None:
        """End the last phase."""
        self._end()
        self._write()

    def _end(self) -> None:
        self._list[-1] |= {"end_s": time.monotonic() - self._origin, **self.read_peaks()}

    def _write(self) -> None:
        write_json(self._run.phases, {"schema": _SCHEMA, "phases": self._list})


def _process_age_s() -> float:
    """Return the seconds since this process started. With this age, the first phase includes interpreter startup."""
    started = process_start(os.getpid())
    if started is None:
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK"))


class Terminated(BaseException):
    """Exception for a signal (SIGTERM or SIGINT) that ends this process."""


def of_exception(error: BaseException, phase: str, step: int | None) -> dict[str, Any]:
    """Return the fields of state.json for an error in `phase`. `step` is the optimizer step, or None if unknown."""
    if isinstance(error, (Terminated, KeyboardInterrupt)):
        return {"state": "interrupted", "reason": f"interrupted during {phase}", "phase": phase, "step": step}
    if isinstance(error, FtbenchError):
        return {"state": "error", "reason": str(error), "exit_code": error.exit_code}
    text = f"{type(error).__name__}: {error}"
    recognised = oom.recognise(text) or (oom.Oom("host") if isinstance(error, MemoryError) else None)
    if recognised is not None:
        where = f"{phase} of step {step}" if step else phase
        size = f", {recognised.bytes_requested / 2**30:.2f} GiB requested" if recognised.bytes_requested else ""
        described = asdict(oom.Oom(recognised.kind, recognised.bytes_requested, phase, step))
        return {"state": "oom", "reason": f"out of memory ({recognised.kind}) in {where}{size}", "oom": described}
    lost = {"lost_another": True} if _LOST_ANOTHER.search(text) else {}
    lines = text.strip().splitlines()
    message = lines[-1] if _OF_LOADER in lines[0] else lines[0]  # errors of a loader process start with a traceback
    return {"state": "error", "reason": f"{message[:500]} (during {phase}; see log.txt)"} | lost


def exit_now(code: int) -> NoReturn:
    """Exit without joining threads or running atexit hooks, because hooks of libraries can hang."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

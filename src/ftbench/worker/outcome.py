"""How a worker process ends: the result that it reports, and its exit."""

import os
import re
import sys
from dataclasses import asdict
from typing import Any, NoReturn

from ftbench.core import oom
from ftbench.errors import FtbenchError

# Errors of gloo, NCCL and their store after another rank ended. The run reports that rank's reason.
_LOST_ANOTHER = re.compile(r"gloo|NCCL|DistBackendError|DistNetworkError|DistStoreError|Connection (closed|reset)")

_OF_LOADER = "in DataLoader worker process"


class Terminated(BaseException):
    """The parent terminated this process."""


def of_exception(error: BaseException, phase: str, step: int | None) -> dict[str, Any]:
    """Return the fields of state.json for an error in `phase`, and in optimizer step `step` if known."""
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
    message = lines[-1] if _OF_LOADER in lines[0] else lines[0]  # a loader process puts its traceback first
    return {"state": "error", "reason": f"{message[:500]} (during {phase}; see log.txt)"} | lost


def exit_now(code: int) -> NoReturn:
    """Exit without joining threads or running atexit hooks, because hooks of libraries can hang."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

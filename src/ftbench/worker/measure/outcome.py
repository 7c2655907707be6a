"""How a run ended, from the exception that ended it."""

import re
from dataclasses import asdict
from typing import Any

from ftbench.core import oom
from ftbench.errors import FtbenchError

# What gloo, NCCL and their store say where another rank has ended: its reason is the run's.
_LOST_ANOTHER = re.compile(r"gloo|NCCL|DistBackendError|DistNetworkError|DistStoreError|Connection (closed|reset)")

_OF_LOADER = "in DataLoader worker process"


class Terminated(BaseException):
    """The parent asked this process to end."""


def of_exception(error: BaseException, phase: str, step: int | None) -> dict[str, Any]:
    """Return the fields of state.json for an error that struck in `phase`, in optimizer step `step`."""
    if isinstance(error, (Terminated, KeyboardInterrupt)):
        return {"state": "interrupted", "reason": f"interrupted during {phase}", "phase": phase, "step": step}
    if isinstance(error, FtbenchError):
        return {"state": "error", "reason": str(error), "exit_code": error.exit_code}
    text = f"{type(error).__name__}: {error}"
    recognised = oom.recognise(text) or (oom.Oom("host") if isinstance(error, MemoryError) else None)
    if recognised is not None:
        where = f"{phase} of step {step}" if step else phase
        size = f", {recognised.bytes_requested / 2**30:.2f} GiB asked for" if recognised.bytes_requested else ""
        described = asdict(oom.Oom(recognised.kind, recognised.bytes_requested, phase, step))
        return {"state": "oom", "reason": f"out of memory ({recognised.kind}) in {where}{size}", "oom": described}
    lost = {"lost_another": True} if _LOST_ANOTHER.search(text) else {}
    lines = text.strip().splitlines()
    said = lines[-1] if _OF_LOADER in lines[0] else lines[0]  # what a loader process raised stands below its traceback
    return {"state": "error", "reason": f"{said[:500]} (during {phase}; see log.txt)"} | lost

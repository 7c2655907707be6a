"""How a run ended, from the exception that ended it."""

from __future__ import annotations

from typing import Any

from ftbench.core import oom
from ftbench.errors import FtbenchError


class Terminated(BaseException):
    """The parent asked this process to end."""


def of_exception(error: BaseException, phase: str, step: int | None) -> dict[str, Any]:
    """The fields of state.json for an error that struck in `phase`, in optimizer step `step`."""
    if isinstance(error, (Terminated, KeyboardInterrupt)):
        return {"state": "interrupted", "reason": f"interrupted during {phase}"}
    if isinstance(error, FtbenchError):
        return {"state": "error", "reason": str(error), "exit_code": error.exit_code}
    text = f"{type(error).__name__}: {error}"
    found = oom.recognise(text) or (oom.Oom("host") if isinstance(error, MemoryError) else None)
    if found is not None:
        where = f"{phase} of step {step}" if step else phase
        asked = f", {found.bytes_requested / 2**30:.2f} GiB asked for" if found.bytes_requested else ""
        told = oom.Oom(found.kind, found.bytes_requested, phase, step)
        return {"state": "oom", "reason": f"out of memory ({found.kind}) in {where}{asked}", "oom": told.as_dict()}
    return {"state": "error", "reason": f"{text.strip().splitlines()[0][:500]} (during {phase}; see log.txt)"}

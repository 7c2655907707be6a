"""Waiting for what another process or thread does: with a limit that only a hang reaches, also on a loaded machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from ftbench.launch import supervisor

LIMIT_S = 90.0


def without_supervisors(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that train."""
    return [process for process in processes if supervisor.__file__ not in process.info["cmdline"]]


def eventually(holds: Callable[[], Any], what: str = "waited too long") -> Any:
    """Return the first true value of `holds`; fail the test with `what` if there is none in LIMIT_S."""
    limit = time.monotonic() + LIMIT_S
    while not (value := holds()):
        if time.monotonic() > limit:
            pytest.fail(what)
        time.sleep(0.01)
    return value

"""Lock a folder for one sweep at a time. The lock is an `flock`: the kernel releases it when the process ends."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ftbench.core import processes
from ftbench.errors import MissingError
from ftbench.store import rundir

LOCK = ".lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder during the `with` block. Raise MissingError if another sweep has locked the folder."""
    path = folder / LOCK
    with rundir.writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = rundir.read_json(path)
            who = f"process {holder['pid']} on {holder['host']}" if holder.get("pid") else "another process"
            raise MissingError(
                f"{folder}: a sweep is already running ({who}); watch it with `ftbench sweep --status {folder}`, or "
                "choose another --out"
            ) from None
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(processes.this_process()).encode(), 0)
        yield
        os.ftruncate(file, 0)
    finally:
        os.close(file)


def is_held(folder: Path) -> bool:
    """Return whether a sweep is running in the folder."""
    try:
        file = os.open(folder / LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False

"""The journal of a sweep, and the lock that allows one sweep per folder.

The journal is for people: losing a line loses no result. The kernel releases the lock (flock) when its owner ends.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ftbench.core import processes
from ftbench.errors import FtbenchError
from ftbench.store import rundir

LOCK, JOURNAL = ".lock", "journal.jsonl"


class Journal:
    """Append one JSON object per line. An incomplete last line of an earlier crash is terminated first."""

    def __init__(self, path: Path) -> None:
        self._path, self._torn = path, False
        with rundir.writing(path):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
            size = os.fstat(self._file).st_size
            if size and os.pread(self._file, 1, size - 1) != b"\n":
                os.write(self._file, b"\n")

    def write(self, event: str, **more: Any) -> None:
        """Append an event with the time in UTC. Raise MissingError if the disk is full."""
        line = json.dumps({"at": rundir.now(), "event": event, **more}, ensure_ascii=False) + "\n"
        data = (b"\n" if self._torn else b"") + line.encode("utf-8", errors="backslashreplace")
        with rundir.writing(self._path):
            while data:
                written = os.write(self._file, data)
                self._torn = written < len(data)
                data = data[written:]

    def close(self) -> None:
        os.close(self._file)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder for this process. Raise FtbenchError with the pid of another sweep that holds it."""
    path = folder / LOCK
    with rundir.writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        if not _lock(file):
            holder = holder_of(folder)
            who = f"process {holder['pid']} on {holder['host']}" if holder.get("pid") else "another process"
            raise FtbenchError(
                f"{folder}: a sweep is already running ({who}); watch it with `ftbench sweep --status {folder}`, or "
                "choose another --out"
            )
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(processes.this_process()).encode(), 0)
        yield
        os.ftruncate(file, 0)
    finally:
        os.close(file)


def _lock(file: int) -> bool:
    """Take the lock. Retry for a moment, because `is_held` takes it for an instant."""
    for _ in range(5):
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(0.05)
    return False


def holder_of(folder: Path) -> dict[str, Any]:
    """Return the process that holds the folder, or held it when it was killed."""
    return rundir.read_json(folder / LOCK)


def is_held(folder: Path) -> bool:
    """Return whether a sweep is running in the folder."""
    try:
        file = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False

"""What happened in the night, a line an event, and the lock that keeps a second sweep out of the folder.

The journal is a history for people: the run directories alone say what is done, so that a lost line loses
nothing. The lock is the kernel's (flock): it goes with its owner, however that ends; a sign of life beside it is for
other machines.
"""

import errno
import fcntl
import json
import os
import platform
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ftbench.errors import FtbenchError
from ftbench.store import process_identity, rundir

LOCK, JOURNAL = ".lock", "journal.jsonl"
BEAT_S, DEAD_S = 5.0, 30.0


def _opened(path: Path, flags: int) -> int:
    """Open a file of a folder that may be a stranger's: no link out of it, no pipe that waits. Raise OSError."""
    file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "is no plain file", str(path))
    return file


class Journal:
    """Appends whole lines; an unfinished one that a crash left is ended first, so that it spoils no other."""

    def __init__(self, path: Path) -> None:
        self._path, self._torn = path, False
        with rundir.writing(path):
            self._file = _opened(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            size = os.fstat(self._file).st_size
            if size and os.pread(self._file, 1, size - 1) != b"\n":
                os.write(self._file, b"\n")

    def write(self, event: str, **more: Any) -> None:
        """Append one event with its time (UTC). Raise MissingError if the disk does not take it."""
        line = json.dumps({"at": rundir.now(), "event": event, **more}, ensure_ascii=False) + "\n"
        data = (b"\n" if self._torn else b"") + line.encode("utf-8", errors="backslashreplace")
        with rundir.writing(self._path):
            while data:
                taken = os.write(self._file, data)
                self._torn = taken < len(data)
                data = data[taken:]

    def close(self) -> None:
        os.close(self._file)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder for this process. Raise FtbenchError with the pid of the sweep that has it already."""
    path = folder / LOCK
    with rundir.writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        file = _opened(path, os.O_RDWR | os.O_CREAT)
    try:
        if not _take(file) or _beats_elsewhere(folder):
            holder = holder_of(folder)
            who = f"process {holder['pid']} on {holder['host']}" if holder.get("pid") else "another process"
            raise FtbenchError(
                f"{folder}: a sweep is running there ({who}); watch it with `ftbench sweep --status {folder}`, or "
                "give this one another --out"
            ) from None
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(process_identity.this_process()).encode(), 0)
        with _beating(path):
            yield
        os.ftruncate(file, 0)
    finally:
        os.close(file)


@contextmanager
def _beating(path: Path) -> Iterator[None]:
    """Touch a file every BEAT_S: a sign of life for other machines."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(BEAT_S):
            with suppress(OSError):
                os.utime(path)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _beats_elsewhere(folder: Path) -> bool:
    """Return whether a sweep on another machine holds the folder, of whose lock this machine's kernel may know nothing
    (a disk mounted with local locks). The disk's own clock tells how old its last sign of life is."""
    if holder_of(folder).get("host") in (None, platform.node()):
        return False
    with suppress(OSError), tempfile.NamedTemporaryFile(dir=folder, prefix=LOCK) as now:
        return os.fstat(now.fileno()).st_mtime - (folder / LOCK).stat().st_mtime < DEAD_S
    return False


def _take(file: int) -> bool:
    """Try for a moment: somebody who asks whether the lock is held holds it himself while he asks."""
    for _ in range(5):
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(0.05)
    return False


def holder_of(folder: Path) -> dict[str, Any]:
    """Return the process that holds, or last held, the folder."""
    return rundir.read_json(folder / LOCK)


def is_held(folder: Path) -> bool:
    """Return whether a sweep runs in the folder just now."""
    try:
        file = _opened(folder / LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return _beats_elsewhere(folder)

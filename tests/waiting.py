"""Wait for other processes and threads, with a limit that only a hang reaches."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, Self

import psutil
import pytest

LIMIT_S = 240.0


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Return free ports below the range that Linux assigns automatically (ip(7))."""

    def is_free(port: int) -> bool:
        with suppress(OSError), socket.socket() as probe:
            probe.bind((host, port))
            return True
        return False

    return list(islice(filter(is_free, random.SystemRandom().sample(range(20_000, 32_768), 1000)), count))


def processes_about(folder: Path) -> list[psutil.Process]:
    """Return all processes that write to the log of a run in `folder`: supervisors, workers and their descendants."""
    found = []
    for process in psutil.process_iter(["ppid"]):
        with suppress(OSError):
            found += [process] if os.readlink(f"/proc/{process.pid}/fd/1").startswith(f"{folder.resolve()}/") else []
    return found


def without_supervisors(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Return the processes below the supervisor."""
    parents = {process.pid: process.info["ppid"] for process in processes}
    return [process for process in processes if parents[process.pid] in parents]


def training(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Return the processes of mock runs."""
    found = []
    for process in processes:
        with suppress(psutil.Error):
            found += [process] if process.cmdline()[3:4] == ["ftbench.launch.mock"] else []
    return found


class Holder:
    """A cluster whose mock runs wait in their first step between `hold` and `release` (tests/held)."""

    folder: Path

    def holding(self) -> dict[str, str]:
        """Return the environment variables of a run that can wait."""
        path = f"{Path(__file__).parent / 'held'}:{os.environ.get('PYTHONPATH', '')}"
        return {"PYTHONPATH": path.rstrip(":"), "FTBENCH_TEST_HELD": str(self.folder / "held")}

    def hold(self) -> None:
        (self.folder / "held").touch()

    def release(self) -> None:
        (self.folder / "held").unlink(missing_ok=True)


def eventually(holds: Callable[[], Any], what: str = "waited too long") -> Any:
    """Return the first true value of `holds`, or fail the test with `what` after LIMIT_S seconds.

    Calls take at most a quarter of the time, so that other processes can run.
    """
    limit = time.monotonic() + LIMIT_S
    while True:
        begin = time.monotonic()
        if value := holds():
            return value
        end = time.monotonic()
        if end > limit:
            pytest.fail(what)
        time.sleep(max(0.01, 3 * (end - begin)))


class Child:
    """A command in a separate process. Leaving the context ends all its processes."""

    process: Any
    code: int
    stdout: str
    stderr: str

    def children(self) -> list[psutil.Process]:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in (self.process, *self.children()):
            with suppress(psutil.NoSuchProcess):  # it has ended
                process.kill()
        self.process.communicate()

    def finish(self, within: float = 300.0) -> Self:
        """Wait for the end and keep the output."""
        self.stdout, self.stderr = self.process.communicate(timeout=within)
        self.code = self.process.returncode
        return self

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def until(self, holds: Callable[[], Any]) -> None:
        def going() -> bool:
            if holds():
                return True
            assert self.process.poll() is None, f"ended early: {self.process.communicate()}"
            return False

        eventually(going)


def fill(folder: Path) -> Path:
    """Fill the disk to the last byte."""
    path = folder / "filler"
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    for size in (2**20, 2**12, 1):
        with suppress(OSError):
            while os.write(file, b"\0" * size):
                pass
    os.close(file)
    return path

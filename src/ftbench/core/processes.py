"""Run programs, identify Linux processes, and handle a closed stderr."""

import errno
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def run_program(
    command: Sequence[str], limit_s: float, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program and return its exit code and output.

    Raises:
        OSError: The program cannot be started. TimeoutError (a subclass): the time limit of `limit_s` seconds is over.
    """
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=limit_s,
            env=environment, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise TimeoutError(errno.ETIMEDOUT, "does not answer") from None


def this_process() -> dict[str, Any]:
    """Return a dict that identifies this process: `pid`, `start`, `boot` and `host`."""
    pid = os.getpid()
    return {"pid": pid, "start": process_start(pid), "boot": boot_id(), "host": platform.node()}


def alive(owner: dict[str, Any]) -> bool:
    """Return whether the process with the identity `owner` (see `this_process`) still runs on this machine."""
    pid = owner.get("pid")
    if owner.get("boot") != boot_id() or owner.get("host") != platform.node() or not isinstance(pid, int):
        return False
    return process_start(pid) is not None and process_start(pid) == owner.get("start")


def process_start(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot. Return None if the process does not exist.

    The pid and the start time identify a process until the next boot (proc(5), field 22 of stat).
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])


def boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


@contextmanager
def optional_stderr() -> Iterator[None]:
    """Run the block. If it cannot write to stderr, for example to a closed pipe, discard all later output to stderr."""
    try:
        yield
    except OSError:
        discard_stderr()


def discard_stderr() -> None:
    """Redirect stderr to /dev/null."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stderr.fileno())
    os.close(null)

"""Identify a process so that the identity can be checked after a crash or a reboot (Linux)."""

import os
import platform
from pathlib import Path
from typing import Any


def this_process() -> dict[str, Any]:
    """Return the identity of this process, to store in a file."""
    pid = os.getpid()
    return {"pid": pid, "start": process_start(pid), "boot": boot_id(), "host": platform.node()}


def alive(owner: dict[str, Any]) -> bool:
    """Return whether the process with this identity is still running on this machine."""
    pid = owner.get("pid")
    if owner.get("boot") != boot_id() or owner.get("host") != platform.node() or not isinstance(pid, int):
        return False
    return process_start(pid) is not None and process_start(pid) == owner.get("start")


def process_start(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot, or None if it does not exist.

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

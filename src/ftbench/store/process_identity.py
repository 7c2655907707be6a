"""Which process something belongs to, described so that it can be checked after a crash or a reboot. Linux."""

import os
import platform
from pathlib import Path
from typing import Any


def this_process() -> dict[str, Any]:
    """Return who this process is, for a file."""
    pid = os.getpid()
    return {"pid": pid, "start": process_start(pid), "boot": boot_id(), "host": platform.node()}


def alive(owner: dict[str, Any]) -> bool:
    """Return whether the process that `this_process` described still runs, on this machine."""
    pid = owner.get("pid")
    if owner.get("boot") != boot_id() or owner.get("host") != platform.node() or not isinstance(pid, int):
        return False
    return process_start(pid) is not None and process_start(pid) == owner.get("start")


def process_start(pid: int) -> int | None:
    """Return when a process began, in clock ticks since boot; None if there is no such process. With the pid it names
    one process for as long as the machine is up (proc(5), field 22 of stat)."""
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

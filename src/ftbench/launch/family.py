"""The processes of a run's child, wherever they went.

Each inherits a mark in its environment, and where the system gives one, a control group of that name (cgroups(7),
version 2), which nothing leaves that changes its environment, its session or its user, and which the kernel kills at
once. It is made below the own one, where this user may write there: as root outside of containers, or where systemd has
delegated it (`systemd-run --user --scope -p Delegate=yes ftbench …`). Containers mount it read-only, as a rule.
"""

import os
import re
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ftbench.launch.supervisor import MARK
from ftbench.store.process_identity import process_start

PATIENCE_S = 8.0  # for what is killed to be gone; what waits for a broken device outlives that
_POLL_S = 0.01
_GROUP = "ftbench-"  # before the mark, in the name of a control group
_OF_MARK = re.compile(rf"(?:(?:^|\0){MARK}=|/{_GROUP})(\d+\.\d+\.\d+\.[0-9a-f]+)(?:\0|/|$)".encode(), re.MULTILINE)


def new_mark() -> str:
    """Return a mark that is no other's and says which process it is of: `namespace.pid.start.random`."""
    namespace = 0
    with suppress(OSError):  # some sandboxes show none
        namespace = os.stat("/proc/self/ns/pid").st_ino
    return f"{namespace}.{os.getpid()}.{process_start(os.getpid())}.{uuid.uuid4().hex}"


def own_group() -> Path | None:
    """Return the folder of this process's control group; None where version 2 is not mounted."""
    try:
        groups, mounts = (Path(f"/proc/self/{name}").read_text().splitlines() for name in ("cgroup", "mountinfo"))
        path = next(line[3:] for line in groups if line.startswith("0::"))
        fields = next(line.split() for line in mounts if " - cgroup2 " in line)  # proc(5): root 4, mount point 5
        return Path(fields[4]) / Path(path).relative_to(fields[3])
    except (OSError, StopIteration, ValueError):
        return None


@contextmanager
def control_group(mark: str) -> Iterator[Path | None]:
    """Yield a new control group for the processes of a mark, empty in the end; None where the system gives none."""
    group = _new_group(mark)
    try:
        yield group
    finally:
        if group is not None:
            end_group(group)


def _new_group(mark: str) -> Path | None:
    if (own := own_group()) is None:
        return None
    group = own / f"{_GROUP}{mark}"
    with suppress(OSError):
        group.mkdir()
        if (group / "cgroup.kill").exists():  # since Linux 5.14
            return group
        group.rmdir()
    return None


def end_group(group: Path) -> None:
    """Kill what is in a control group, and remove it with those within."""
    end = time.monotonic() + PATIENCE_S
    with suppress(OSError):
        (group / "cgroup.kill").write_text("1")
    while group.exists() and time.monotonic() < end:
        for folder, _, _ in os.walk(group, topdown=False):
            with suppress(OSError):
                os.rmdir(folder)
        time.sleep(_POLL_S if group.exists() else 0)


def end_marked(is_meant: Callable[[str], bool]) -> None:
    """Kill the processes whose mark is meant, until none is left: one whose memory is gone, and its mark with it, may
    still hold the GPU."""
    end, killed = time.monotonic() + PATIENCE_S, dict[int, int | None]()
    while True:
        killed |= {pid: process_start(pid) for pid, mark in _marked() if is_meant(mark)}
        killed = {pid: start for pid, start in killed.items() if start is not None and process_start(pid) == start}
        for pid in killed:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not killed or time.monotonic() > end:
            return
        time.sleep(_POLL_S)


def end_orphans() -> None:
    """End what is left of runs whose ftbench was killed together with all that guard it: it would hold the GPU."""
    namespace, *_ = new_mark().split(".")

    def orphaned(mark: str) -> bool:
        where, pid, start, *_ = mark.split(".")
        return where == namespace and process_start(int(pid)) != int(start)

    own = own_group()
    for group in own.glob(f"{_GROUP}*.*.*.*") if own else ():
        if orphaned(group.name.removeprefix(_GROUP)):
            end_group(group)
    end_marked(orphaned)


def _marked() -> Iterator[tuple[int, str]]:
    """Yield the processes that have a mark, of this user in their environment, of any in their control group."""
    for folder in Path("/proc").glob("[0-9]*"):
        for name in ("environ", "cgroup"):
            with suppress(OSError):
                if mark := _OF_MARK.search((folder / name).read_bytes()):
                    yield int(folder.name), mark[1].decode()
                    break

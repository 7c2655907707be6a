"""Make ftbench runs on one GPU wait for each other, because simultaneous runs would slow each other down."""

import fcntl
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from ftbench.store import machine
from ftbench.store.run_warnings import is_free
from ftbench.store.rundir import WAITING, RunDir, gpus_of, read_json, write_json
from ftbench.worker.outcome import Phases

RETURN_S = 30.0  # longest wait until the driver has freed the memory of a finished process
STILL_S = 5.0  # used memory that does not change for this time belongs to another program: stop waiting
_POLL_S = 0.1
_held: list[int] = []  # lock files, which the kernel unlocks when this process ends


def acquire(directory: RunDir, phases: Phases) -> None:
    """Lock the GPUs in machine.json: wait until other ftbench runs have ended and freed the GPUs' memory.

    Then update the state of the GPUs in machine.json, because the parent may have read the state during another run.
    """
    node = os.environ.get("GROUP_RANK", "0")  # node 0 adds the files of the other nodes to machine.json at the end
    file = directory.machine if node == "0" else directory.path / f"machine.node{node}.json"
    gpus = [gpu for gpu in gpus_of(read_json(file)) if gpu.get("uuid")]
    if not gpus or _held:
        return
    for gpu in sorted(gpus, key=lambda gpu: gpu["uuid"]):  # a fixed order prevents deadlocks
        if not try_acquire(gpu):
            with phases.within(WAITING):
                fcntl.flock(_held[-1], fcntl.LOCK_EX)
    now = [machine.gpu(gpu["uuid"]) or gpu for gpu in gpus]
    if not all(map(is_free, now)):
        with phases.within(WAITING):
            now = [_when_free(gpu) for gpu in now]
    write_json(file, read_json(file) | {"gpus": now})


def try_acquire(gpu: dict[str, Any] | None) -> bool:
    """Lock the GPU for this process. Return False if another process has locked the GPU."""
    if not gpu or not gpu.get("uuid"):
        return True
    if (lock := _open(Path(tempfile.gettempdir()) / f"ftbench-{gpu['uuid']}.lock")) is None:
        return True
    _held.append(lock)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _open(path: Path) -> int | None:
    """Open the lock file and return its file descriptor. If this fails, return None: the GPU is then not locked."""
    for flags in (os.O_RDONLY, os.O_RDONLY | os.O_CREAT):  # in /tmp, Linux forbids O_CREAT for another user's file
        try:
            return os.open(path, flags, 0o644)
        except OSError:
            continue
    return None


def _when_free(gpu: dict[str, Any]) -> dict[str, Any]:
    """Wait until the GPU is free, but at most `RETURN_S` seconds. Return the state of the GPU."""
    begin = changed = time.monotonic()
    while not is_free(gpu) and (now := time.monotonic()) < begin + RETURN_S and now < changed + STILL_S:
        time.sleep(_POLL_S)
        after = machine.gpu(gpu["uuid"]) or gpu
        if after.get("memory_used_before_gb") != gpu.get("memory_used_before_gb"):
            changed = now
        gpu = after
    return gpu

"""Runs of ftbench on one GPU take turns: two at a time would spoil each other's figures."""

import fcntl
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from ftbench.store import machine
from ftbench.store.run_warnings import FOREIGN_MEMORY_GB
from ftbench.store.rundir import WAITING, RunDir, gpus_of, read_json, write_json
from ftbench.worker.measure.phases import Phases

RETURN_S = 30.0  # how long the memory of a process that has ended is waited for,
STILL_S = 5.0  # and how long while nothing of it comes back: then somebody else is using it
_POLL_S = 0.1
_held: list[int] = []  # as long as this process lives; the kernel gives it back however that ends


def acquire(directory: RunDir, phases: Phases) -> None:
    """Wait until no other run of ftbench has a GPU of machine.json and their memory is back, and have them from then
    on. Write into machine.json what they are like now: what the parent saw may have been another run's."""
    gpus = [gpu for gpu in gpus_of(read_json(directory.machine)) if gpu.get("uuid")]
    if not gpus or _held:
        return
    for gpu in sorted(gpus, key=lambda gpu: gpu["uuid"]):  # in one order, so that no two runs wait for each other
        if not try_acquire(gpu):
            with phases.within(WAITING):
                fcntl.flock(_held[-1], fcntl.LOCK_EX)
    now = [machine.gpu(gpu["uuid"]) or gpu for gpu in gpus]
    if not all(map(_is_free, now)):
        with phases.within(WAITING):
            now = [_when_free(gpu) for gpu in now]
    described = read_json(directory.machine)
    write_json(directory.machine, described | {"gpus": now})


def try_acquire(gpu: dict[str, Any] | None) -> bool:
    """Return whether nobody else has the GPU; then this process has it."""
    if not gpu or not gpu.get("uuid"):
        return True
    if (lock := _opened(Path(tempfile.gettempdir()) / f"ftbench-{gpu['uuid']}.lock")) is None:
        return True
    _held.append(lock)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _opened(path: Path) -> int | None:
    """Open a file that any user may lock; None where there is none to be had, and then nobody waits."""
    for flags in (os.O_RDONLY, os.O_RDONLY | os.O_CREAT):  # another user's file in /tmp may be opened and not created
        try:
            return os.open(path, flags, 0o644)
        except OSError:
            continue
    return None


def _is_free(gpu: dict[str, Any]) -> bool:
    return not gpu.get("foreign_processes") and (gpu.get("memory_used_before_gb") or 0.0) <= FOREIGN_MEMORY_GB


def _when_free(gpu: dict[str, Any]) -> dict[str, Any]:
    """Return the GPU as it is once it is free, or once that is no longer to be expected."""
    begin = changed = time.monotonic()
    while not _is_free(gpu) and (now := time.monotonic()) < begin + RETURN_S and now < changed + STILL_S:
        time.sleep(_POLL_S)
        after = machine.gpu(gpu["uuid"]) or gpu
        if after.get("memory_used_before_gb") != gpu.get("memory_used_before_gb"):
            changed = now
        gpu = after
    return gpu

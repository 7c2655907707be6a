"""Runs of ftbench on one GPU take turns: two at a time would spoil each other's figures."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path
from typing import Any

from ftbench.store import machine
from ftbench.store.rundir import WAITING, RunDir, read_json, write_json
from ftbench.worker.measure.phases import Phases

_held: list[int] = []  # as long as this process lives; the kernel gives it back however that ends


def take(directory: RunDir, phases: Phases) -> None:
    """Returns when no other run of ftbench on this machine has the GPU of machine.json, and has it from then on."""
    gpu = read_json(directory.machine).get("gpu")
    if gpu and not _held and not take_now(gpu):
        with phases.within(WAITING):
            fcntl.flock(_held[0], fcntl.LOCK_EX)
        _look_again(directory, gpu["uuid"])


def take_now(gpu: dict[str, Any] | None) -> bool:
    """Whether nobody else has the GPU; then this process has it."""
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
    """A file that any user may lock; None where there is none to be had, and then nobody waits."""
    for flags in (os.O_RDONLY, os.O_RDONLY | os.O_CREAT):  # another user's file in /tmp may be opened and not created
        try:
            return os.open(path, flags, 0o644)
        except OSError:
            continue
    return None


def _look_again(directory: RunDir, uuid: str) -> None:
    """What machine.json says of the GPU is from before the wait: memory and processes were another run's."""
    described: dict[str, Any] = read_json(directory.machine)
    if (gpu := machine.gpu(uuid)) is not None:
        write_json(directory.machine, described | {"gpu": gpu})

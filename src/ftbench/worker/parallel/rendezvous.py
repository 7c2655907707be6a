"""Join the process group of a run, and exit on SIGTERM while waiting for another rank."""

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ftbench.errors import MissingError
from ftbench.worker.device import device

LISTENER = "FTBENCH_RENDEZVOUS"  # file descriptor of a socket that already listens on the master port
PATIENCE = timedelta(days=1)  # longer than the limit of ftbench's watchdog, which has a clearer message
GRACE_S = 1.0  # time for the main thread to exit by itself after SIGTERM


def join() -> None:
    """Join the process group: NCCL for GPUs, gloo for a CPU. Raise MissingError without a connection."""
    gpu = device() if torch.cuda.is_available() else None
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = _store(rank, world)  # waits for rank 0, which has acquired the GPUs
    if gpu is not None:
        torch.cuda.set_device(gpu)  # uses memory of the GPU
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if gpu else "gloo", store=store, rank=rank, world_size=world, timeout=PATIENCE,
        device_id=gpu,
    )  # fmt: skip


def _store(rank: int, world: int) -> dist.TCPStore:
    host, port, listener = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), os.environ.pop(LISTENER, None)
    try:
        return dist.TCPStore(
            host, port, world, is_master=rank == 0, timeout=PATIENCE, wait_for_workers=False,
            master_listen_fd=None if listener is None else int(listener),
        )  # fmt: skip
    except dist.DistNetworkError as error:
        raise MissingError(
            f"rank {rank} cannot connect to the other ranks at MASTER_ADDR={host}, MASTER_PORT={port}: "
            f"{str(error).strip().splitlines()[0]} Choose a free port that every node can reach"
        ) from None


def exit_on_sigterm(write: Callable[[], Any]) -> None:
    """After SIGTERM, give the main thread GRACE_S seconds to exit. Then call `write` and exit the process.

    The main thread may wait for another rank in a driver or library. Python signal handlers do not run there.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def wait() -> None:
        while signal.SIGTERM not in os.read(reader, 4096):
            pass
        time.sleep(GRACE_S)
        write()
        os._exit(1)

    threading.Thread(target=wait, name="ftbench-sigterm", daemon=True).start()

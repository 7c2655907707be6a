"""How the ranks of a run find each other, and what one says that waits for another as it is told to end."""

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

LISTENER = "FTBENCH_RENDEZVOUS"  # the descriptor of a socket that already listens where the ranks meet
PATIENCE = timedelta(days=1)  # a rank that hangs is ftbench's to find: libraries give up sooner, and say less
ANSWER_S = 1.0  # how long the main thread may take to end by itself once it is told to


def meet() -> None:
    """Join the process group of the run: NCCL between GPUs, gloo between processes on the CPU. Raise MissingError where
    it cannot be had."""
    gpu = device() if torch.cuda.is_available() else None
    if gpu is not None:
        if not dist.is_nccl_available():
            raise MissingError(
                f"several GPUs need NCCL and torch {torch.__version__} was built without it: install a build of torch "
                "for CUDA on Linux, or set launch.gpus to 1"
            )
        torch.cuda.set_device(gpu)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if gpu else "gloo", store=_store(rank, world), rank=rank, world_size=world,
        timeout=PATIENCE, device_id=gpu,
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
            f"rank {rank} cannot meet the others at MASTER_ADDR={host}, MASTER_PORT={port}: "
            f"{str(error).strip().splitlines()[0]} Choose a free port that every node reaches"
        ) from None


def answer_when_told_to_end(write: Callable[[], Any]) -> None:
    """Call `write` and end this process where TERM has come and the main thread does not heed it: it waits in the
    driver or in a library for another rank, where no handler of Python's runs."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def wait() -> None:
        while signal.SIGTERM not in os.read(reader, 4096):
            pass
        time.sleep(ANSWER_S)
        write()
        os._exit(1)

    threading.Thread(target=wait, name="ftbench-answer", daemon=True).start()

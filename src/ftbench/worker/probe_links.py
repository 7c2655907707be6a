"""Test all-reduce over several GPUs.

NCCL can hang if the path between two GPUs is broken (peer access over PCIe on some boards), and such a call cannot be
cancelled. So each rank is a separate process with a time limit.
"""

import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.benchmark import Timer

from ftbench.store.rundir import read_json, write_json
from ftbench.worker.outcome import exit_now

LINKS_S, TIMEOUT_S = 8.0, 20.0  # enough to import torch, connect and measure on a healthy machine; at most
REDUCE_BYTES = {"nccl": 2**28, "gloo": 2**22}


Call = Callable[[], object]


def timer(call: Call) -> Any:
    """Return torch's timer of a call, which waits for the device."""
    return Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())


def faster_half(times: list[float]) -> float:
    """Return the median of the faster half (rounded up) of the times."""
    return statistics.median(sorted(times)[: math.ceil(len(times) / 2)])


def self_test(world: int, backend: str, left_s: float) -> tuple[dict[str, Any], list[str]]:
    """Return the bandwidth of all-reduce over `world` GPUs, and notes. If the test fails, repeat it without
    peer access, the known workaround."""
    end, allowed = time.monotonic() + left_s, os.environ.get("NCCL_P2P_DISABLE", "0")
    figures, reason = attempt(world, backend, {}, min(TIMEOUT_S, max(LINKS_S, left_s * 0.6)))
    if not reason:
        return figures | {"peer_access": allowed == "0"}, []
    notes = [f"links: the ranks {reason}"]
    if backend == "nccl" and allowed == "0" and (left_s := end - time.monotonic()) >= LINKS_S * 0.8:
        figures, again = attempt(world, backend, {"NCCL_P2P_DISABLE": "1"}, left_s)
        if not again:
            notes.append("links: with NCCL_P2P_DISABLE=1 they work; set it for all runs on several GPUs")
            return figures | {"peer_access": False}, notes
        notes.append(f"links: with NCCL_P2P_DISABLE=1 the ranks {again}; use one GPU, and see NCCL_DEBUG=INFO")
    return figures, notes


def attempt(
    world: int, backend: str, environment: Mapping[str, str], timeout_s: float
) -> tuple[dict[str, Any], str | None]:
    """Run one test in separate processes. Return the measurements and the end of a sentence about a failure."""
    end, reason = time.monotonic() + timeout_s, None
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "links.json")
        arguments = (backend, world, str(Path(folder, "meeting")), str(out), environment)
        ranks: Any = mp.start_processes(_rank, arguments, world, join=False, start_method="spawn")
        try:
            while not ranks.join(timeout=max(0.0, end - time.monotonic())):
                if time.monotonic() >= end:
                    reason = f"did not finish within {timeout_s:.0f} s and were killed: a collective or a link hangs"
                    break
        except (mp.ProcessExitedException, mp.ProcessRaisedException) as error:
            reason = f"failed: {str(error).strip().splitlines()[-1]}"
        for process in ranks.processes:
            process.kill()
            process.join(timeout=2)  # a process that waits for a broken GPU survives SIGKILL
        return {"gpus": world, "backend": backend, "all_reduce_bus_gbs": None, **read_json(out)}, reason


def _rank(rank: int, backend: str, world: int, meeting: str, out: str, environment: Mapping[str, str]) -> None:
    """Check and time an all-reduce. Rank 0 writes the result."""
    os.environ |= environment
    cuda = backend == "nccl"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend, init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=timedelta(seconds=TIMEOUT_S),
        device_id=device if cuda else None,
    )  # fmt: skip
    small = torch.full((1024,), float(rank + 1), device=device)
    dist.all_reduce(small)
    if float(small[0]) != world * (world + 1) / 2:
        raise RuntimeError(f"the sum over the ranks is {float(small[0])}, not {world * (world + 1) / 2}")
    figures = {"all_reduce_bus_gbs": _all_reduce(backend, world, device)}
    if rank == 0:
        write_json(Path(out), figures)
    dist.barrier()
    exit_now(0)  # also ends NCCL's threads


def _all_reduce(backend: str, world: int, device: torch.device) -> float:
    """Return the bus bandwidth in GB/s as defined by nccl-tests: 2 (n - 1) / n times the tensor's bytes."""
    data = torch.zeros(REDUCE_BYTES[backend] // 4, device=device)
    timed = timer(lambda: dist.all_reduce(data))
    timed.timeit(1)  # the first call selects an algorithm
    # All ranks must make the same number of calls, so rank 0 decides.
    count = torch.tensor([max(1, round(0.02 / timed.timeit(3).mean))], device=device)
    dist.broadcast(count, 0)
    times = [timed.timeit(int(count)).mean for _ in range(10)]
    return 2 * (world - 1) / world * data.nbytes / faster_half(times) / 1e9

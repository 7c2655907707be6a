"""Test all-reduce over several GPUs and measure each link.

NCCL can hang if the path between two GPUs is broken (peer access over PCIe on some boards), and such a call cannot be
cancelled. So each rank is a separate process with a time limit: `python -m ftbench.worker.probe.links BACKEND RANK
WORLD MEETING_FILE OUT_FILE`.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ftbench.store.rundir import read_json, write_json
from ftbench.worker.measure.meters import CudaClock, meters
from ftbench.worker.outcome import exit_now
from ftbench.worker.probe.timing import Budget, batch_size, faster_half, first_call, timed_batch

MINIMUM_S = 8.0  # enough to import torch, connect and measure on a healthy machine
TIMEOUT_S = 20.0
REDUCE_BYTES = {"nccl": 2**28, "gloo": 2**22}
PEER_BYTES = 2**27
POLL_S = 0.05


def self_test(world: int, backend: str, budget: Budget) -> tuple[dict[str, Any], list[str]]:
    """Return the bandwidth of all-reduce and links over `world` GPUs, and notes. If the test fails, repeat it without
    peer access, the known workaround."""
    figures, reason = attempt(world, backend, os.environ, min(TIMEOUT_S, max(MINIMUM_S, budget.left() * 0.6)))
    if not reason:
        return figures | {"peer_access": os.environ.get("NCCL_P2P_DISABLE", "0") == "0"}, []
    notes = [f"links: the ranks {reason}"]
    if backend == "nccl" and os.environ.get("NCCL_P2P_DISABLE", "0") == "0" and budget.left() >= MINIMUM_S * 0.8:
        figures, again = attempt(world, backend, {**os.environ, "NCCL_P2P_DISABLE": "1"}, budget.left())
        if not again:
            notes.append("links: with NCCL_P2P_DISABLE=1 they work; set it for all runs on several GPUs")
            return figures | {"peer_access": False}, notes
        notes.append(f"links: with NCCL_P2P_DISABLE=1 the ranks {again}; use one GPU, and see NCCL_DEBUG=INFO")
    return figures, notes


def attempt(
    world: int, backend: str, environment: Mapping[str, str], timeout_s: float
) -> tuple[dict[str, Any], str | None]:
    """Run one test in separate processes. Return the measurements and the reason of a failure."""
    with tempfile.TemporaryDirectory() as folder:
        out, meeting = Path(folder, "links.json"), Path(folder, "meeting")
        ranks = [
            [sys.executable, "-P", "-m", __name__, backend, str(rank), str(world), str(meeting), str(out)]
            for rank in range(world)
        ]
        reason = supervise(ranks, environment, Path(folder), timeout_s)
        return {"gpus": world, "backend": backend, "all_reduce_bus_gbs": None, "pairs": [], **read_json(out)}, reason


def supervise(
    commands: Sequence[Sequence[str]], environment: Mapping[str, str], folder: Path, timeout_s: float
) -> str | None:
    """Run the commands in parallel. If one fails or the time is over, kill all and their children. Return the failure
    as the end of a sentence, or None."""
    end = time.monotonic() + timeout_s
    logs = [folder / f"rank-{number}.log" for number in range(len(commands))]
    children: list[subprocess.Popen[bytes]] = []
    try:
        for command, log in zip(commands, logs, strict=True):
            with log.open("wb") as output:
                children.append(subprocess.Popen(
                    command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                    process_group=0,
                ))  # fmt: skip
        while True:
            codes = [child.poll() for child in children]
            for rank, code in enumerate(codes):
                if code:
                    return f"failed: rank {rank} ended with exit code {code}: {_last_line(logs[rank])}"
            if all(code == 0 for code in codes):
                return None
            if time.monotonic() > end:
                return f"did not finish within {timeout_s:.0f} s and were killed: a collective or a link hangs"
            time.sleep(POLL_S)
    finally:
        left = [child for child in children if child.poll() is None]
        for child in left:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
        for child in left:
            with suppress(subprocess.TimeoutExpired):  # a process that waits for a broken GPU survives SIGKILL
                child.wait(timeout=2)


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"


# --- a rank ----------------------------------------------------------------------------------------------------------


def rank_main(backend: str, rank: int, world: int, meeting: str, out: str) -> None:
    """Check and time an all-reduce. On rank 0, also measure each link and write the results."""
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
        raise SystemExit(f"the sum over the ranks is {float(small[0])}, not {world * (world + 1) / 2}")
    figures = {"all_reduce_bus_gbs": _all_reduce(backend, world, device)}
    if rank == 0:
        write_json(Path(out), figures)
    dist.barrier()
    if rank == 0 and cuda:
        write_json(Path(out), figures | {"pairs": _pairs(world)})
    dist.barrier()


def _all_reduce(backend: str, world: int, device: torch.device) -> float:
    """Return the bus bandwidth in GB/s as defined by nccl-tests: 2 (n - 1) / n times the tensor's bytes."""
    clock, _ = meters(device)
    data = torch.zeros(REDUCE_BYTES[backend] // 4, device=device)

    def reduce() -> object:
        return dist.all_reduce(data)

    first_call(reduce, clock)
    # All ranks must make the same number of calls, so rank 0 decides.
    count = torch.tensor([batch_size(timed_batch(reduce, 3, clock))], device=device)
    dist.broadcast(count, 0)
    times = [timed_batch(reduce, int(count), clock) for _ in range(12)]
    return 2 * (world - 1) / world * data.nbytes / faster_half(times[2:]) / 1e9


def _pairs(world: int) -> list[dict[str, Any]]:
    """Return GB/s of a copy between each pair of GPUs, and whether it uses peer access."""
    pairs = []
    for source in range(world):
        for target in range(source + 1, world):
            clock = CudaClock(torch.device("cuda", source))
            data = torch.zeros(PEER_BYTES, dtype=torch.uint8, device=f"cuda:{source}")
            there = torch.empty_like(data, device=f"cuda:{target}")

            def copy(there: Any = there, data: Any = data) -> object:
                return there.copy_(data, non_blocking=True)

            with torch.cuda.device(source):
                times = [timed_batch(copy, 3, clock) for _ in range(6)]
            direct = torch.cuda.can_device_access_peer(source, target)
            pairs.append(
                {"from": source, "to": target, "gbs": PEER_BYTES / faster_half(times[1:]) / 1e9, "peer_access": direct}
            )
    return pairs


if __name__ == "__main__":
    rank_main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5])
    exit_now(0)  # also ends NCCL's threads

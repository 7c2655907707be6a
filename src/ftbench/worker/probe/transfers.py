"""Measure memory bandwidth, host link bandwidth and kernel launch time. GB are 10**9 bytes, as in data sheets."""

import time
from typing import Any

import torch

from ftbench.worker.measure.meters import Clock
from ftbench.worker.probe.timing import Call, best, faster_half, first_call

MEMORY_BYTES = 2**30  # per tensor: eight times the largest cache of an NVIDIA GPU (128 MB)
LINK_BYTES = 2**28
SECONDS = 0.6  # per measurement
LAUNCHES = 4000


def memory(device: torch.device, clock: Clock, free: float) -> dict[str, Any]:
    """Return GB/s of a copy (one tensor read, one written) and of a triad `c = a + 3 b` (two read, one written),
    counted as in STREAM, without the reads of a write-allocate cache."""
    count = int(min(MEMORY_BYTES, free / 8)) // 4
    first, second, third = (torch.empty(count, device=device).fill_(number) for number in (1.0, 2.0, 0.0))
    bytes_each = 4 * count

    return {
        "copy_gbs": _rate(2 * bytes_each, lambda: third.copy_(first), clock),
        "triad_gbs": _rate(3 * bytes_each, lambda: torch.add(first, second, alpha=3.0, out=third), clock),
        "tensor_bytes": bytes_each,
    }


def _rate(size: int, call: Call, clock: Clock) -> float:
    """Return GB/s of a call that transfers `size` bytes."""
    return size / best(call, clock, SECONDS, first_call(call, clock)) / 1e9


def host_link(device: torch.device, clock: Clock) -> dict[str, Any]:
    """Return GB/s to and from the device with pinned host memory, one direction at a time."""
    host = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(LINK_BYTES, dtype=torch.uint8, device=device)

    return {
        "to_device_gbs": _rate(LINK_BYTES, lambda: there.copy_(host, non_blocking=True), clock),
        "to_host_gbs": _rate(LINK_BYTES, lambda: host.copy_(there, non_blocking=True), clock),
        "buffer_bytes": LINK_BYTES,
    }


def launch_us(device: torch.device, clock: Clock) -> float:
    """Return the microseconds per torch operation in a long sequence of operations on one number. The kernel takes less
    time than its launch, so this is the host's time including torch's overhead."""
    number = torch.zeros(1, device=device)
    rows: list[float] = []
    for _ in range(9):
        clock.wait()
        begin = time.perf_counter()
        for _ in range(LAUNCHES):
            number.add_(1)
        clock.wait()
        rows.append((time.perf_counter() - begin) / LAUNCHES)
    return faster_half(rows[1:]) * 1e6  # the first one is warm-up

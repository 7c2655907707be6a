"""Clocks and memory meters of the device that trains: CUDA events and the caching allocator, or the host's own.

None of them synchronises; a mark on a GPU is an event in the stream, read once it has passed.
"""

import contextlib
import os
import time
from typing import Any, Protocol

import torch

from ftbench.core.units import GIB


class Clock(Protocol):
    """Marks in the order of the device's work; `seconds` between two marks that are `done`; `wait` for one, or for all
    that was asked of the device."""

    def mark(self) -> Any: ...
    def done(self, mark: Any) -> bool: ...
    def seconds(self, begin: Any, end: Any) -> float: ...
    def wait(self, mark: Any = None) -> None: ...


class HostClock:
    """On a CPU the work is done when the call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def done(self, mark: float) -> bool:
        return True

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def wait(self, mark: float | None = None) -> None:
        return None


class CudaClock:
    """Events in the current stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def done(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return begin.elapsed_time(end) / 1000

    def wait(self, mark: torch.cuda.Event | None = None) -> None:
        if mark is None:
            torch.cuda.synchronize(self._device)
        else:
            mark.synchronize()


class CudaMemory:
    """The caching allocator's own counters."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._retries = self._allocations = 0

    def read(self) -> dict[str, Any]:
        """Return columns of steps.csv since the last `reset`. One call into the allocator: the flattened dictionary of
        `torch.cuda.memory_stats` costs ten times as much."""
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        if not stats:
            return {}
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        retries, allocations = stats["num_alloc_retries"], stats["allocation"]["all"]["allocated"]
        new, self._retries = retries - self._retries, retries
        made, self._allocations = allocations - self._allocations, allocations
        return {
            "memory_allocated_gb": allocated["current"] / GIB,
            "memory_reserved_gb": reserved["current"] / GIB,
            "peak_memory_gb": allocated["peak"] / GIB,
            "peak_reserved_gb": reserved["peak"] / GIB,
            "allocator_retries": new,
            "allocations": made,
        }

    def peak_gb(self) -> float:
        """Return the highest allocated since the last `reset`."""
        return float(torch.cuda.memory_stats_as_nested_dict(self._device)["allocated_bytes"]["all"]["peak"] / GIB)

    def reset(self) -> None:
        if torch.cuda.is_initialized():  # before that there is nothing to reset, and asking raises
            torch.cuda.reset_peak_memory_stats(self._device)


class HostMemory:
    """The process's resident set. Linux counts its peak and lets a process reset it (proc(5), clear_refs); where it
    does not, the peak is the highest value read."""

    def __init__(self) -> None:
        self._status = os.open("/proc/self/status", os.O_RDONLY)

    def read(self) -> dict[str, Any]:
        text = os.pread(self._status, 4096, 0)
        now, peak = _kib(text, b"VmRSS:"), _kib(text, b"VmHWM:")
        return {"memory_allocated_gb": now, "memory_reserved_gb": now, "peak_memory_gb": peak}

    def peak_gb(self) -> float:
        return float(self.read()["peak_memory_gb"])

    def reset(self) -> None:
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
            file.write("5")


def _kib(text: bytes, name: bytes) -> float:
    start = text.index(name) + len(name)
    return int(text[start : text.index(b"kB", start)]) * 1024 / GIB


def resident_gb() -> float:
    """Return the process's resident set, in GiB (statm counts pages)."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * _PAGE / GIB


_PAGE = os.sysconf("SC_PAGE_SIZE")


def meters(device: torch.device) -> tuple[Clock, CudaMemory | HostMemory]:
    """Return the clock and the memory meter of a device."""
    if device.type == "cuda":
        return CudaClock(device), CudaMemory(device)
    return HostClock(), HostMemory()

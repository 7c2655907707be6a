"""Clocks and memory meters of the training device: CUDA events and the caching allocator, or the host's counters.

None of them synchronizes. A mark on a GPU is an event in the stream that is read after it has passed.
"""

import contextlib
import os
import time
from typing import Any

import torch

from ftbench.core.units import GIB


class HostClock:
    """The host's clock. On a CPU the work is done when the call returns."""

    def mark(self) -> Any:
        return time.perf_counter()

    def done(self, mark: Any) -> bool:
        return True

    def seconds(self, begin: Any, end: Any) -> float:
        return float(end - begin)

    def wait(self, mark: Any = None) -> None:
        return None


class CudaClock:
    """Events in the current stream of a GPU. `seconds` needs marks that are `done`. `wait()` waits for all work."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def done(self, mark: Any) -> bool:
        return bool(mark.query())

    def seconds(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1000

    def wait(self, mark: Any = None) -> None:
        if mark is None:
            torch.cuda.synchronize(self._device)
        else:
            mark.synchronize()


Clock = HostClock | CudaClock


class CudaMemory:
    """The caching allocator's own counters."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._retries = self._allocations = 0

    def read(self) -> dict[str, Any]:
        """Return columns of steps.csv since the last `reset`. `torch.cuda.memory_stats` takes ten times as long."""
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        if not stats:
            return {}
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        retries, allocations = stats["num_alloc_retries"], stats["allocation"]["all"]["allocated"]
        new, self._retries = retries - self._retries, retries
        allocated_blocks, self._allocations = allocations - self._allocations, allocations
        return {
            "memory_allocated_gb": allocated["current"] / GIB,
            "memory_reserved_gb": reserved["current"] / GIB,
            "peak_memory_gb": allocated["peak"] / GIB,
            "peak_reserved_gb": reserved["peak"] / GIB,
            "allocator_retries": new,
            "allocations": allocated_blocks,
        }

    def peak_gb(self) -> float:
        """Return the peak of allocated memory since the last `reset`, in GiB."""
        return float(torch.cuda.memory_stats_as_nested_dict(self._device)["allocated_bytes"]["all"]["peak"] / GIB)

    def reset(self) -> None:
        if torch.cuda.is_initialized():  # otherwise the call raises
            torch.cuda.reset_peak_memory_stats(self._device)


class HostMemory:
    """The process's resident set. Linux counts its peak and a process can reset it (proc(5), clear_refs)."""

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
    """Return the process's resident set in GiB."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * _PAGE / GIB  # in pages


_PAGE = os.sysconf("SC_PAGE_SIZE")


def meters(device: torch.device) -> tuple[Clock, CudaMemory | HostMemory]:
    """Return the clock and the memory meter of a device."""
    if device.type == "cuda":
        return CudaClock(device), CudaMemory(device)
    return HostClock(), HostMemory()

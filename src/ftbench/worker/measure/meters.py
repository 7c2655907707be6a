"""Clocks and memory meters of the training device, and the driver's counters.

Times and memory come from CUDA events and the caching allocator, or from the host's counters. None of them
synchronizes. A mark on a GPU is an event in the stream that is read after it has passed. The sampler reads the GPU's
power, energy, clock, temperature, throttling, memory and load, and the load of other processes, with NVML and psutil.
A counter that the driver does not have is None in every sample.
"""

import math
import os
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch

from ftbench.core.units import GIB
from ftbench.worker.measure.utilization import COLUMNS, BusyMeter, GpuLoad, HostLoad, Interval


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
        with suppress(OSError), open("/proc/self/clear_refs", "w") as file:
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


# --- the driver's counters --------------------------------------------------------------------------------------------

# nvml.h, nvmlClocksEventReasons. Idle (0x1) and the display clock (0x100) do not matter for training.
THROTTLE = {
    0x02: "application_clocks", 0x04: "sw_power_cap", 0x08: "hw_slowdown", 0x10: "sync_boost",
    0x20: "sw_thermal", 0x40: "hw_thermal", 0x80: "hw_power_brake",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading at `time` (perf_counter seconds), in W, J since the driver was loaded, MHz, °C and GiB."""

    time: float
    power_w: float | None = None
    energy_j: float | None = None
    sm_clock_mhz: float | None = None
    temperature_c: float | None = None
    throttle: int | None = None
    memory_gb: float | None = None


class Sampler:
    """Keeps the samples of a run. The recorder's thread calls `take`. Without `nvml` it only reads `others`."""

    def __init__(self, nvml: Any = None, handle: Any = None, others: Sequence[HostLoad | GpuLoad] = ()) -> None:
        self._times: list[float] = []
        self._samples: list[Sample] = []
        self._busy = BusyMeter(nvml, handle) if nvml else None
        self._meters = [*([self._busy] if self._busy else []), *others]
        self._intervals: list[list[Interval]] = [[] for _ in self._meters]
        self._readers: dict[str, Callable[[], Any]] = {}
        self._limit_w, self._carried_j = math.inf, 0.0
        if nvml is None:
            return
        self._failures = (nvml.NVMLError, AttributeError)
        memory = getattr(nvml, "nvmlDeviceGetMemoryInfo", None)
        with suppress(*self._failures):
            self._limit_w = nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000
        self._readers = {
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "energy_j": lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000,
            "sm_clock_mhz": lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            "temperature_c": lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            "throttle": lambda: int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
            "memory_gb": lambda: memory(handle).used / GIB if memory else None,
        }

    def take(self) -> None:
        """Read every counter once. A counter that fails is not read again."""
        values: dict[str, Any] = {}
        for name, read in list(self._readers.items()):
            try:
                values[name] = read()
            except self._failures:
                del self._readers[name]
        sample = Sample(time.perf_counter(), **values)
        self._times.append(sample.time)
        self._samples.append(sample)
        for meter, intervals in zip(self._meters, self._intervals, strict=True):
            intervals.extend(meter.read())

    @property
    def busy_method(self) -> str | None:
        """Source of `gpu_busy`."""
        return self._busy.method if self._busy else None

    @property
    def latest(self) -> float:
        """Time of the last sample, or minus infinity."""
        return self._times[-1] if self._times else float("-inf")

    def over(self, begin: float, end: float) -> dict[str, Any]:
        """Return the columns of steps.csv for a step from `begin` to `end` (perf_counter seconds).

        Steps must be passed in order. A step that is shorter than the sampling interval uses the samples around it.
        """
        inside = self._samples[bisect_left(self._times, begin) : bisect_right(self._times, end)]
        if not inside:
            at = bisect_left(self._times, begin)
            inside = self._samples[max(0, at - 1) : at + 1]
        if not inside:
            return {}
        reasons = [s.throttle for s in inside if s.throttle is not None]
        return {
            "power_w": _mean((1.0, s.power_w) for s in inside),
            "energy_j": self._energy(begin, end),
            "sm_clock_mhz": _mean((1.0, s.sm_clock_mhz) for s in inside),
            "temperature_c": max((s.temperature_c for s in inside if s.temperature_c is not None), default=None),
            "throttle": throttle_names(reasons) if reasons else None,
            "device_memory_gb": max((s.memory_gb for s in inside if s.memory_gb is not None), default=None),
            **self._shares(begin, end),
        }

    def _shares(self, begin: float, end: float) -> dict[str, float | None]:
        """Return the shares of a step: the mean of the overlapping intervals, weighted by the overlap."""
        pairs: dict[str, list[tuple[float, float | None]]] = {name: [] for name in COLUMNS}
        for intervals in self._intervals:
            first = bisect_left(intervals, begin, key=lambda interval: interval.end)
            for interval in takewhile(lambda interval: interval.begin < end, intervals[first:]):
                overlap = min(end, interval.end) - max(begin, interval.begin)
                for name, share in interval.shares.items():
                    pairs.setdefault(name, []).append((overlap, share))
        return {name: _mean(values) for name, values in pairs.items()}

    def _energy(self, begin: float, end: float) -> float | None:
        """Return the joules of a step, limited by the board's power limit.

        The counter has its own update interval. The excess is carried over to the next steps, so that sums are exact.
        """
        first, last = self._counter(begin), self._counter(end)
        if first is None or last is None:
            return None
        counted = self._carried_j + last - first
        joules = min(counted, self._limit_w * (end - begin))
        self._carried_j = counted - joules
        return joules

    def _counter(self, when: float) -> float | None:
        """Interpolate the energy counter linearly. Return None outside the samples."""
        after = bisect_left(self._times, when)
        if after == 0 or after == len(self._times):
            return None
        low, high = self._samples[after - 1], self._samples[after]
        if low.energy_j is None or high.energy_j is None:
            return None
        return low.energy_j + (high.energy_j - low.energy_j) * (when - low.time) / (high.time - low.time)


def throttle_names(masks: list[int]) -> str:
    """Return the reasons in the bit masks, joined by |, or `none`."""
    return "|".join(name for bit, name in THROTTLE.items() if any(mask & bit for mask in masks)) or "none"


def _mean(pairs: Iterable[tuple[float, float | None]]) -> float | None:
    """Return the mean of the known values, weighted by the first element of each pair."""
    known = [(weight, value) for weight, value in pairs if value is not None and weight > 0]
    total = sum(weight for weight, _ in known)
    return sum(weight * value for weight, value in known) / total if total else None

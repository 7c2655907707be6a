"""Measure time and memory of the training device, and read the counters of the GPU driver.

On a GPU, times come from CUDA events, and memory from the caching allocator. On a CPU, the host's counters are read.
Reading does not synchronize, because an event is read only after the GPU has reached it. `Sampler` reads the GPU's
power, energy, clock, temperature, throttling, memory and load, and the load of other processes. A counter that the
driver does not support is None in every sample.
"""

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from operator import itemgetter
from typing import Any

import psutil
import torch

from ftbench.core.bottleneck import LIMITS
from ftbench.core.units import GIB
from ftbench.worker.measure.utilization import COLUMNS, BusyMeter, GpuLoad, HostLoad, Shares


class HostClock:
    """Measures time on a CPU with the host's clock. On a CPU, the work of a call is complete when the call returns."""

    def mark(self) -> Any:
        return time.perf_counter()

    def done(self, mark: Any) -> bool:
        return True

    def seconds(self, begin: Any, end: Any) -> float:
        return float(end - begin)

    def wait(self, mark: Any = None) -> None:
        return None


class CudaClock:
    """Measures time with events in the current CUDA stream. `seconds` works only for marks that are `done`."""

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


class CudaMemory:
    """Reads the counters of torch's caching allocator for CUDA memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._retries = self._allocations = 0

    def read(self) -> dict[str, Any]:
        """Return the memory columns of steps.csv. Peaks count from the last `reset`. `torch.cuda.memory_stats` would
        take about 10 times longer."""
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
        if torch.cuda.is_initialized():  # before initialization, the call raises
            torch.cuda.reset_peak_memory_stats(self._device)


class HostMemory:
    """Reads the resident memory of this process. Linux records the peak, which `reset` clears (proc(5), clear_refs)."""

    def read(self) -> dict[str, Any]:
        with open("/proc/self/status") as file:
            (peak,) = (int(line.split()[1]) * 1024 / GIB for line in file if line.startswith("VmHWM:"))
        now = resident_gb()
        return {"memory_allocated_gb": now, "memory_reserved_gb": now, "peak_memory_gb": peak}

    def peak_gb(self) -> float:
        return float(self.read()["peak_memory_gb"])

    def reset(self) -> None:
        with suppress(OSError), open("/proc/self/clear_refs", "w") as file:
            file.write("5")


def resident_gb() -> float:
    """Return the resident memory of this process in GiB."""
    return float(_process.memory_info().rss / GIB)


_process = psutil.Process()


def meters(device: torch.device) -> tuple[HostClock | CudaClock, CudaMemory | HostMemory]:
    """Return a clock and a memory meter for the device."""
    if device.type == "cuda":
        return CudaClock(device), CudaMemory(device)
    return HostClock(), HostMemory()


# --- the driver's counters --------------------------------------------------------------------------------------------

# nvml.h, nvmlClocksEventReasons. Idle (0x1) and the display clock (0x100) do not matter for training.
THROTTLE = {
    0x02: "application_clocks", 0x04: "sw_power_cap", 0x08: "hw_slowdown", 0x10: "sync_boost",
    0x20: "sw_thermal", 0x40: "hw_thermal", 0x80: "hw_power_brake",
}  # fmt: skip
SHORTEST_S = 0.1  # shortest interval, because the kernel counts CPU time in ticks of 10 ms


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading of the counters at `time` (seconds of perf_counter). Energy counts from the start of the driver."""

    time: float
    power_w: float | None = None
    energy_j: float | None = None
    sm_clock_mhz: float | None = None
    temperature_c: float | None = None
    throttle: int | None = None
    memory_gb: float | None = None


class Sampler:
    """Reads and stores the GPU's counters and the meters in `others`. Without `nvml`, reads only `others`."""

    def __init__(self, nvml: Any = None, handle: Any = None, others: Sequence[HostLoad | GpuLoad] = ()) -> None:
        self._times: list[float] = []
        self._samples: list[Sample] = []
        busy = BusyMeter(nvml, handle) if nvml else None
        self.busy_method = busy.method if busy else None  # source of `gpu_busy`
        self._loads: dict[str, Callable[[], Shares]] = {type(m).__name__: m.read for m in (busy, *others) if m}
        self._intervals: list[tuple[float, float, Shares]] = []  # begin, end, utilization by column of steps.csv
        self._begin = time.perf_counter()
        self._readers: dict[str, Callable[[], Any]] = {}
        self._failures: tuple[type[Exception], ...] = (OSError,)
        if nvml is None:
            return
        self._failures = (nvml.NVMLError, AttributeError, TypeError, OSError)
        self._readers = {
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "energy_j": lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000,
            "sm_clock_mhz": lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            "temperature_c": lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            "throttle": lambda: int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
            "memory_gb": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used / GIB,
        }

    def take(self) -> None:
        """Read every counter once."""
        sample = Sample(time.perf_counter(), **self._read(self._readers))
        self._times.append(sample.time)
        self._samples.append(sample)
        if sample.time - self._begin >= SHORTEST_S:
            shares = {name: share for load in self._read(self._loads).values() for name, share in load.items()}
            self._intervals.append((self._begin, sample.time, shares))
            self._begin = sample.time

    def _read(self, readers: dict[str, Callable[[], Any]]) -> dict[str, Any]:
        """Call each reader and return the values by name. A reader that fails is removed."""
        values = {}
        for name, read in list(readers.items()):
            try:
                values[name] = read()
            except self._failures:
                del readers[name]
        return values

    @property
    def latest(self) -> float:
        """Time of the last sample (seconds of perf_counter), or minus infinity without samples."""
        return self._times[-1] if self._times else float("-inf")

    def over(self, begin: float, end: float) -> dict[str, Any]:
        """Return the columns of steps.csv for a step from `begin` to `end` (seconds of perf_counter).

        If a step contains no sample, use the samples before and after the step.
        """
        at = bisect_left(self._times, begin)
        inside = self._samples[at : bisect_right(self._times, end)] or self._samples[max(0, at - 1) : at + 1]
        if not inside:
            return {}
        reasons = [s.throttle for s in inside if s.throttle is not None]
        first, last = self._counter(begin), self._counter(end)
        return {
            "power_w": _mean((1.0, s.power_w) for s in inside),
            "energy_j": None if first is None or last is None else last - first,
            "sm_clock_mhz": _mean((1.0, s.sm_clock_mhz) for s in inside),
            "temperature_c": max((s.temperature_c for s in inside if s.temperature_c is not None), default=None),
            "throttle": throttle_names(reasons) if reasons else None,
            **{name: _mean((1.0, any(each in throttle_names([mask]) for each in names)) for mask in reasons)
               for name, names in LIMITS.items()},
            "device_memory_gb": max((s.memory_gb for s in inside if s.memory_gb is not None), default=None),
            **self._shares(begin, end),
        }  # fmt: skip

    def _shares(self, begin: float, end: float) -> dict[str, float | None]:
        """Return the mean utilization during a step. Each interval is weighted by its overlap with the step."""
        pairs: dict[str, list[tuple[float, float | None]]] = {name: [] for name in COLUMNS}
        first = bisect_left(self._intervals, begin, key=itemgetter(1))
        for start, stop, shares in takewhile(lambda interval: interval[0] < end, self._intervals[first:]):
            overlap = min(end, stop) - max(begin, start)
            for name, share in shares.items():
                pairs.setdefault(name, []).append((overlap, share))
        return {name: _mean(values) for name, values in pairs.items()}

    def _counter(self, when: float) -> float | None:
        """Return the energy counter in joules at the time `when` by linear interpolation. Return None outside the
        samples. The energy of a short step is approximate."""
        after = bisect_left(self._times, when)
        if after == 0 or after == len(self._times):
            return None
        low, high = self._samples[after - 1], self._samples[after]
        if low.energy_j is None or high.energy_j is None:
            return None
        return low.energy_j + (high.energy_j - low.energy_j) * (when - low.time) / (high.time - low.time)


def throttle_names(masks: list[int]) -> str:
    """Return the names of the throttle reasons in the bit masks, joined by `|`. Return `none` for no reason."""
    return "|".join(name for bit, name in THROTTLE.items() if any(mask & bit for mask in masks)) or "none"


def _mean(pairs: Iterable[tuple[float, float | None]]) -> float | None:
    """Return the weighted mean of pairs `(weight, value)`. Ignore values of None. Return None if no value is left."""
    known = [(weight, value) for weight, value in pairs if value is not None and weight > 0]
    total = sum(weight for weight, _ in known)
    return sum(weight * value for weight, value in known) / total if total else None

"""What driver and kernel say beside the steps, at most ten times a second: the GPU's power, energy, clock, heat,
throttling, memory and load, and what other processes use.

Standard library, psutil and NVML only. A counter that the driver does not have stays None in every sample.
"""

import math
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from ftbench.core.units import GIB
from ftbench.worker.measure.contention import GpuLoad, HostLoad
from ftbench.worker.measure.gpu_utilization import COLUMNS, BusyMeter, Interval

# nvml.h, nvmlClocksEventReasons; idle (0x1) and the display's own clock (0x100) say nothing about a training run.
THROTTLE = {
    0x02: "application_clocks", 0x04: "sw_power_cap", 0x08: "hw_slowdown", 0x10: "sync_boost",
    0x20: "sw_thermal", 0x40: "hw_thermal", 0x80: "hw_power_brake",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading at `time` (perf_counter seconds). Watts, joules since the driver was loaded, MHz, °C, GiB."""

    time: float
    power_w: float | None
    energy_j: float | None
    sm_clock_mhz: float | None
    temperature_c: float | None
    throttle: int | None
    memory_gb: float | None


class Sampler:
    """Keeps the samples of a run; `take` is called by the recorder's thread. Without `nvml` only `others` are read."""

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
        """Read every counter once; one that fails is not asked again."""
        values: dict[str, Any] = dict.fromkeys(
            ("power_w", "energy_j", "sm_clock_mhz", "temperature_c", "throttle", "memory_gb")
        )
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
        """Where the shares of gpu_busy come from."""
        return self._busy.method if self._busy else None

    @property
    def latest(self) -> float:
        """When the last sample was taken; minus infinity before the first."""
        return self._times[-1] if self._times else float("-inf")

    def over(self, begin: float, end: float) -> dict[str, Any]:
        """Return the columns of steps.csv for a step from `begin` to `end` (perf_counter seconds), which comes after
        those that were asked for before. A step shorter than the sampling interval takes the two samples around it."""
        inside = self._samples[bisect_left(self._times, begin) : bisect_right(self._times, end)]
        if not inside:
            at = bisect_left(self._times, begin)
            inside = self._samples[max(0, at - 1) : at + 1]
        if not inside:
            return {}
        reasons = [s.throttle for s in inside if s.throttle is not None]
        return {
            "power_w": _mean([s.power_w for s in inside]),
            "energy_j": self._energy(begin, end),
            "sm_clock_mhz": _mean([s.sm_clock_mhz for s in inside]),
            "temperature_c": max((s.temperature_c for s in inside if s.temperature_c is not None), default=None),
            "throttle": throttle_names(reasons) if reasons else None,
            "device_memory_gb": max((s.memory_gb for s in inside if s.memory_gb is not None), default=None),
            **self._shares(begin, end),
        }

    def _shares(self, begin: float, end: float) -> dict[str, float | None]:
        """Return the shares of a step: the mean of the intervals it lies in, each for the time they have in common."""
        pairs: dict[str, list[tuple[float, float | None]]] = {name: [] for name in COLUMNS}
        for intervals in self._intervals:
            first = bisect_left(intervals, begin, key=lambda interval: interval.end)
            for interval in takewhile(lambda interval: interval.begin < end, intervals[first:]):
                common = min(end, interval.end) - max(begin, interval.begin)
                for name, share in interval.shares.items():
                    pairs.setdefault(name, []).append((common, share))
        return {name: _weighted(values) for name, values in pairs.items()}

    def _energy(self, begin: float, end: float) -> float | None:
        """Return the joules of a step, no more than the board may draw: the counter is read in steps of its own, and
        what it says beyond that counts for the steps that follow, so that sums stay what they are."""
        first, last = self._counter(begin), self._counter(end)
        if first is None or last is None:
            return None
        counted = self._carried_j + last - first
        joules = min(counted, self._limit_w * (end - begin))
        self._carried_j = counted - joules
        return joules

    def _counter(self, when: float) -> float | None:
        """Return the energy counter at a moment, linear between the samples around it; None outside of them."""
        after = bisect_left(self._times, when)
        if after == 0 or after == len(self._times):
            return None
        low, high = self._samples[after - 1], self._samples[after]
        if low.energy_j is None or high.energy_j is None:
            return None
        return low.energy_j + (high.energy_j - low.energy_j) * (when - low.time) / (high.time - low.time)


def throttle_names(masks: list[int]) -> str:
    """Return the reasons in any of the bit masks, joined by |, or `none`."""
    together = 0
    for mask in masks:
        together |= mask
    return "|".join(name for bit, name in THROTTLE.items() if together & bit) or "none"


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _weighted(pairs: list[tuple[float, float | None]]) -> float | None:
    known = [(weight, value) for weight, value in pairs if value is not None and weight > 0]
    total = sum(weight for weight, _ in known)
    return sum(weight * value for weight, value in known) / total if total else None

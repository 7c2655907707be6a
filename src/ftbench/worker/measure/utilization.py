"""How busy the GPU is, and how much of it and of the CPUs other processes use.

All values are shares (0 to 1) of the time between two reads. The recorder's thread reads them twice a second, outside
the training thread. Values that cannot be read are left empty.

The GPU's own counters have two sources. Hopper and later data-center GPUs have performance monitoring counters (GPM)
that also show how busy tensor cores and memory are. Other GPUs report the utilization of nvidia-smi: the share of the
last sampling period (up to a second) in which a kernel ran.
"""

import math
import os
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ftbench.worker import parallel

# nvml.h, nvmlGpmMetricId_t: percentages over the time between two samples.
_GPM = {"gpu_busy": "GRAPHICS_UTIL", "tensor_busy": "ANY_TENSOR_UTIL", "memory_busy": "DRAM_BW_UTIL"}
COLUMNS = tuple(_GPM)
SHORTEST_S = 0.1  # the kernel counts CPU time in ticks of 10 ms
CHILDREN_S = 10.0  # looking for child processes reads the state of every process on the machine


@dataclass(frozen=True, slots=True)
class Interval:
    """Shares by column of steps.csv, between `begin` and `end` (perf_counter seconds)."""

    begin: float
    end: float
    shares: dict[str, float | None]


class BusyMeter:
    """Reads how busy the GPU is. A source that fails once is not read again."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._failures = (nvml.NVMLError, AttributeError, TypeError)
        self.method: str | None = None
        self._read: Callable[[], list[Interval]] | None = None
        for method, start, read in (
            ("GPM counters", self._start_gpm, self._by_gpm),
            ("NVML utilisation", self._start_rates, self._by_rates),
        ):
            with suppress(*self._failures):
                start()
                self.method, self._read = method, read
                break

    def read(self) -> list[Interval]:
        """Return the shares measured since the previous call, by interval."""
        if self._read is None:
            return []
        try:
            return self._read()
        except self._failures:
            self._read = None
            return []

    def _start_gpm(self) -> None:
        nvml = self._nvml
        if not nvml.nvmlGpmQueryDeviceSupport(self._handle).isSupportedDevice:
            raise AttributeError("this GPU lacks GPM counters")
        self._metrics = {name: getattr(nvml, f"NVML_GPM_METRIC_{metric}") for name, metric in _GPM.items()}
        self._before, self._spare = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
        self._begin = self._sample(self._before)

    def _sample(self, into: Any) -> float:
        self._nvml.nvmlGpmSampleGet(self._handle, into)
        return time.perf_counter()

    def _by_gpm(self) -> list[Interval]:
        nvml = self._nvml
        begin, self._begin = self._begin, self._sample(self._spare)
        query = nvml.c_nvmlGpmMetricsGet_t()
        query.version, query.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, len(self._metrics)
        query.sample1, query.sample2 = self._before, self._spare
        for index, metric in enumerate(self._metrics.values()):
            query.metrics[index].metricId = metric
        nvml.nvmlGpmMetricsGet(query)
        self._before, self._spare = self._spare, self._before
        answers = [query.metrics[index] for index in range(len(self._metrics))]
        shares = {
            name: answer.value / 100 if answer.nvmlReturn == nvml.NVML_SUCCESS and math.isfinite(answer.value) else None
            for name, answer in zip(self._metrics, answers, strict=True)
        }  # NaN if the counters did not change between the two samples
        return [Interval(begin, self._begin, shares)]

    def _start_rates(self) -> None:
        self._nvml.nvmlDeviceGetUtilizationRates(self._handle)
        self._begin = time.perf_counter()

    def _by_rates(self) -> list[Interval]:
        share = self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100
        begin, self._begin = self._begin, time.perf_counter()
        return [Interval(begin, self._begin, {"gpu_busy": share})]


class HostLoad:
    """Reads the share of the CPUs available to this process that other processes use.

    It is the busy time of the kernel's counters minus the time of this process and its children (proc(5), stat).
    """

    def __init__(self, stat: Path = Path("/proc/stat"), own_s: Callable[[], float] | None = None) -> None:
        self._stat, self._own_s = stat, own_s or OwnTime()
        self._names = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        self._tick_s = 1 / os.sysconf("SC_CLK_TCK")
        self._before = self._counters()

    def read(self) -> list[Interval]:
        """Return the interval since the previous call, or nothing if it is too short."""
        (begin, used, passed, own), after = self._before, self._counters()
        if after[0] - begin < SHORTEST_S or after[2] <= passed:
            return []
        self._before = after
        others = (after[1] - used) - (after[3] - own)
        return [Interval(begin, after[0], {"host_cpu_by_others": min(1.0, max(0.0, others / (after[2] - passed)))})]

    def _counters(self) -> tuple[float, float, float, float]:
        """Return the clock, the busy and total CPU seconds, and the CPU seconds of this process."""
        busy = passed = 0.0
        with suppress(OSError, ValueError):
            for line in self._stat.read_text().splitlines():
                name, *fields = line.split()
                if name in self._names:
                    ticks = list(map(int, fields[:8]))  # user nice system idle iowait irq softirq steal
                    passed += sum(ticks) * self._tick_s
                    busy += (sum(ticks) - ticks[3] - ticks[4]) * self._tick_s
                elif not name.startswith("cpu"):
                    break
        return time.perf_counter(), busy, passed, self._own_s()


class OwnTime:
    """The CPU seconds of this process, its children (including finished ones) and the other ranks."""

    def __init__(self) -> None:
        self._looked = float("-inf")
        self._children: list[psutil.Process] = []

    def __call__(self) -> float:
        now = time.monotonic()
        if now > self._looked + CHILDREN_S:
            root = psutil.Process() if parallel.rank() is None else psutil.Process(os.getppid())
            self._looked = now
            self._children = [child for child in root.children(recursive=True) if child.pid != os.getpid()]
        total = sum(os.times()[:4])
        for child in self._children:
            with suppress(psutil.Error):
                total += sum(child.cpu_times()[:4])
        return total


class GpuLoad:
    """Reads the share of time in which kernels of other processes ran, from NVML's samples per process.

    `own` are the processes of this run. If it is empty, the share is unknown.
    """

    def __init__(self, nvml: Any, handle: Any, own: Collection[int]) -> None:
        self._nvml, self._handle, self._own = nvml, handle, own
        self._begin, self._last = time.perf_counter(), int(time.time() * 1e6)
        self._works = bool(own)

    def read(self) -> list[Interval]:
        """Return the interval since the previous call. A driver that fails once is not read again."""
        if not self._works:
            return []
        try:
            samples = self._nvml.nvmlDeviceGetProcessUtilization(self._handle, self._last)
        except (self._nvml.NVMLError, AttributeError, TypeError) as error:
            if getattr(error, "value", None) != getattr(self._nvml, "NVML_ERROR_NOT_FOUND", ...):  # not: no new sample
                self._works = False
                return []
            samples = []
        shares: dict[int, list[int]] = {}
        for sample in samples:
            if sample.timeStamp > self._last and sample.pid not in self._own:
                shares.setdefault(sample.pid, []).append(sample.smUtil)
        self._last = max([self._last, *(sample.timeStamp for sample in samples)])
        begin, self._begin = self._begin, time.perf_counter()
        share = sum(sum(values) / len(values) for values in shares.values()) / 100
        return [Interval(begin, self._begin, {"gpu_by_others": min(1.0, share)})]


def own_processes(nvml: Any, handle: Any, before: Collection[int]) -> set[int]:
    """Return the ids under which NVML lists this run, once it has a context on the GPU.

    NVML can list a process in a container under another id. In this case, return all processes that are not in
    `before`.
    """
    try:
        pids = {process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    except (nvml.NVMLError, AttributeError):
        return set()
    return {os.getpid()} if os.getpid() in pids else pids - set(before)

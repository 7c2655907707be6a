"""Measure the utilization of the GPU, and the shares of GPU and CPUs that other processes use.

All values are shares (0 to 1) of the time since the previous read, by column name of steps.csv. The recorder's thread
reads them twice per second. After an error, a meter is not read again.

There are two sources for GPU utilization. Hopper and later data-center GPUs have performance monitoring counters (GPM).
These counters also cover tensor cores and memory. Other GPUs report the utilization of nvidia-smi: the share of the
last sampling period (up to a second) in which a kernel ran.
"""

import math
import os
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from ftbench.worker import parallel

# nvml.h, nvmlGpmMetricId_t: percentages over the time between two samples.
_GPM = {"gpu_busy": "GRAPHICS_UTIL", "tensor_busy": "ANY_TENSOR_UTIL", "memory_busy": "DRAM_BW_UTIL"}
COLUMNS = tuple(_GPM)
_TICKS = os.sysconf("SC_CLK_TCK")  # per second
CHILDREN_S = 10.0  # seconds between slow searches for child processes
Shares = dict[str, float | None]


class BusyMeter:
    """Reads the utilization of the GPU. `method` names the driver interface that works on this GPU (None: neither)."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self.method: str | None = None
        self.read: Callable[[], Shares] = dict
        for method, start, read in (
            ("GPM counters", self._start_gpm, self._by_gpm), ("NVML utilisation", self._by_rates, self._by_rates),
        ):  # fmt: skip
            with suppress(nvml.NVMLError, AttributeError, TypeError):
                start()
                self.method, self.read = method, read
                break

    def _start_gpm(self) -> None:
        nvml = self._nvml
        if not nvml.nvmlGpmQueryDeviceSupport(self._handle).isSupportedDevice:
            raise AttributeError("this GPU lacks GPM counters")
        self._metrics = {name: getattr(nvml, f"NVML_GPM_METRIC_{metric}") for name, metric in _GPM.items()}
        self._before, self._spare = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
        nvml.nvmlGpmSampleGet(self._handle, self._before)

    def _by_gpm(self) -> Shares:
        nvml = self._nvml
        nvml.nvmlGpmSampleGet(self._handle, self._spare)
        query = nvml.c_nvmlGpmMetricsGet_t()
        query.version, query.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, len(self._metrics)
        query.sample1, query.sample2 = self._before, self._spare
        for index, metric in enumerate(self._metrics.values()):
            query.metrics[index].metricId = metric
        nvml.nvmlGpmMetricsGet(query)
        self._before, self._spare = self._spare, self._before
        answers = [query.metrics[index] for index in range(len(self._metrics))]
        return {
            name: answer.value / 100 if answer.nvmlReturn == nvml.NVML_SUCCESS and math.isfinite(answer.value) else None
            for name, answer in zip(self._metrics, answers, strict=True)
        }  # values are NaN if the counters did not change between the two samples

    def _by_rates(self) -> Shares:
        return {"gpu_busy": self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100}


class HostLoad:
    """Reads the CPU share of other processes, counting only the CPUs that this process may use.

    Share = (busy time - CPU time of this process and its children) / total time. See proc(5) for the kernel's counters.
    """

    def __init__(self, own_s: Callable[[], float] | None = None, stat: Path = Path("/proc/stat")) -> None:
        self._own_s, self._stat = own_s or OwnTime(), stat
        self._names = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        self._before = self._counters()

    def read(self) -> Shares:
        before, self._before = self._before, self._counters()
        busy, passed, own = (after - earlier for after, earlier in zip(self._before, before, strict=True))
        return {"host_cpu_by_others": min(1.0, max(0.0, (busy - own) / passed))} if passed > 0 else {}

    def _counters(self) -> tuple[float, float, float]:
        """Return busy CPU seconds, total CPU seconds, and the CPU seconds of this process and its children."""
        lines = map(str.split, self._stat.read_text().splitlines())  # psutil loses the CPU numbers if a CPU is offline
        # user nice system idle iowait irq softirq steal; the other fields are parts of these
        every = [[int(ticks) / _TICKS for ticks in fields[:8]] for name, *fields in lines if name in self._names]
        seconds = [sum(values) for values in zip(*every, strict=True)]
        return sum(seconds) - sum(seconds[3:5]), sum(seconds), self._own_s()


class OwnTime:
    """Reads the CPU seconds of this process, its children (running and finished) and the other ranks."""

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
    """Reads the share of time in which other processes run kernels on the GPU, from NVML's samples per process. `own`
    contains the process ids of this run."""

    def __init__(self, nvml: Any, handle: Any, own: Collection[int]) -> None:
        self._nvml, self._handle, self._own = nvml, handle, own
        self._last = int(time.time() * 1e6)

    def read(self) -> Shares:
        try:
            samples = self._nvml.nvmlDeviceGetProcessUtilization(self._handle, self._last)
        except self._nvml.NVMLError as error:
            if getattr(error, "value", None) != self._nvml.NVML_ERROR_NOT_FOUND:
                raise
            samples = []  # no new samples
        shares: dict[int, list[int]] = {}
        for sample in samples:
            if sample.timeStamp > self._last and sample.pid not in self._own:
                shares.setdefault(sample.pid, []).append(sample.smUtil)
        self._last = max([self._last, *(sample.timeStamp for sample in samples)])
        share = sum(sum(values) / len(values) for values in shares.values()) / 100
        return {"gpu_by_others": min(1.0, share)}


def own_processes(nvml: Any, handle: Any, before: Collection[int]) -> set[int]:
    """Return the process ids that NVML lists for this run. Call this after the run has a CUDA context.

    In a container, NVML can list other ids. Then return the listed ids that are not in `before` (ids before the run).
    """
    try:
        pids = {process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    except (nvml.NVMLError, AttributeError):
        return set()
    return {os.getpid()} if os.getpid() in pids else pids - set(before)

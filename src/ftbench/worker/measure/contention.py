"""What other processes take of the host's CPUs and of the GPU while a run is measured: shares between two readings.

Read by the recorder's thread twice a second, never within a step. What cannot be read is left out.
"""

import os
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from ftbench.worker import parallel
from ftbench.worker.measure.gpu_utilization import Interval

SHORTEST_S = 0.1  # the kernel counts CPU time in ticks of 10 ms
CHILDREN_S = 10.0  # looking for children reads the state of every process on the machine


class HostLoad:
    """Others' share of the time of the CPUs that this process may use: all that the kernel has counted, less this
    process and its children (proc(5), stat)."""

    def __init__(self, stat: Path = Path("/proc/stat"), own_s: Callable[[], float] | None = None) -> None:
        self._stat, self._own_s = stat, own_s or OwnTime()
        self._names = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        self._tick_s = 1 / os.sysconf("SC_CLK_TCK")
        self._before = self._counters()

    def read(self) -> list[Interval]:
        """Return the interval since the call before; nothing where too little time has passed."""
        (begin, used, passed, own), after = self._before, self._counters()
        if after[0] - begin < SHORTEST_S or after[2] <= passed:
            return []
        self._before = after
        others = (after[1] - used) - (after[3] - own)
        return [Interval(begin, after[0], {"host_cpu_by_others": min(1.0, max(0.0, others / (after[2] - passed)))})]

    def _counters(self) -> tuple[float, float, float, float]:
        """Return the clock, and the seconds that CPUs were busy, that have passed on them, and that were this
        process's."""
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
    """The CPU seconds of this process and its children, also of those that have ended, and of the other ranks."""

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
    """The share of time in which other processes' kernels ran, as NVML samples it for each process. `own` are the
    processes of this run; none where NVML does not tell which they are, and then nothing is known."""

    def __init__(self, nvml: Any, handle: Any, own: Collection[int]) -> None:
        self._nvml, self._handle, self._own = nvml, handle, own
        self._begin, self._last = time.perf_counter(), int(time.time() * 1e6)
        self._works = bool(own)

    def read(self) -> list[Interval]:
        """Return the interval since the call before; a driver that fails is not asked again."""
        if not self._works:
            return []
        try:
            samples = self._nvml.nvmlDeviceGetProcessUtilization(self._handle, self._last)
        except (self._nvml.NVMLError, AttributeError, TypeError) as error:
            if getattr(error, "value", None) != getattr(self._nvml, "NVML_ERROR_NOT_FOUND", object()):
                self._works = False
                return []
            samples = []  # no process was seen since the call before
        shares: dict[int, list[int]] = {}
        for sample in samples:
            if sample.timeStamp > self._last and sample.pid not in self._own:
                shares.setdefault(sample.pid, []).append(sample.smUtil)
        self._last = max([self._last, *(sample.timeStamp for sample in samples)])
        begin, self._begin = self._begin, time.perf_counter()
        share = sum(sum(values) / len(values) for values in shares.values()) / 100
        return [Interval(begin, self._begin, {"gpu_by_others": min(1.0, share)})]


def own_processes(nvml: Any, handle: Any, before: Collection[int]) -> set[int]:
    """Return which of the GPU's processes belong to this run, once it has a context there: this one, or where NVML
    knows it by another number (in a container) those that were not there `before`."""
    try:
        pids = {process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    except (nvml.NVMLError, AttributeError):
        return set()
    return {os.getpid()} if os.getpid() in pids else pids - set(before)

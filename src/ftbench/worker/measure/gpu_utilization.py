"""How busy the GPU was, by the driver's own counters over back-to-back intervals: nothing is added to a step for it.

Two sources. Where the GPU has performance monitoring counters that the driver reads for everyone (GPM: Hopper and
later data-centre cards), they also tell how busy the tensor cores and the memory were. Elsewhere it is the utilisation
that nvidia-smi shows: the share of each sampling period in which a kernel ran.
"""

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

# nvml.h, nvmlGpmMetricId_t: percentages over the time between two samples.
_GPM = {"gpu_busy": "GRAPHICS_UTIL", "tensor_busy": "ANY_TENSOR_UTIL", "memory_busy": "DRAM_BW_UTIL"}
COLUMNS = tuple(_GPM)


@dataclass(frozen=True, slots=True)
class Interval:
    """Shares (0 to 1) by the column of steps.csv, between `begin` and `end` (seconds of perf_counter)."""

    begin: float
    end: float
    shares: dict[str, float | None]


class BusyMeter:
    """`read` gives the intervals since the call before; a source that fails is not asked again."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._failures = (nvml.NVMLError, AttributeError, TypeError)
        self.method: str | None = None
        self._read: Callable[[], list[Interval]] | None = None
        for method, start, read in (
            ("GPM counters", self._start_gpm, self._by_gpm),
            ("NVML utilisation samples", self._start_samples, self._by_samples),
        ):
            with suppress(*self._failures):
                start()
                self.method, self._read = method, read
                break

    def read(self) -> list[Interval]:
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
            raise AttributeError("the driver reads no such counters on this GPU")
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
        }  # not a number where the counters did not move between the two samples
        return [Interval(begin, self._begin, shares)]

    def _start_samples(self) -> None:
        self._last = int(time.time() * 1e6)
        with suppress(self._nvml.NVMLError):  # no sample since the moment before is no failure
            self._samples()
        self._nvml.nvmlDeviceGetUtilizationRates(self._handle)

    def _samples(self) -> list[tuple[int, int]]:
        """Return (µs since the epoch, percent) of the samples since the last one seen."""
        kind = self._nvml.NVML_GPU_UTILIZATION_SAMPLES
        _, samples = self._nvml.nvmlDeviceGetSamples(self._handle, kind, self._last)
        return [(s.timeStamp, s.sampleValue.uiVal) for s in samples if s.timeStamp > self._last]

    def _by_samples(self) -> list[Interval]:
        try:
            samples = self._samples()
        except self._nvml.NVMLError as error:
            if getattr(error, "value", None) == self._nvml.NVML_ERROR_NOT_FOUND:  # none since the last call
                return []
            raise
        shift = time.perf_counter() - time.time()
        intervals = []
        for stamp, percent in samples:
            intervals.append(Interval(self._last / 1e6 + shift, stamp / 1e6 + shift, {"gpu_busy": percent / 100}))
            self._last = stamp
        return intervals

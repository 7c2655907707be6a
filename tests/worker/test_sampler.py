"""The driver's samples are joined to steps: energy, throttling, missing counters."""

from __future__ import annotations

import types

import pytest
import torch

from ftbench.worker.measure import meters as module
from ftbench.worker.measure.meters import Sampler, throttle_names


class NotSupported(Exception):
    pass


def driver(**missing):
    """A driver with an energy counter at 100 W and a simulated clock."""

    def refuse(*_):
        raise NotSupported

    calls = {
        "nvmlDeviceGetPowerUsage": lambda _: 100_000,
        "nvmlDeviceGetTotalEnergyConsumption": lambda _: clock.now * 100_000,
        "nvmlDeviceGetClockInfo": lambda *_: 1500,
        "nvmlDeviceGetTemperature": lambda *_: 60,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda _: 0x4 if clock.now > 1 else 0,
        "nvmlDeviceGetMemoryInfo": lambda _: types.SimpleNamespace(used=2 * 2**30),
    }
    calls |= {name: given if callable(given) else refuse for name, given in missing.items()}
    return types.SimpleNamespace(NVMLError=NotSupported, NVML_CLOCK_SM=1, NVML_TEMPERATURE_GPU=0, **calls)


clock = types.SimpleNamespace(now=0.0)


@pytest.fixture
def sampled(monkeypatch):
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock.now)

    def take(until=2.0, **missing):
        found = Sampler(driver(**missing), None)
        for tick in range(round(until * 10) + 1):
            clock.now = tick / 10
            found.take()
        return found

    return take


def test_times_and_memory_of_a_gpu_are_in_seconds_and_gib(monkeypatch):
    marks = [types.SimpleNamespace(at=at, elapsed_time=lambda end, at=at: end.at - at) for at in (500.0, 2000.0)]
    assert module.CudaClock(torch.device("cuda")).seconds(*marks) == 1.5
    sizes = {f"{kind}_bytes": {"all": {"current": now * 2**30, "peak": peak * 2**30}}
             for kind, now, peak in (("allocated", 1, 2), ("reserved", 3, 5))}  # fmt: skip
    counts = [{"num_alloc_retries": n, "allocation": {"all": {"allocated": 10 * n}}} for n in (2, 5)]
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: sizes | counts[0])
    memory = module.CudaMemory(torch.device("cuda"))
    memory.read()
    assert memory.peak_gb() == 2
    del counts[0]
    assert [*memory.read().values()] == [1, 3, 2, 5, 3, 30]


def test_energy_of_a_step_is_the_counters_difference(sampled):
    step = sampled().over(0.33, 0.97)
    assert step["energy_j"] == pytest.approx(64)
    assert step["power_w"] == 100
    assert step["device_memory_gb"] == 2


def test_short_step_uses_the_samples_around_it(sampled):
    step = sampled().over(0.52, 0.55)
    assert step["energy_j"] == pytest.approx(3)
    assert step["sm_clock_mhz"] == 1500


def test_energy_outside_the_samples_is_unknown(sampled):
    assert sampled().over(1.9, 2.5)["energy_j"] is None


def test_throttling_is_reported_per_step(sampled):
    found = sampled()
    assert found.over(0.1, 0.9)["throttle"] == "none"
    assert found.over(1.0, 1.9)["throttle"] == "sw_power_cap"
    assert throttle_names([0x1, 0x20, 0x40]) == "sw_thermal|hw_thermal"
    assert found.over(0.1, 1.9)["power_capped"] == pytest.approx(9 / 19)
    assert found.over(0.1, 1.9)["thermally_limited"] == 0


def test_missing_counter_is_empty(sampled):
    step = sampled(nvmlDeviceGetTotalEnergyConsumption=True, nvmlDeviceGetMemoryInfo=True).over(0.1, 0.9)
    assert step["energy_j"] is None
    assert step["device_memory_gb"] is None
    assert step["power_w"] == 100


def test_no_samples_give_no_columns():
    assert Sampler(driver(), None).over(0.0, 1.0) == {}


# --- how busy the GPU was --------------------------------------------------------------------------------------------


def sampling(percents, supported=False):
    """A driver with utilization. `percents` is a function of time."""

    def gpm(query):
        query.metrics[0].value, query.metrics[0].nvmlReturn = query.sample2.at * 10, 0
        query.metrics[1].value, query.metrics[1].nvmlReturn = 50.0, 0
        query.metrics[2].nvmlReturn = 3

    def metrics():
        return types.SimpleNamespace(metrics=[types.SimpleNamespace(value=None) for _ in range(3)])

    calls = vars(driver()) | {
        "nvmlDeviceGetUtilizationRates": lambda _: types.SimpleNamespace(gpu=percents(clock.now)),
        "NVML_SUCCESS": 0,
        "nvmlGpmQueryDeviceSupport": lambda _: types.SimpleNamespace(isSupportedDevice=int(supported)),
        "nvmlGpmSampleAlloc": lambda: types.SimpleNamespace(at=None),
        "nvmlGpmSampleGet": lambda _, sample: setattr(sample, "at", clock.now),
        "nvmlGpmMetricsGet": gpm,
        "c_nvmlGpmMetricsGet_t": metrics,
        "NVML_GPM_METRICS_GET_VERSION": 1,
        "NVML_GPM_METRIC_GRAPHICS_UTIL": 1,
        "NVML_GPM_METRIC_ANY_TENSOR_UTIL": 5,
        "NVML_GPM_METRIC_DRAM_BW_UTIL": 10,
    }
    return types.SimpleNamespace(**calls)


@pytest.fixture
def watched(monkeypatch):
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(module.time, "time", lambda: clock.now)

    def take(nvml, until=4.0):
        clock.now = 0.0
        found = Sampler(nvml, None)
        for tick in range(round(until * 2) + 1):
            clock.now = tick / 2
            found.take()
        return found

    return take


def test_busy_share_is_weighted_by_overlap(watched):
    found = watched(sampling(lambda t: 100 if t <= 2 else 20))
    assert found.busy_method == "NVML utilisation"
    assert found.over(0.6, 1.9)["gpu_busy"] == pytest.approx(1.0)
    assert found.over(1.5, 2.5)["gpu_busy"] == pytest.approx(0.6)
    assert found.over(2.30, 2.35)["gpu_busy"] == pytest.approx(0.2)
    assert found.over(1.0, 2.0)["tensor_busy"] is None


def test_gpm_counters_are_preferred(watched):
    found = watched(sampling(lambda t: 0, supported=True))
    assert found.busy_method == "GPM counters"
    step = found.over(1.0, 2.0)  # two intervals that end at 1.5 and 2.0
    assert step["gpu_busy"] == pytest.approx((0.15 + 0.20) / 2)
    assert (step["tensor_busy"], step["memory_busy"]) == (0.5, None)


def test_unchanged_gpm_counters_are_ignored(watched):
    nvml = sampling(lambda t: 0, supported=True)
    read = nvml.nvmlGpmMetricsGet

    def unchanged(query):
        read(query)
        query.metrics[0].value = float("nan") if query.sample2.at == 1.5 else query.metrics[0].value

    nvml.nvmlGpmMetricsGet = unchanged
    assert watched(nvml).over(1.0, 2.0)["gpu_busy"] == pytest.approx(0.20)


def test_busy_share_is_unknown_without_a_source(sampled):
    found = sampled()
    assert found.busy_method is None
    assert found.over(0.5, 1.0)["gpu_busy"] is None

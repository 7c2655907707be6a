"""The driver's samples joined to steps: energy between samples, throttle names, counters that are missing."""

from __future__ import annotations

import types

import pytest

from ftbench.worker import sampler as module
from ftbench.worker.sampler import Sampler, throttle_names


class NotSupported(Exception):
    pass


def driver(**missing):
    """A driver whose energy counter runs at 100 W on the test's clock."""

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
    calls |= dict.fromkeys(missing, refuse)
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


def test_energy_of_a_step_is_the_counter_between_its_ends(sampled):
    step = sampled().over(0.33, 0.97)
    assert step["energy_j"] == pytest.approx(64)
    assert step["power_w"] == 100
    assert step["device_memory_gb"] == 2


def test_a_step_shorter_than_the_interval_takes_the_samples_around_it(sampled):
    step = sampled().over(0.52, 0.55)
    assert step["energy_j"] == pytest.approx(3)
    assert step["sm_clock_mhz"] == 1500


def test_energy_outside_of_the_samples_is_unknown(sampled):
    assert sampled().over(1.9, 2.5)["energy_j"] is None


def test_throttling_is_named_for_the_steps_it_was_seen_in(sampled):
    found = sampled()
    assert found.over(0.1, 0.9)["throttle"] == "none"
    assert found.over(1.0, 1.9)["throttle"] == "sw_power_cap"
    assert throttle_names([0x1, 0x20, 0x40]) == "sw_thermal|hw_thermal"


def test_a_counter_the_driver_lacks_is_empty_and_the_others_stay(sampled):
    step = sampled(nvmlDeviceGetTotalEnergyConsumption=True, nvmlDeviceGetMemoryInfo=True).over(0.1, 0.9)
    assert step["energy_j"] is None
    assert step["device_memory_gb"] is None
    assert step["power_w"] == 100


def test_no_sample_no_columns():
    assert Sampler(driver(), None).over(0.0, 1.0) == {}

"""Bottlenecks of runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ftbench.core.bottleneck import classify_bottleneck
from ftbench.core.rows import StepRow
from ftbench.store.steps import read_steps


def window(times=(0.5,) * 10, **columns):
    rows = [StepRow(step=n + 1, phase="train", step_time_s=time) for n, time in enumerate(times)]
    for name, value in columns.items():
        for place, row in enumerate(rows):
            setattr(row, name, value[place] if isinstance(value, list) else value)
    return rows


@pytest.mark.parametrize(
    ("columns", "products", "verdict"),
    [
        ({"gpu_busy": 0.99, "data_time_s": 0.01}, 0.55, "compute-bound"),
        ({"gpu_busy": 0.99, "data_time_s": 0.01}, 0.12, "memory-bound"),
        ({"gpu_busy": 0.99, "tensor_busy": 0.5, "memory_busy": 0.6}, 0.45, "memory-bound"),
        ({"gpu_busy": 0.98, "tensor_busy": 0.34, "memory_busy": 0.30}, 0.30, "compute-bound"),  # plain LoRA of 8B, H200
        ({"gpu_busy": 0.99, "tensor_busy": 0.0, "memory_busy": 0.3}, 0.6, "compute-bound"),  # in fp32
        ({"gpu_busy": 0.40, "data_time_s": 0.01}, 0.05, "launch-bound"),
        ({"gpu_busy": 0.40, "data_time_s": 0.20}, 0.05, "data-bound"),
        ({"gpu_busy": 0.99, "data_time_s": 0.20}, 0.55, "compute-bound"),  # the host waits, the GPU does not
        ({"gpu_busy": 0.97, "throttle": "sw_thermal|sw_power_cap"}, 0.5, "thermally limited"),
    ],
)
def test_the_verdict_names_the_bottleneck(columns, products, verdict):
    found = classify_bottleneck(window(**columns), True, products)
    assert found.verdict == verdict
    assert "%" in found.why


def test_nan_shares_are_ignored():
    assert classify_bottleneck(window(gpu_busy=[float("nan"), *[0.98] * 9]), True, 0.5).gpu_busy == pytest.approx(0.98)


def test_data_wait_counts_if_the_busy_share_is_unknown():
    assert classify_bottleneck(window(data_time_s=0.2), True, 0.5).verdict == "data-bound"
    assert classify_bottleneck(window(data_time_s=0.2), False, None).verdict == "data-bound"


@pytest.mark.parametrize(
    ("columns", "on_gpu", "products", "why"),
    [
        ({}, True, 0.5, "did not report the GPU utilization"),
        ({}, False, None, "did not use a GPU"),
        ({"gpu_busy": 0.99}, True, None, "ftbench probe"),
    ],
)
def test_unknown_values_give_no_verdict_but_a_reason(columns, on_gpu, products, why):
    found = classify_bottleneck(window(**columns), on_gpu, products)
    assert found.verdict is None
    assert why in found.why


def test_the_power_limit_is_reported_in_addition():
    found = classify_bottleneck(
        window(gpu_busy=0.99, throttle=["sw_power_cap"] * 8 + ["none"] * 2, sm_clock_mhz=1650.0), True, 0.6
    )
    assert (found.verdict, found.also) == ("compute-bound", ["power-capped"])
    assert found.power_capped == pytest.approx(0.8)
    assert found.sm_clock_mhz == pytest.approx(1650)


def test_a_short_throttling_does_not_count_for_a_long_step():
    columns = {"gpu_busy": 0.99, "throttle": "sw_thermal|sw_power_cap", "power_capped": 0.7, "thermally_limited": 0.02}
    found = classify_bottleneck(window([30.0] * 10, **columns), True, 0.6)
    assert (found.verdict, found.also) == ("compute-bound", ["power-capped"])
    assert found.power_capped == pytest.approx(0.7)
    assert found.thermally_limited == pytest.approx(0.02)


def test_shares_are_weighted_by_time():
    found = classify_bottleneck(window([1.0, 3.0], gpu_busy=[1.0, 0.5], data_time_s=[0.0, 0.4]), True, 0.5)
    assert found.gpu_busy == pytest.approx((1 * 1.0 + 3 * 0.5) / 4)
    assert found.data_wait == pytest.approx(0.1)


def test_launches_do_not_count_as_busy():
    found = classify_bottleneck(window([0.1] * 4, gpu_busy=0.17, allocations=8000), True, 0.01)
    assert found.gpu_busy == pytest.approx(0.17 - 8000 * 1.1e-6 / 0.1)
    assert classify_bottleneck(window([0.1] * 4, gpu_busy=0.05, allocations=8000), True, 0.01).gpu_busy == 0


def test_busy_shares_of_committed_runs_agree_with_the_profiler():
    """Qwen3-0.6B, batch 1, 64 tokens on an H200: a run, and a profile of the same step (results/h200/launch-bound)."""
    folder = Path("results/h200/launch-bound")
    rows, _ = read_steps(folder / "qwen3-0.6b-lora-b1-dcc2630c0176-r1/steps.csv")
    profile = json.loads((folder / "qwen3-0.6b-lora-b1-7bb75b8176ad-r1/profile/kernels.json").read_text("utf-8"))
    found = classify_bottleneck(rows[10:], True, 0.01)
    assert found.verdict == "launch-bound"
    counted = classify_bottleneck([replace(row, allocations=None) for row in rows[10:]], True, 0.01).gpu_busy
    assert counted > profile["busy_share_unprofiled"] + 0.02
    assert found.gpu_busy == pytest.approx(profile["busy_share_unprofiled"], abs=0.02)
    in_steps = (
        profile["busy_ms"] / profile["steps"] / (1e3 * sum(row.step_time_s for row in rows[10:]) / len(rows[10:]))
    )
    assert found.gpu_busy == pytest.approx(in_steps, abs=0.02)

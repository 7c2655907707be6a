"""Downsampled curves keep measured points and extremes."""

from __future__ import annotations

import base64
import math
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from page_runs import made

from ftbench.report.page.curves import FEWEST, curves, downsample, points_for
from ftbench.store.steps import read_columns

NUMBERS = st.floats(allow_nan=True, allow_infinity=True)
CURVES = st.lists(NUMBERS, min_size=1, max_size=400)
POINTS = st.integers(FEWEST, 120)


@given(CURVES, POINTS)
def test_downsample_keeps_ends_and_extremes_of_measured_points(values, points):
    kept = downsample(values, points)
    assert kept == sorted(set(kept))
    assert len(kept) <= max(points, 1)
    assert kept[0] == 0
    assert kept[-1] == len(values) - 1
    known = [value for value in values if math.isfinite(value)]
    shown = [values[i] for i in kept if math.isfinite(values[i])]
    if known:
        assert min(shown) == min(known)
        assert max(shown) == max(known)
    assert any(not math.isfinite(values[i]) for i in kept) == any(not math.isfinite(value) for value in values)


@given(CURVES, POINTS)
def test_downsample_keeps_a_short_curve(values, points):
    if len(values) <= points:
        assert downsample(values, points) == list(range(len(values)))


@given(st.lists(st.floats(-1e6, 1e6), min_size=50, max_size=300), st.integers(20, 40))
def test_downsample_keeps_every_spike(values, points):
    place = len(values) // 3
    values[place] = 1e7
    assert place in downsample(values, points)


def test_downsample_rejects_too_few_points():
    with pytest.raises(ValueError, match="needs 8 points"):
        downsample([1.0] * 20, 7)


def test_curve_points_share_the_budget():
    assert points_for(1, 5_000_000) == 2000
    assert 16 < points_for(2000, 5_000_000) < 100
    assert points_for(10**6, 5_000_000) == 16


def unpacked(curve: dict[str, Any], name: str) -> list[tuple[int, float]]:
    place, packed = curve[name]
    steps, values, wide = base64.b64decode(curve["at"][place]), base64.b64decode(packed), curve["wide"]
    size = 4 if wide else 2
    return list(zip(struct.unpack(f"<{len(steps) // size}{'I' if wide else 'H'}", steps),
                    struct.unpack(f"<{len(values) // 4}f", values), strict=True))  # fmt: skip


def test_packed_curve_round_trips(tmp_path):
    run = made(tmp_path, "lora", 4, steps=100, speed=0.5, peak=20)
    found = curves(run.path, 40)
    assert (found["steps"], found["planned"], found["wide"]) == (100, 100, False)
    peak = unpacked(found, "peak")
    assert len(peak) <= 40
    assert (50, 21.0) in peak  # the one step with a higher peak
    recorded = read_columns(run.steps, ("step", "step_time_s"))
    for step, value in unpacked(found, "step"):
        assert value == pytest.approx(recorded["step_time_s"][step - 1], rel=1e-6)


def test_curves_contain_only_training_steps(tmp_path):
    run = made(tmp_path, "lora", 4, steps=10)
    lines = run.steps.read_text().splitlines()
    evaluation = lines[5].replace(",train,", ",evaluate,")
    torn, short, quoted = lines[6][:30], ",".join(lines[7].split(",")[:5]), '"' + lines[8]
    run.steps.write_text("\n".join([*lines[:11], evaluation, short, quoted, torn]))
    assert curves(run.path, 40)["steps"] == 10


def test_nan_is_a_gap_and_unreadable_lines_are_skipped(tmp_path):
    run = made(tmp_path, "lora", 4, steps=10)
    lines = run.steps.read_text().splitlines()
    fields = lines[4].split(",")
    fields[lines[0].split(",").index("loss")] = "inf"
    other = lines[6].split(",")
    other[lines[0].split(",").index("peak_memory_gb")] = "many"
    run.steps.write_text("\n".join([*lines[:4], ",".join(fields), lines[5], ",".join(other), *lines[7:], ""]))
    found = curves(run.path, 40)
    assert [math.isnan(value) for _, value in unpacked(found, "loss")] == [i == 3 for i in range(9)]
    assert [step for step, _ in unpacked(found, "peak")] == [1, 2, 3, 4, 5, 7, 8, 9, 10]


def test_curves_support_more_than_65535_steps(tmp_path):
    run = made(tmp_path, "lora", 4, steps=3)
    lines = run.steps.read_text().splitlines()
    run.steps.write_text("\n".join([*lines[:3], "70000" + lines[3][1:], ""]))
    found = curves(run.path, 40)
    assert found["wide"]
    assert [step for step, _ in unpacked(found, "loss")] == [1, 2, 70000]


def test_run_without_steps_has_an_empty_curve(tmp_path):
    assert curves(tmp_path, 40) == {}

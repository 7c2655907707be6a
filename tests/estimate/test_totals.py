"""Totals of `estimate` and `recommend`, computed again from the step time, the power and the price file."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ftbench.core.hardware import gpus
from ftbench.estimate.recommend.ranking import samples_per_step
from ftbench.estimate.time import duration
from ftbench.estimate.time.history import RunHistory, timed_runs
from ftbench.spec.load import load
from ftbench.spec.prices import hourly_costs, load_prices
from ftbench.store.rundir import find_runs, read_json

RESULTS = Path(__file__).resolve().parents[2] / "results"
Ftbench = Callable[..., tuple[int, str, str]]
SPEC = """model: {id: Qwen/Qwen3-8B, weights: random}
method: qlora
dataset: {name: synthetic, samples: 4000, length: 500}
train: {batch_size: 2, gradient_accumulation_steps: 4, epochs: 3}
optimizations: {gradient_checkpointing: on}
"""
RENTED = "RTX 4090: {rent: {per_hour: 3, currency: USD, date: 2026-01-01, source: a}}"
OWNED = """RTX 4090: {owned: {price: 2000, currency: EUR, lifetime_years: 4, utilisation: 0.5,
  electricity_per_kwh: 0.3, host_idle_watts: 100, date: 2026-01-01, source: a}}"""


def hourly(prices: str, watts: float) -> float:
    return 3.0 if prices == RENTED else 2000 / (4 * 365.25 * 24 * 0.5) + 0.3 * (watts + 100) / 1000


def files(folder: Path, prices: str) -> tuple[Path, Path]:
    spec, price_file = folder / "spec.yaml", folder / "prices.yaml"
    spec.write_text(SPEC)
    price_file.write_text(prices)
    return spec, price_file


@pytest.mark.parametrize("prices", [RENTED, OWNED], ids=["rented", "owned"])
@pytest.mark.parametrize("gpus", [1, 2])
def test_estimated_totals_agree_with_the_step(ftbench: Ftbench, tmp_path: Path, prices: str, gpus: int) -> None:
    spec, price_file = files(tmp_path, prices)
    launch = () if gpus == 1 else ("--gpus", gpus, "--strategy", "ddp")
    _, out, _ = ftbench("estimate", spec, "--gpu", "4090", *launch, "--prices", price_file, "--hours", 10, "--json")
    time: dict[str, Any] = json.loads(out)["gpus"][0]["time"]
    assert (time["samples"], time["samples_per_step"], time["real_tokens_per_step"]) == (12_000, 8 * gpus, 4000 * gpus)
    start, step, steps = time["start_s"], time["step_s"], 12_000 / (8 * gpus)
    for end, other in (("low", "high"), ("expected", "expected"), ("high", "low")):
        error = math.hypot(start[end] - start["expected"], steps * (step[end] - step["expected"]))
        expected = start["expected"] + steps * step["expected"]
        assert time["training_s"][end] == pytest.approx(expected - error if end == "low" else expected + error)
        assert time["joules"][end] == pytest.approx(1500 * step[end] * time["watts"][end])
        in_ten_hours = time["samples_in_hours"][other] / (8 * gpus)  # the error of the start hardly matters here
        assert in_ten_hours == pytest.approx((36_000 - start["expected"]) / step[end], rel=1e-3)
    price = gpus * hourly(prices, time["watts"]["expected"])
    assert time["cost"]["value"] == pytest.approx(price * time["training_s"]["expected"] / 3600)


def test_the_range_of_a_short_training_is_that_of_its_start(ftbench: Ftbench, tmp_path: Path) -> None:
    spec, _ = files(tmp_path, RENTED)
    _, out, _ = ftbench("estimate", spec, "--gpu", "H200 SXM", "--samples", 8, "--hours", "0.001", "--json")
    time = json.loads(out)["gpus"][0]["time"]
    start, whole = time["start_s"], time["training_s"]
    assert start["expected"] > 5 * time["step_s"]["expected"]
    assert whole["high"] - whole["expected"] == pytest.approx(start["high"] - start["expected"], rel=0.02)
    assert whole["expected"] - whole["low"] == pytest.approx(start["expected"] - start["low"], rel=0.02)
    assert time["samples_in_hours"] == {"low": 0, "expected": 0, "high": 0}  # 3.6 s are less than the shortest start
    hours = (start["low"] + time["step_s"]["low"]) / 3600  # enough for one step
    _, out, _ = ftbench("estimate", spec, "--gpu", "H200 SXM", "--hours", hours, "--json")
    assert json.loads(out)["gpus"][0]["time"]["samples_in_hours"]["high"] == pytest.approx(8)


@pytest.mark.usefixtures("few_ways")
def test_recommended_costs_are_those_of_all_gpus(ftbench: Ftbench, tmp_path: Path) -> None:
    spec, prices = files(tmp_path, RENTED)
    asked = ("recommend", spec, "--gpu", "4090", "--gpus", 2, "--method", "qlora", "--prices", prices, "--json")
    options = json.loads(ftbench(*asked)[1])["options"]
    assert {option["gpus"] for option in options} == {1, 2}
    for option in options:
        assert option["cost"] == pytest.approx(3 * option["gpus"] * option["seconds"]["expected"] / 3600)


@pytest.mark.parametrize("names", ["4090,H100 SXM", "H100 SXM,4090"])
@pytest.mark.usefixtures("few_ways")
def test_the_settings_that_fit_are_for_the_gpu_with_the_most_room(ftbench: Ftbench, tmp_path: Path, names: str) -> None:
    spec, _ = files(tmp_path, RENTED)
    changes = ("method=lora", "train.batch_size=64", "optimizations.gradient_checkpointing=off")
    asked = ("estimate", spec, *(f"--set={change}" for change in changes), "--gpu", names)
    rows = {row["gpu"]: row for row in json.loads(ftbench(*asked, "--json")[1])["gpus"]}
    assert {row["verdict"] for row in rows.values()} == {"does not fit"}
    assert "nearest" not in rows["RTX 4090"]
    needed = rows["H100 SXM5"]["nearest"]["device_gb"]["expected"]
    text = " ".join(ftbench(*asked)[1].split())
    found = re.search(rf"fit take {needed:.1f} of 79\.6 GiB on H100 SXM5, with (\d+) samples per step:", text)
    assert int(found[1]) == pytest.approx(samples_per_step(load(spec, [*changes]), RunHistory()), rel=0.25)


@pytest.mark.usefixtures("few_ways")
def test_options_reach_the_estimate(ftbench: Ftbench, tmp_path: Path) -> None:
    spec, prices = files(tmp_path, RENTED)
    code, _, err = ftbench("estimate", spec, "--gpu", "4090", "--store", prices)
    assert (code, "--store" in err) == (2, True)
    assert ftbench("estimate", spec, "--gpu", "4090", "--store", tmp_path / "absent")[0] == 2
    asked = ("Qwen/Qwen3-8B", "--gpu", "4090", "--length", 300, "--samples", 2000, "--json")
    _, out, _ = ftbench("recommend", *asked, "--method", "qlora")
    assert json.loads(out)["spec"]["dataset"]["samples"] == 2000


def test_measured_steps_are_scaled_by_tokens_and_measured_watts_are_of_one_gpu() -> None:
    same: Any = [SimpleNamespace(step_s=2.0, tokens=1000), SimpleNamespace(step_s=3.0, tokens=1500)]
    limits: Any = None
    assert duration._judged(gpus()[0], same, 500.0, 9.0, limits, False)[:2] == (1.0, duration.MEASURED)
    folder = RESULTS / "h100" / "two-gpus"
    watts = {run.run_id: (run.watts, run.spec.launch.gpus) for run in timed_runs([folder]) if run.watts}
    assert {count for _, count in watts.values()} == {1, 2}
    for run in find_runs(folder):
        if (name := f"{run.path.parent.name}/{run.run_id}") in watts:
            assert watts[name][0] * watts[name][1] == pytest.approx(read_json(run.summary)["energy"]["mean_watts"])


def test_the_electricity_of_two_owned_gpus_is_counted_once(tmp_path: Path) -> None:
    price = load_prices(files(tmp_path, OWNED)[1]).by_gpu["RTX 4090"]
    (cost,) = hourly_costs(price, 10.0, None, 800.0, 8.0, gpus=2)
    assert cost.per_hour == pytest.approx(2 * hourly(OWNED, 400.0))
    assert cost.per_1k_samples == pytest.approx(2 * hourly(OWNED, 400.0) / 36)

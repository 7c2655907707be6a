"""Grouping of runs into repeats, names of groups, and means."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from itertools import combinations

import pytest

from ftbench.core.compare import ratio_of_runs
from ftbench.report.build import Request, report
from ftbench.report.compare import words
from ftbench.report.compare.pairs import compare, noise_of, pair_of
from ftbench.report.data.cells import Cell
from ftbench.report.data.collect import collect
from ftbench.report.data.groups import cells_of, runs_of
from ftbench.report.runs_table import runs_table
from ftbench.report.sections.cost import energy, money
from ftbench.report.sections.throughput import night
from ftbench.spec.prices import load_prices
from ftbench.store import rundir
from made_runs import MAX_Q, OOM, RESULTS, gpu, make_run, method, steps


def cells(path):
    return cells_of(runs_of(collect([path])))


def written(run, **fields):
    """Add fields to a run's summary."""
    run.summary.write_text(json.dumps(rundir.read_json(run.summary) | fields))


# --- groups and names ------------------------------------------------------------------------------------------------


def test_repeats_share_spec_and_gpu(tmp_path):
    make_run(tmp_path, "a", steps(seed=1))
    make_run(tmp_path, "b", steps(seed=2), spec={"name": "another name"})
    make_run(tmp_path, "c", steps(seed=3), machine=gpu(MAX_Q, 300, 300))
    make_run(tmp_path, "d", steps(seed=4), spec=method("unsloth") | {"method.load_in_4bit": True})
    make_run(tmp_path, "e", steps(seed=5), spec=method("unsloth") | {"method.load_in_4bit": False})
    found = {tuple(sorted(run.run_id for run in cell.runs)): cell.name for cell in cells(tmp_path)}
    assert found == {
        ("a", "b"): "plain at batch 4", ("c",): "plain at batch 4", ("d",): "unsloth 4-bit + padded at batch 4",
        ("e",): "unsloth 16-bit + padded at batch 4",
    }  # fmt: skip


def test_different_power_limits_are_not_repeats(tmp_path, ftbench):
    for name, limit in (("a", 300), ("b", 300), ("c", 250)):
        make_run(tmp_path, name, steps(seconds=300 / limit, seed=ord(name)), machine=gpu(MAX_Q, limit, 300))
    make_run(tmp_path, "d", steps(seconds=0.5, seed=4))
    held = {limit: f"plain (power limit {limit} W of 300 W) at batch 4" for limit in (300, 250)}
    assert {cell.name for cell in cells(tmp_path)} == {held[300], held[250], "plain at batch 4"}
    code, out, _ = ftbench("report", tmp_path, "--answers", "--wide")
    assert code == 0
    assert f"{held[300]} on RTX PRO 6000 Blackwell Max-Q (a)" in out


def test_edited_data_files_are_not_repeats(tmp_path, ftbench):
    """The specs are identical. A run that ended before tokenization still counts as a repeat."""
    make_run(tmp_path, "a", steps(1), state=OOM, applied={"dataset.hash": None})
    for name, tokens in (("b", "one"), ("c", "one"), ("d", "another")):
        make_run(tmp_path, name, steps(seed=ord(name)), applied={"dataset.hash": tokens})
    assert [[run.run_id for run in cell.runs] for cell in cells(tmp_path)] == [["a", "b", "c"], ["d"]]
    out = ftbench("report", tmp_path, "--rows", "merge", "--format", "csv")[1]
    assert [row["runs"] for row in csv.DictReader(io.StringIO(out))] == ["2 of 3", "1"]


def test_merged_row_has_the_mean_of_each_rate(tmp_path):
    for name, seconds in (("a", 1.0), ("b", 4.0)):
        rows = steps(seconds=seconds, noise=0, images=4, tiles=4, generated_tokens=8, generation_s=seconds)
        make_run(tmp_path, name, rows)
    (row,) = json.loads(report(Request([tmp_path], "json", repeats="merge")).text)["runs"]
    figures = {"tokens_per_s.real": 4096, "tokens_per_s.padded": 4096, "images_per_s.images": 2,
               "tokens_per_s.generated": 4, "step_time_s.p90": 2}  # fmt: skip
    assert {name: row[name] for name in figures} == pytest.approx(figures)
    assert row["step_time_s.ci95"] is None


@pytest.mark.parametrize("folder", ["headline", "grid", pytest.param("", marks=pytest.mark.exhaustive)])
def test_rows_of_committed_runs_have_unique_names(folder):
    document = json.loads(report(Request([RESULTS / folder], "json", answers=True)).text)
    for section in {"night", "energy"} & document.keys():
        names = Counter(
            (row["model"], row["gpu"], row["data"], row["name"]) for row in document[section]["records"]
        )  # fmt: skip
        assert names
        assert set(names.values()) == {1}, section


def test_rent_and_purchase_are_not_compared(tmp_path):
    make_run(tmp_path, "a", steps(seed=1))
    make_run(tmp_path, "b", steps(seconds=0.5, seed=2), spec=method("full"))
    terms = "currency: USD, date: 2026-01-02, source: a shop"
    prices = tmp_path / "prices.yaml"
    prices.write_text(
        f"H200 SXM:\n  rent: {{per_hour: 3.6, {terms}}}\n"
        f"  owned: {{price: 40000, lifetime_years: 3, utilisation: 0.5, {terms}}}\n"
    )
    lucky = make_run(tmp_path, "c", steps(seconds=0.1, seed=3), spec=method("qlora"))
    written(lucky, contention={"contended": True, "host_cpu_by_others": 0.8})
    make_run(tmp_path, "d", steps(2, seconds=0.1, seed=4), spec=method("unsloth"))
    section = money(cells(tmp_path), load_prices(prices, {"NVIDIA H200"}), 8.0)
    sentences = [text for text in section.paragraphs if "cheapest" in text]
    assert len(sentences) == 2
    assert not any("rent" in text and "owned" in text for text in sentences)
    assert all("cheapest with plain full at batch 4" in text for text in sentences), "no contended, no short run"


# --- one basis -------------------------------------------------------------------------------------------------------


def test_samples_and_tokens_give_the_same_ratio(tmp_path):
    """The steady window of the packed run has shorter samples than the data set."""
    make_run(tmp_path, "plain", steps(seed=1))
    rows = steps(seed=2, real_tokens=4 * 8192, padded_tokens=4 * 8192, samples=21)
    make_run(tmp_path, "packed", rows, spec={"optimizations.packing": True})
    plain, packed = (next(c for c in cells(tmp_path) if name in c.runs[0].run_id) for name in ("plain", "packed"))
    faster = pair_of("optimizations", packed, plain).speed.value
    assert faster == pytest.approx(4, rel=0.01)
    assert packed.figure("samples_per_s") / plain.figure("samples_per_s") == pytest.approx(faster)
    document = json.loads(report(Request([tmp_path], "json", hours=8)).text)
    night = {row["run_ids"]: row for row in document["night"]["records"]}
    assert night["packed"]["samples_per_hour"] / night["plain"]["samples_per_hour"] == pytest.approx(faster)
    assert night["packed"]["real_tokens"] / night["packed"]["samples"] == pytest.approx(2048)


# --- first steps -----------------------------------------------------------------------------------------------------


def test_cold_and_warm_first_steps_have_no_mean(tmp_path):
    for name, first, cache in (("a", 40.0, "cold"), ("b", 6.0, "warm"), ("c", 8.0, "warm")):
        compiled = {"optimizations.compile": True}
        run = make_run(tmp_path, name, steps(seed=name, first=first), spec=compiled)
        written(run, first_step_cache=cache)
    make_run(tmp_path, "plain", steps(seed=9, first=2.0))
    found = compare(runs_of(collect([tmp_path])), "optimization")
    (pair,) = found.pairs
    assert words.first_step_text(pair.cell) == "40.0 s cold, 6.93 s warm"
    assert pair.first_step["cold"].value == pytest.approx(20)
    assert pair.first_step["warm"].value == pytest.approx(3.5, rel=0.02)
    assert pair.cell.pace().start_s == pytest.approx(39, rel=0.01)


def test_older_run_has_its_cache_state_in_applied(tmp_path):
    make_run(tmp_path, "a", steps(seed=1, first=40.0), applied={"compile_cache": "cold"})
    (cell,) = cells(tmp_path)
    assert words.first_step_text(cell) == "40.0 s cold"


# --- contention and NaN ----------------------------------------------------------------------------------------------


def test_contended_run_is_marked_in_tables_and_pairs(tmp_path):
    make_run(tmp_path, "a", steps(seed=1))
    contended = make_run(tmp_path, "b", steps(seconds=2.0, seed=2), spec=method("full"))
    written(contended, contention={"contended": True, "host_cpu_by_others": 0.7, "gpu_by_others": None})
    (pair,) = compare(runs_of(collect([tmp_path])), "method", "lora").pairs
    assert pair.cell.state == "ok, contended"
    assert pair.reason == "it shared the machine with other work (contended)"
    shown = runs_table(collect([tmp_path]))
    assert [row[shown.headings.index("state")] for row in shown.rows] == ["ok, contended", "ok"]
    groups, example = cells(tmp_path), RESULTS.parents[1] / "configs" / "prices-example.yaml"
    for part in (night(groups), energy(groups), money(groups, load_prices(example), 8)):
        assert {record["run_ids"] for record in part.records} == {"a"}, part.key


@pytest.mark.parametrize("column", ["loss", "grad_norm"])
def test_nan_run_is_failed_without_figures(tmp_path, column):
    make_run(tmp_path, "a", steps(seed=1))
    broken = {"grad_norm": 1.0, column: lambda step: float("nan") if step > 1 else 2.0}
    make_run(tmp_path, "b", steps(seconds=0.5, seed=2, **broken), spec={"optimizations.compile": True})
    shown = runs_table(collect([tmp_path]))
    good, bad = (dict(zip(shown.headings, row, strict=True)) for row in shown.rows)
    assert (good["state"], bad["tokens/s"]) == ("ok", "")
    assert bad["state"].startswith("not finite: ")
    assert len(compare(runs_of(collect([tmp_path])), "optimization").pairs[0].cell.ok) == 0


# --- intervals -------------------------------------------------------------------------------------------------------


def test_repeats_of_one_session_are_not_distinguishable():
    """Compare pairs of repeated records as single runs. At most 5 % may differ, and then only "likely"."""
    found = cells(RESULTS / "records")
    noise = noise_of(found)
    ratios = [
        pair_of("", Cell(cell.facts, (b,), cell.variant), Cell(cell.facts, (a,), cell.variant), noise=noise).speed
        for cell in found for a, b in combinations(cell.ok, 2) if a.dir.path.parent == b.dir.path.parent
    ]  # fmt: skip
    unlike = [ratio for ratio in ratios if ratio.verdict != "not distinguishable"]
    assert len(ratios) >= 40
    assert len(unlike) <= 0.05 * len(ratios)
    assert all(ratio.verdict.startswith("likely ") for ratio in unlike)


def test_very_wide_interval_is_described_in_words(tmp_path):
    for number, seconds in enumerate((1.0, 20.0)):
        make_run(tmp_path, f"a{number}", steps(seconds=seconds, seed=number))
        make_run(tmp_path, f"b{number}", steps(seconds=0.5 * seconds, seed=number), spec=method("full"))
    (pair,) = compare(runs_of(collect([tmp_path])), "method", "lora").pairs
    assert pair.speed.high > 1000
    assert words.change(pair.speed).startswith("≈ +100.")
    assert "[" not in words.change(pair.speed)
    assert "[" not in words.change(ratio_of_runs([1213.0, 1451.0], [15401.0, 15488.0]))
    assert "[" in words.change(ratio_of_runs([9116.0, 9131.0], [16383.0, 16431.0]))


def test_runs_on_a_shared_gpu_have_no_valid_speed(tmp_path):
    for name, kind in (("a", "lora"), ("b", "qlora")):
        make_run(tmp_path, name, steps(seed=name), spec=method(kind) | {"measure.share_gpu": True})
    (pair,) = compare(runs_of(collect([tmp_path])), "method").pairs
    assert (pair.speed, pair.energy) == (None, None)
    assert "contended" in pair.reason
    assert energy(cells(tmp_path)) is None

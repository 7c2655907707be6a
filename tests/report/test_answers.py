"""The answers of a report, compared with the files of the runs."""

from __future__ import annotations

import json
import re

import pandas as pd
import pytest

from ftbench.report.build import Request, report
from ftbench.report.data.collect import collect
from ftbench.report.data.groups import cells_of, runs_of
from ftbench.report.document import Report
from ftbench.report.formats import render
from ftbench.report.sections.answers import answers, frontier, memory, night, trained
from ftbench.report.sections.decision import decision
from ftbench.report.sections.profiles import groups, kernels
from ftbench.store import rundir
from made_runs import MAX_Q, OOM, RESULTS, gpu, make_run, method, steps


def cells(*paths):
    return cells_of(runs_of(collect(list(paths))))


def words(*paths):
    found = decision(cells(*paths))
    return " ".join(found.paragraphs) if found else ""


# --- a night ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hours", [8.0, 0.5])
def test_night_subtracts_the_start(tmp_path, hours):
    run = make_run(tmp_path, "a", steps(noise=0))
    (record,) = night(cells(tmp_path), hours).records
    frame = pd.read_csv(run.steps)
    phases = {p["name"]: p["end_s"] - p["start_s"] for p in rundir.read_json(run.phases)["phases"]}
    start = sum(phases[name] for name in ("import", "prepare_data", "load", "setup"))
    warm = rundir.read_json(run.summary)["steps"]["warmup"]
    start += frame.step_time_s[:warm].sum()
    rate = frame.samples[warm:].sum() / frame.step_time_s[warm:].sum()
    assert record["samples_per_hour"] == pytest.approx(3600 * rate)
    assert record["start_s"] == pytest.approx(start)
    assert record["samples"] == pytest.approx(rate * (hours * 3600 - start))
    assert record["real_tokens"] == pytest.approx(record["samples"] * 2048)


def test_night_shorter_than_the_start_has_zero_samples(tmp_path):
    make_run(tmp_path, "a")
    assert night(cells(tmp_path), 0.001).records[0]["samples"] == 0


def test_night_skips_runs_without_a_rate(tmp_path):
    make_run(tmp_path, "a", steps(1), state=OOM)
    assert night(cells(tmp_path)) is None


# --- memory and time -------------------------------------------------------------------------------------------------


def test_memory_over_progress_matches_the_csv(tmp_path):
    run = make_run(tmp_path, "a", steps(memory_allocated_gb=lambda step: 10.0 + step))
    (cell,) = cells(tmp_path)
    frame = pd.read_csv(run.steps)
    (record,) = memory([cell]).records
    assert record["allocated_gb"] == pytest.approx(frame.memory_allocated_gb.median())
    assert record["elapsed_100_s"] == pytest.approx(frame.elapsed_time_sec.iloc[-1])
    half = frame[frame.progress_ratio >= 0.5].elapsed_time_sec.iloc[0]
    assert record["elapsed_50_s"] == pytest.approx(half)


def test_unmeasured_memory_is_empty(tmp_path):
    make_run(tmp_path, "a", steps(memory_allocated_gb=None, memory_reserved_gb=None, peak_memory_gb=None))
    (record,) = memory(cells(tmp_path)).records
    assert (record["allocated_gb"], record["peak_gb"]) == (None, None)


# --- what fits -------------------------------------------------------------------------------------------------------


def test_frontier_of_the_committed_sweep():
    found = frontier(cells(RESULTS / "qwen3-8b-frontier"))
    fits = {row[0]: dict(zip(found.table.headings, row, strict=True)) for row in found.table.rows}
    assert {name: row["fits"] for name, row in fits.items()} == {
        "full": "6", "lora": "7", "qlora": "6", "unsloth 16-bit + checkpointing off": "14"
    }  # fmt: skip
    assert fits["lora"]["8"] == "oom"
    assert fits["lora"]["6"] == ""
    assert fits["lora"]["7"] == "123.6"
    assert found.table.headings[2:] == ["1", "2", "4", "6", "7", "8", "14", "15", "16"]


def test_frontier_shows_none_for_a_method_that_never_fits(tmp_path):
    make_run(tmp_path, "a", steps(0), state=OOM)
    assert frontier(cells(tmp_path)).table.rows[0][1] == "none"


def test_frontier_needs_two_batches(tmp_path):
    make_run(tmp_path, "a")
    assert frontier(cells(tmp_path)) is None


# --- trained parameters ----------------------------------------------------------------------------------------------


def test_trained_parameters_are_those_of_applied(tmp_path):
    run = make_run(tmp_path, "a")
    (record,) = trained(cells(tmp_path)).records
    kinds = rundir.read_json(run.applied)["parameters"]["by_kind"]
    assert {kind: record[kind] for kind in kinds} == {kind: line["trainable"] for kind, line in kinds.items()}


def test_trained_parameters_need_applied(tmp_path):
    make_run(tmp_path, "a").applied.unlink()
    assert trained(cells(tmp_path)) is None


# --- samples and kernels ---------------------------------------------------------------------------------------------

PROFILE = {
    "steps": 3, "window_ms": 30.0, "busy_share": 0.5, "busy_share_unprofiled": None, "step_ms": {"before": 9.0},
    "groups": [], "idle": {"ms": 1.0}, "kernels": [],
}  # fmt: skip


@pytest.mark.parametrize(
    "part", [{"kernels": [{"name": 3, "time_ms": 1}]}, {"steps": "3"}, {"idle": {}}, {"groups": 1}]
)
def test_malformed_profiles_are_skipped(tmp_path, part):
    folder = make_run(tmp_path, "a").path / "profile"
    folder.mkdir()
    (folder / "kernels.json").write_text(json.dumps(PROFILE | part))
    assert kernels(cells(tmp_path)) is None
    assert groups(cells(tmp_path)) is None


def test_kernels_are_sorted_with_their_share(tmp_path):
    folder = make_run(tmp_path, "a").path / "profile"
    folder.mkdir()
    found = [{"name": "gemm", "time_ms": 3.0, "calls": 7}, {"name": "softmax", "time_ms": 9.0}]
    document = PROFILE | {"kernels": found}
    (folder / "kernels.json").write_text(json.dumps(document))
    rows = kernels(cells(tmp_path)).table.rows
    assert [row[2:] for row in rows] == [["softmax", "", "9.0", "75.0 %", ""], ["gemm", "", "3.0", "25.0 %", "7"]]


def test_kernels_need_a_profile(tmp_path):
    make_run(tmp_path, "a")
    assert kernels(cells(tmp_path)) is None


# --- what to do ------------------------------------------------------------------------------------------------------


def test_decision_names_the_smaller_recipe_and_its_cost_in_speed(tmp_path):
    make_run(tmp_path, "a", steps(seed=1))
    make_run(tmp_path, "b", steps(seconds=2.0, seed=2, peak_memory_gb=20.0), spec=method("qlora"))
    text = words(tmp_path)
    assert re.search(r"Least memory: qlora at batch 4 needs 20\.0 GiB, lora at batch 4 77\.\d GiB", text)
    assert re.search(r"its speed is likely -(49|50)\.\d %", text)


def test_decision_names_a_recipe_that_is_smallest_and_fastest(tmp_path):
    make_run(tmp_path, "a", steps(seed=1))
    make_run(tmp_path, "b", steps(seconds=0.5, seed=2, peak_memory_gb=20.0), spec=method("qlora"))
    assert "qlora at batch 4 is the fastest, and needs 20.0 GiB, the least" in words(tmp_path)


def test_decision_does_not_call_an_indistinguishable_recipe_fastest(tmp_path):
    make_run(tmp_path, "a", steps(seed=1))
    make_run(tmp_path, "b", steps(seed=2, seconds=1.001), spec=method("full"))
    assert "Memory: lora at batch 4 is as fast as any, and needs" in words(tmp_path)


def test_decision_ignores_small_memory_savings(tmp_path):
    make_run(tmp_path, "a", steps(seed=1))
    make_run(tmp_path, "b", steps(seconds=2.0, seed=2, peak_memory_gb=76.0), spec=method("qlora"))
    text = words(tmp_path)
    assert "Memory: lora at batch 4 is the fastest" in text
    assert "its speed is" not in text


def test_decision_names_the_fastest_of_the_small_recipes():
    assert "Least memory: unsloth 16-bit + checkpointing off at batch 1 needs 24.3 GiB" in words(
        RESULTS / "qwen3-8b-frontier"
    )


def test_decision_shows_the_break_even_of_a_slow_start(tmp_path):
    make_run(tmp_path, "a", steps(seconds=1.0, first=2.0, seed=1))
    make_run(tmp_path, "b", steps(seconds=0.5, first=50.0, seed=2), spec={"optimizations.compile": True})
    text = words(tmp_path)
    assert "Many steps: lora with compile at batch 4 trains" in text
    ahead = int(re.search(r"Few steps: lora at batch 4 is ahead for the first (\d+) steps", text)[1])
    assert ahead == pytest.approx((49.5 - 1.0) / (1.0 - 0.5), rel=0.03)


def test_decision_names_a_recipe_with_the_shortest_warm_up(tmp_path):
    make_run(tmp_path, "a", steps(first=9.0, seed=1))
    make_run(tmp_path, "b", steps(seconds=0.5, first=1.0, seed=2), spec={"optimizations.compile": True})
    assert "also has the shortest warm-up (0.50 s)" in words(tmp_path)


def test_decision_has_no_winner_within_the_noise(tmp_path):
    for i in range(3):
        make_run(tmp_path, f"a{i}", steps(seconds=1 + 0.05 * i, seed=i))
        make_run(tmp_path, f"b{i}", steps(seconds=1.01 + 0.05 * i, first=80.0, seed=i), spec=method("full"))
    text = words(tmp_path)
    assert "are not distinguishable in speed" in text
    assert "is ahead for the first" not in text


def test_decision_ignores_speeds_from_few_steps(tmp_path):
    """Otherwise a lucky run of two steps would be the fastest."""
    make_run(tmp_path, "a", steps(seed=1))
    make_run(tmp_path, "b", steps(seconds=2.0, seed=2), spec=method("qlora"))
    make_run(tmp_path, "lucky", steps(3, 0.1), spec=method("full"))
    text = words(tmp_path)
    assert "full" not in text
    assert "Not used: 1 speed from fewer than 5 steady steps." in text


def test_few_steady_steps_have_no_break_even(tmp_path):
    make_run(tmp_path, "a", steps(6))
    make_run(tmp_path, "b", steps(6, 0.5, first=50.0), spec=method("full"))
    text = words(tmp_path)
    assert "too few steady steps to estimate the noise" in text
    assert "is ahead for the first" not in text


def test_decision_ignores_contended_and_failed_runs(tmp_path):
    make_run(tmp_path, "a", steps(seed=1))
    make_run(tmp_path, "b", steps(seconds=2.0, seed=2), spec=method("qlora"))
    beside = make_run(tmp_path, "contended", steps(seconds=0.1, seed=3), spec=method("full"))
    summary = rundir.read_json(beside.summary) | {"contention": {"contended": True, "host_cpu_by_others": 0.8}}
    beside.summary.write_text(json.dumps(summary))
    make_run(tmp_path, "broken", steps(seconds=0.1, seed=4, loss=float("nan")), spec={"optimizations.compile": True})
    text = words(tmp_path)
    assert "Many steps: lora at batch 4 trains" in text
    assert "compile" not in text
    assert "Not used: 1 contended run." in text


def test_cells_of_one_recipe_get_unique_names(tmp_path):
    for rank in (8, 64):
        make_run(tmp_path, f"r{rank}", steps(seed=rank, peak_memory_gb=10.0 + rank), spec={"method.rank": rank})
    make_run(tmp_path, "repeat", steps(seed=9), spec={"method.rank": 8})
    assert [cell.name for cell in cells(tmp_path)] == ["lora (rank 64) at batch 4", "lora (rank 8) at batch 4"]
    (rows,) = [frontier(cells(tmp_path)) or night(cells(tmp_path))]
    assert len({tuple(row[:5]) for row in rows.table.rows}) == 2


def test_decision_reports_different_learning(tmp_path):
    make_run(tmp_path, "a", steps(seed=1))
    make_run(tmp_path, "b", steps(seconds=0.5, seed=2, loss=3.5), spec={"optimizations.compile": True})
    assert "do not learn the same" in words(tmp_path)


def test_decision_lists_other_differences(tmp_path):
    make_run(tmp_path, "a", steps(seed=1))
    make_run(tmp_path, "b", steps(seconds=2.0, seed=2), spec=method("full") | {"train.learning_rate": 1.0})
    assert "also differs: train.learning_rate: 1.0 → 0.0002" in words(tmp_path)


def test_different_number_of_steps_is_listed_once(tmp_path):
    length = {"dataset.name": "synthetic", "dataset.samples": 40, "train.max_steps": 10}
    make_run(tmp_path, "a", steps(seed=1), spec=length)
    longer = {"dataset.samples": 80, "train.max_steps": 20}
    make_run(tmp_path, "b", steps(seconds=2.0, seed=2), spec=method("full") | length | longer,
             applied={"dataset.order_hash": "another"})  # fmt: skip
    assert "(also differs: train.max_steps: 20 → 10)" in words(tmp_path)


def test_decision_compares_gpus_with_the_same_recipe(tmp_path):
    make_run(tmp_path, "a", steps(seed=1))
    make_run(tmp_path, "b", steps(seconds=3.0, seed=2), machine=gpu(MAX_Q, 300, 300))
    assert re.search(
        rf"NVIDIA H200 against {MAX_Q}: lora at batch 4 is likely \+\d+\.\d % .* the same recipe", words(tmp_path)
    )


def test_single_run_has_no_decision(tmp_path):
    make_run(tmp_path, "a")
    assert words(tmp_path) == ""


def test_decision_is_an_indented_list(tmp_path, monkeypatch):
    make_run(tmp_path, "a", steps(peak_memory_gb=60))
    make_run(tmp_path, "b", steps(seconds=0.9, peak_memory_gb=9), spec=method("qlora"))
    monkeypatch.setenv("COLUMNS", "80")
    text = render(Report((), sections=[decision(cells(tmp_path))], runs=False), "table")
    heading, *lines = text.splitlines()
    assert heading.endswith("on NVIDIA H200:")
    assert max(map(len, text.splitlines())) <= 80
    assert len([line for line in lines if line.startswith("-  ")]) == len(decision(cells(tmp_path)).points) > 1
    assert all(line.startswith(("-  ", "   ")) for line in lines)


def test_failures_alone_show_the_limit(tmp_path):
    make_run(tmp_path, "a", steps(0), state=OOM)
    assert words(tmp_path).endswith("Out of memory: lora does not fit at batch 4.")


def test_decision_of_the_committed_sweep():
    text = words(RESULTS / "qwen3-8b-frontier")
    assert (
        "full fits up to batch 6 and not 7, lora fits up to batch 7 and not 8, qlora fits up to batch 6 and not 7"
        in text
    )
    assert "Many steps: unsloth 16-bit + checkpointing off at batch 8 trains 27,936 samples/h" in text
    assert "against lora at batch 7 +69.7 %" in text


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["table", "md", "json"])
def test_answers_in_every_format(tmp_path, ftbench, format):
    make_run(tmp_path, "a", steps(seed=1))
    make_run(tmp_path, "b", steps(1, seed=2), spec={"train.batch_size": 8}, state=OOM)
    code, out, err = ftbench("report", tmp_path, "--hours", "12", "--format", format)
    assert (code, err) == (0, "")
    for text in ("12 hours", "Which batch fits", "Trained parameters", "progress"):
        assert text.casefold() in out.casefold()
    if format == "json":
        document = json.loads(out)
        assert document["night"]["records"][0]["hours"] == 12
        assert len(document["runs"]) == 2


def test_mock_runs_can_be_reported(tmp_path, ftbench):
    spec = tmp_path / "spec.yaml"
    spec.write_text("model: {id: tiny/qwen3, weights: random}\nlaunch: {mock: ok}\n")
    for name in ("lora", "full"):
        assert ftbench("run", spec, "--out", tmp_path / "out", "--set", f"method={name}")[0] == 0
    code, out, err = ftbench("report", tmp_path / "out", "--compare", "method", "--baseline", "full", "--answers")
    assert (code, err) == (0, "")
    assert "+100.0 %" in out
    assert "follows (0 %" in out


def test_answers_of_the_committed_runs():
    keys = [part.key for part in answers(cells(RESULTS))]
    assert keys == ["night", "frontier", "memory", "trained"]


def test_recipe_is_not_compared_with_itself_over_more_samples(tmp_path):
    for samples in (40, 264):
        make_run(tmp_path, f"n{samples}", steps(seed=samples), spec={"dataset.samples": samples})
    first = report(Request([tmp_path], "html")).text
    assert "(samples 264) at batch" in first, "rows have distinct names"
    assert "Many steps" not in first
    assert "(samples" not in first.partition("<title>")[2].partition("</title>")[0]

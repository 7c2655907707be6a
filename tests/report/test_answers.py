"""The answers of a report, compared with the files of the runs."""

from __future__ import annotations

import json
import re

import pandas as pd
import pytest

from ftbench.report import answer
from ftbench.report.build import Request, report
from ftbench.report.compare import pairs
from ftbench.report.data.collect import collect
from ftbench.report.data.groups import cells_of, runs_of
from ftbench.report.sections.throughput import night
from ftbench.store import rundir
from made_runs import MAX_Q, OOM, RESULTS, gpu, make_run, method, steps


def cells(*paths):
    return cells_of(runs_of(collect(list(paths))))


def words(*paths):
    return " ".join(text for part in answer.sections(cells(*paths), full=True) for text in part.paragraphs)


# --- a night ---------------------------------------------------------------------------------------------------------


def test_night_subtracts_the_start(tmp_path):
    run = make_run(tmp_path, "a", steps(noise=0))
    (record,) = night(cells(tmp_path), 8.0).records
    frame = pd.read_csv(run.steps)
    phases = {p["name"]: p["end_s"] - p["start_s"] for p in rundir.read_json(run.phases)["phases"]}
    start = sum(phases[name] for name in ("import", "prepare_data", "load", "setup"))
    warm = rundir.read_json(run.summary)["steps"]["warmup"]
    start += frame.step_time_s[:warm].sum()
    rate = frame.samples[warm:].sum() / frame.step_time_s[warm:].sum()
    assert record["samples_per_hour"] == pytest.approx(3600 * rate)
    assert record["start_s"] == pytest.approx(start)
    assert record["samples"] == pytest.approx(rate * (8 * 3600 - start))
    assert record["real_tokens"] == pytest.approx(record["samples"] * 2048)


def test_night_shorter_than_the_start_has_zero_samples(tmp_path):
    make_run(tmp_path, "a")
    assert night(cells(tmp_path), 0.001).records[0]["samples"] == 0


def test_night_without_a_known_start_leaves_it_empty(tmp_path):
    run = make_run(tmp_path, "a", steps(noise=0))
    known = rundir.read_json(run.summary)
    rundir.write_json(run.summary, known | {"time_to_steady_s": None, "phases_s": {}})
    section = night(cells(tmp_path))
    assert section.records[0]["start_s"] is None
    assert section.table.rows[0][section.table.headings.index("start")] == ""


def test_night_skips_runs_without_a_rate(tmp_path):
    make_run(tmp_path, "a", steps(1), state=OOM)
    assert night(cells(tmp_path)) is None


# --- the answer ------------------------------------------------------------------------------------------------------


def test_answer_names_the_fastest_its_lead_and_the_smallest(tmp_path):
    make_run(tmp_path, "a", steps(seed=1, peak_memory_gb=20.0))
    make_run(tmp_path, "b", steps(seconds=0.5, seed=2), spec=method("qlora"))
    first, lead, memory = answer.sections(cells(tmp_path))[0].paragraphs
    assert re.match(r"plain qlora is the fastest of 2 recipes: 16,\d+ tokens/s \(95 %: ", first)
    assert re.match(
        r"The fastest recipe is likely 2\.0\d times as fast as the next recipe, plain \(95 %: .*; one run\)\.", lead
    )
    assert memory == "Least memory: plain, 20.0 GiB, 0.50 times the speed of the fastest."


def test_least_memory_is_the_least_of_all_batch_sizes(tmp_path):
    for batch, seconds, peak in ((1, 1.0, 16.0), (4, 0.9, 40.0)):
        make_run(tmp_path, f"a{batch}", steps(seconds=seconds, peak_memory_gb=peak), spec={"train.batch_size": batch})
    make_run(tmp_path, "b", steps(seconds=0.5, peak_memory_gb=50.0), spec=method("full"))
    assert "Least memory: plain at batch 1, 16.0 GiB, 0.50 times the speed of the fastest." in words(tmp_path)


@pytest.mark.parametrize(("repeats", "word"), [(1, "likely "), (3, "")])
def test_one_run_per_recipe_is_likely(tmp_path, repeats, word):
    for number in range(repeats):
        make_run(tmp_path, f"a{number}", steps(seed=number))
        make_run(tmp_path, f"b{number}", steps(seconds=0.5, seed=10 + number), spec=method("full"))
    assert f"The fastest recipe is {word}2.0" in words(tmp_path)


def test_settings_are_named_before_the_length_of_the_training(tmp_path):
    """Numbers of samples alone give the cells unique names. The dropout then would not be in the answer."""
    for number, (dropout, samples) in enumerate([(0.0, 40), (0.1, 60), (0.1, 80)]):
        changes = {"method.dropout": dropout, "dataset.samples": samples}
        make_run(tmp_path, f"a{number}", steps(seconds=1 + dropout, seed=number), spec=changes)
    assert words(tmp_path).startswith("plain (dropout 0.0) is the fastest of 2 recipes")
    assert "the next recipe, plain (dropout 0.1)" in words(tmp_path)


@pytest.mark.parametrize(("gpus", "cards"), [(1, "one card"), (2, "the same cards")])
def test_the_answer_names_one_card_or_several(tmp_path, gpus, cards):
    launch = {"launch.gpus": gpus, "launch.strategy": "ddp"} if gpus > 1 else {}
    for number in range(2):
        make_run(tmp_path, f"a{number}", steps(seed=number), spec=launch)
        make_run(tmp_path, f"b{number}", steps(seconds=0.5, seed=10 + number), spec=launch | method("full"))
    assert f": two rounds, {cards}, one commit." in words(tmp_path)


def test_the_answer_names_a_cpu_and_a_release(tmp_path):
    ours = {"gpus": [], "cpu": {"model": "a CPU"}, "ftbench": {"version": "0.1.0", "commit": None}}
    for number in range(2):
        for name, seconds in (("lora", 1.0), ("full", 0.5)):
            rows = steps(seconds=seconds, seed=number)
            make_run(tmp_path, f"{name}{number}", rows, spec=method(name), machine=ours).summary.unlink()
    assert ": two rounds, one kind of CPU, one release." in words(tmp_path)


@pytest.mark.parametrize(("other", "widest"), [(False, 1.01), (True, 1.07)])
def test_interval_across_cards_has_the_spread_between_sittings(tmp_path, other, widest):
    """Within one sitting repeated runs differ by less than 1 %; another card or day adds about 2 % to each side."""
    for number in range(4):
        make_run(tmp_path, f"a{number}", steps(seed=number, noise=0.001))
        run = make_run(tmp_path, f"b{number}", steps(seed=10 + number, noise=0.001), spec=method("full"))
        if other:
            machine = rundir.read_json(run.machine)
            rundir.write_json(run.machine, machine | {"gpus": [rundir.first_gpu(machine) | {"uuid": "GPU-other"}]})
    plain, full = sorted(cells(tmp_path), key=lambda cell: cell.variant != "plain")
    ratio = pairs.pair_of("method.name", full, plain).speed
    assert widest - 0.02 < ratio.high / ratio.value < widest


def test_answer_is_not_distinguishable_within_the_noise(tmp_path):
    for i in range(3):
        make_run(tmp_path, f"a{i}", steps(seconds=1 + 0.05 * i, seed=i))
        make_run(tmp_path, f"b{i}", steps(seconds=1.01 + 0.05 * i, first=80.0, seed=i), spec=method("full"))
    assert "not distinguishable in speed from" in words(tmp_path)


def test_answer_uses_valid_runs_and_counts_the_others(tmp_path):
    make_run(tmp_path, "a", steps(seed=1))
    make_run(tmp_path, "b", steps(seconds=2.0, seed=2), spec=method("qlora"))
    beside = make_run(tmp_path, "contended", steps(seconds=0.1, seed=3))
    summary = rundir.read_json(beside.summary) | {"contention": {"contended": True, "host_cpu_by_others": 0.8}}
    beside.summary.write_text(json.dumps(summary))
    make_run(tmp_path, "broken", steps(seconds=0.1, seed=4, loss=float("nan")), spec={"optimizations.compile": True})
    make_run(tmp_path, "lucky", steps(3, 0.1), spec=method("full"))
    make_run(tmp_path, "other", steps(seconds=0.1, seed=6), machine=gpu(MAX_Q, 300, 300))
    found = answer.sections(cells(tmp_path))[0]
    assert found.records[0]["recipe"] == "plain"
    assert found.records[0]["tokens_per_s"] == pytest.approx(8192, rel=0.01)
    assert found.left_out == {
        "contended": 1, "not finite": 1, "with fewer than 5 steady steps": 1, "on other machines": 1,
    }  # fmt: skip
    assert found.paragraphs[-1].startswith("Left out: 4 runs (")


def test_cells_of_one_recipe_get_unique_names(tmp_path):
    for rank in (8, 64):
        make_run(tmp_path, f"r{rank}", steps(seed=rank, peak_memory_gb=10.0 + rank), spec={"method.rank": rank})
    make_run(tmp_path, "repeat", steps(seed=9), spec={"method.rank": 8})
    assert [cell.name for cell in cells(tmp_path)] == ["plain (rank 64) at batch 4", "plain (rank 8) at batch 4"]
    assert len({row[1] for row in night(cells(tmp_path)).table.rows}) == 2


def test_other_differences_are_listed_once_without_the_length(tmp_path):
    length = {"dataset.name": "synthetic", "dataset.samples": 40, "train.max_steps": 10}
    make_run(tmp_path, "a", steps(seed=1), spec=length)
    longer = {"dataset.samples": 80, "train.max_steps": 20, "train.learning_rate": 1.0}
    make_run(tmp_path, "b", steps(seconds=2.0, seed=2), spec=method("full") | length | longer,
             applied={"dataset.order_hash": "another"})  # fmt: skip
    assert words(tmp_path).count("differ in") == words(tmp_path).count("They also differ in train.learning_rate.") == 1


def test_store_of_failures_has_no_answer(tmp_path):
    make_run(tmp_path, "a", steps(0), state=OOM)
    assert words(tmp_path) == "No run has a valid speed. Left out: 1 run out of memory."


def test_answer_of_the_committed_sweep():
    text = words(RESULTS / "qwen3-8b-frontier")
    assert text.startswith("plain at batch 7 is the fastest of 3 recipes"), "unsloth ran on another card"
    assert "unsloth 16-bit + checkpointing off + padded at batch 8 is the only recipe" in text


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["table", "json"])
def test_answers_in_every_format(tmp_path, ftbench, format):
    make_run(tmp_path, "a", steps(seed=1))
    make_run(tmp_path, "b", steps(1, seed=2), spec={"train.batch_size": 8}, state=OOM)
    code, out, err = ftbench("report", tmp_path, "--hours", "12", "--format", format)
    assert (code, err) == (0, "")
    for text in ("12 hours", "is the only recipe"):
        assert text.casefold() in out.casefold()
    if format == "json":
        document = json.loads(out)
        assert document["night"]["records"][0]["hours"] == 12
        assert len(document["runs"]) == 2


def test_recipe_is_not_compared_with_itself_over_more_samples(tmp_path):
    for samples in (40, 264):
        make_run(tmp_path, f"n{samples}", steps(seed=samples), spec={"dataset.samples": samples})
    first = report(Request([tmp_path], "html")).text
    assert "(samples 264)" in first, "rows have distinct names"
    assert "plain is the only recipe" in first.partition("<title>")[2].partition("</title>")[0]


def test_saved_weights_of_a_parity_check_are_not_another_recipe(tmp_path):
    make_run(tmp_path, "a", steps(30, 1.0, seed=1), spec={"measure.keep_weights": True})
    make_run(tmp_path, "b", steps(30, 1.0, seed=2), spec={"measure.keep_weights": False})
    assert "keep weights" not in words(tmp_path)


def test_without_plain_the_slowest_recipe_with_the_most_runs_is_the_baseline(tmp_path):
    for name, seconds, repeats in (("compile", 1.0, 2), ("fused_lora", 2.0, 2), ("packing", 3.0, 1)):
        for at in range(repeats):
            make_run(tmp_path, f"{name}-r{at + 1}", steps(30, seconds, seed=at), spec={f"optimizations.{name}": True})
    document = json.loads(report(Request([tmp_path], "json")).text)
    assert {record["baseline"] for record in document["answer"]["records"]} == {"lora with fused lora"}

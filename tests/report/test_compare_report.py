"""`ftbench report --compare`: pairs, differences, failed cells, and figures checked with pandas."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import statistics
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftbench.report.build import Request, report
from ftbench.report.compare import comparison
from ftbench.report.compare.pairs import compare
from ftbench.report.data import axes
from ftbench.report.data.collect import collect
from ftbench.report.data.groups import cells_of, merge_repeats, runs_of, with_axes
from ftbench.report.formats import cell, csv_text
from ftbench.spec.load import FOLDER, recipe
from ftbench.store import rundir
from ftbench.store.rundir import RunDir
from made_runs import MAX_Q, OOM, RESULTS, gpu, make_run, method, steps


def compared(out, axis, baseline=None, **options):
    return compare(runs_of(collect([out])), axis, baseline, **options)


def only(found):
    (pair,) = found.pairs
    return pair


# --- pairs -----------------------------------------------------------------------------------------------------------


def test_same_recipe_on_two_gpus(tmp_path):
    make_run(tmp_path, "a", steps(seconds=1.0, seed=1))
    make_run(tmp_path, "b", steps(seconds=2.0, first=6.0, seed=2), machine=gpu(MAX_Q, 300, 300))
    pair = only(compared(tmp_path, "gpu", "H200"))
    assert not pair.differences
    assert pair.speed.direction == "lower"
    assert pair.speed.value == pytest.approx(0.5, rel=0.01)
    assert pair.break_even.when == "never"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"spec": {"train.learning_rate": 1e-3}}, "train.learning_rate: 0.0002 → 0.001"),
        ({"machine": {"versions.torch": "2.12.0"}}, "versions.torch: 2.11.0 → 2.12.0"),
        ({"machine": {"gpu.driver": "575.1"}}, "driver: 580.159.04 → 575.1"),
        ({"machine": {"gpu.power_limit_w": 500.0}}, "power limit: 700 W of 700 W → 500 W of 700 W"),
        ({"machine": {"ftbench.commit": "f" * 40}}, "commit: 52c6a3c2ec8b → ffffffffffff"),
        ({"machine": {"environment.PYTORCH_CUDA_ALLOC_CONF": "x"}},
         "environment.PYTORCH_CUDA_ALLOC_CONF: unknown → x"),
        ({"applied": {"dataset.hash": "1" * 64}}, "dataset.hash: 596f31aeda2e → 111111111111"),
        ({"applied": {"model.attention": "eager"}}, "applied.attention: sdpa → eager"),
    ],
)  # fmt: skip
def test_differences_are_listed(tmp_path, changes, told):
    make_run(tmp_path, "a")
    machine = changes.get("machine", {})
    make_run(tmp_path, "b", **changes | {"machine": {"gpu.name": MAX_Q} | machine})
    pair = only(compared(tmp_path, "gpu", "H200"))
    assert [str(one) for one in pair.differences] == [told]
    assert pair.differences
    assert pair.speed is not None


def test_method_specific_options_belong_to_the_axis(tmp_path):
    make_run(tmp_path, "a")
    make_run(tmp_path, "b", spec=method("qlora"))
    assert only(compared(tmp_path, "method", "lora")).differences == ()
    make_run(tmp_path, "c", spec=method("qlora") | {"method.rank": 16})
    pairs = {p.cell.facts["method.rank"]: p for p in compared(tmp_path, "method", "lora").pairs}
    assert [one.key for one in pairs["16"].differences] == ["method.rank"]


def test_older_unsloth_runs_were_padded(tmp_path):
    """Before `method.padded` existed, only packing and padding_free removed the padding."""
    for name, spec in {"old": {}, "free": {"optimizations.packing": True}, "new": {"method.padded": False}}.items():
        make_run(tmp_path, name, spec=method("unsloth") | spec)
    padded = {cell.runs[0].run_id: cell.facts["method.padded"] for cell in cells_of(runs_of(collect([tmp_path])))}
    assert padded == {"old": "on", "free": "off", "new": "off"}


def test_missing_key_equals_its_default(tmp_path):
    make_run(tmp_path, "a", spec={"dataset.longest_first": ..., "launch": {"framework": "trl"}})
    make_run(tmp_path, "b", spec={"dataset.longest_first": False}, machine={"gpu.name": MAX_Q})
    assert only(compared(tmp_path, "gpu", "H200")).differences == ()


def test_removed_keys_that_were_off_are_no_difference(tmp_path):
    older = {"method.offload_layers": 0, "method.load_in_fp8": False, "method.bias": "none"}
    make_run(tmp_path, "a", spec=method("unsloth") | older)
    make_run(tmp_path, "b", spec=method("unsloth") | {"method.offload_layers": 2})
    make_run(tmp_path, "c", spec=method("unsloth"), machine={"gpu.name": MAX_Q})
    pair = only(compared(tmp_path, "gpu", "H200"))
    assert (pair.differences, pair.baseline.runs[0].run_id) == ((), "a")


def test_pairs_agree_in_other_varying_keys(tmp_path):
    for batch in (2, 4):
        for name in ("lora", "full"):
            make_run(
                tmp_path, f"{name}{batch}", steps(seed=(name, batch)), spec=method(name) | {"train.batch_size": batch}
            )
    found = compared(tmp_path, "method", "full")
    assert all(pair.baseline.facts["train.batch_size"] == pair.cell.facts["train.batch_size"] for pair in found.pairs)
    make_run(tmp_path, "lora8", spec={"train.batch_size": 8})
    alone = [pair for pair in compared(tmp_path, "method", "full").pairs if pair.baseline is None]
    assert [pair.reason for pair in alone] == ["no baseline with train.batch_size 8"]


def test_models_and_data_are_not_paired(tmp_path):
    make_run(tmp_path, "a")
    make_run(tmp_path, "b", machine={"gpu.name": MAX_Q}, spec={"model.id": "Qwen/Qwen3-32B"})
    assert only(compared(tmp_path, "gpu", "H200")).baseline is None
    assert only(compared(tmp_path, "gpu", "h200 sxm")).baseline is None  # the name in the tables


def test_speeds_at_different_image_sizes_are_in_samples(tmp_path):
    make_run(tmp_path, "a", steps(seconds=1.0))
    smaller = {"spec": {"optimizations.image_size": 336}, "applied": {"dataset.tokens.mean": 1024.0}}
    make_run(tmp_path, "b", steps(seconds=0.52, real_tokens=4096), **smaller)  # 4 samples per step, as in a
    pair = only(compared(tmp_path, "optimization", "none"))
    assert pair.speed.value == pytest.approx(1 / 0.52, rel=0.01)
    assert pair.speed.direction == "higher"


def test_speeds_of_models_with_images_are_in_samples(tmp_path):
    """The second model has a tenth of the tokens per image, and trains twice as many samples per second."""
    make_run(tmp_path, "a", steps(seconds=1.0, images=4, tiles=4))
    make_run(tmp_path, "b", steps(seconds=0.5, images=4, tiles=4, real_tokens=819),
             spec={"model.id": "Qwen/Qwen3-VL-8B-Instruct"}, applied={"dataset.tokens.mean": 204.8})  # fmt: skip
    (pair,) = compared(tmp_path, "model", "Qwen/Qwen3-8B").pairs
    assert pair.speed.value == pytest.approx(2, rel=0.01)
    assert pair.speed.direction == "higher"


# --- repeats ---------------------------------------------------------------------------------------------------------


def test_interval_of_repeats_comes_from_their_spread(tmp_path):
    for i in range(3):
        make_run(tmp_path, f"a{i}", steps(seconds=1 + 0.002 * i, seed=i))
        make_run(tmp_path, f"b{i}", steps(seconds=1.1 + 0.002 * i, seed=i), spec=method("full"))
    pair = only(compared(tmp_path, "method", "lora"))
    assert (pair.speed.basis, pair.speed.runs, pair.speed.verdict) == ("runs", (3, 3), "lower")


def test_few_steps_have_a_ratio_without_interval(tmp_path):
    make_run(tmp_path, "a", steps(5))
    make_run(tmp_path, "b", steps(5, 2.0), spec=method("full"))
    found = compared(tmp_path, "method", "lora")
    assert (only(found).speed.verdict, only(found).break_even) == ("unknown", None)
    assert " ?" in str(comparison.section(found).table.rows)


def test_a_missing_steps_csv_explains_the_missing_interval(tmp_path):
    make_run(tmp_path, "a", steps(seed=1))
    make_run(tmp_path, "b", steps(seconds=1.2, seed=2), spec=method("full")).steps.unlink()
    pair = only(compared(tmp_path, "method", "lora"))
    assert pair.speed.low is None
    assert pair.reason == "there is no interval, because steps.csv of a run is missing or damaged"


def test_failed_repeat_is_counted_but_not_averaged(tmp_path):
    make_run(tmp_path, "a0", steps(seed=1))
    make_run(tmp_path, "a1", steps(1, seed=1), state=OOM)
    make_run(tmp_path, "b", steps(seconds=2.0, seed=1), spec=method("full"))
    found = compared(tmp_path, "method", "full")
    assert only(found).cell.state.startswith("1 of 2 ok; oom")
    assert only(found).speed.value == pytest.approx(2, rel=0.01)


def test_merged_repeats_are_one_row(tmp_path, ftbench):
    for i in range(3):
        make_run(tmp_path, f"a{i}", steps(seconds=1 + 0.1 * i, seed=i), state=OOM if i == 2 else None)
    records = collect([tmp_path])
    merged = merge_repeats(runs_of(records))[0].record
    good = [record["tokens_per_s.real"] for record in records if record["state"] == "ok"]
    assert merged["runs"] == "2 of 3"
    assert merged["tokens_per_s.real"] == pytest.approx(statistics.geometric_mean(good))
    code, out, _ = ftbench("report", tmp_path, "--rows", "merge")
    assert (code, [line.split()[0] for line in out.splitlines() if "plain at batch 4" in line]) == (0, ["1"])


# --- failures in place -----------------------------------------------------------------------------------------------


def test_failed_cell_keeps_its_row_and_reason(tmp_path):
    make_run(tmp_path, "a", steps(seed=1))
    make_run(tmp_path, "b", steps(1), spec=method("full"), state=OOM)
    pair = only(compared(tmp_path, "method", "lora"))
    assert (pair.speed, pair.memory) == (None, None)
    shown = comparison.section(compared(tmp_path, "method", "lora")).table
    assert "oom" in dict(zip(shown.headings, shown.rows[1], strict=True))["state"]
    other = only(compared(tmp_path, "method", "full"))
    assert other.reason == "the baseline failed"


PARTS = ["spec_json", "machine", "applied", "phases", "state", "summary", "steps"]


@pytest.mark.parametrize("format", ["table", "json"])
def test_any_file_may_be_missing_or_malformed(tmp_path, ftbench, format):
    make_run(tmp_path, "a", steps(seed=1))
    make_run(tmp_path, "b", steps(seconds=1.2, seed=2), spec=method("full"))
    for part in PARTS:
        broken = make_run(tmp_path, f"without-{part}", spec=method("qlora"))
        if part != "state":  # marks a run directory
            getattr(broken, part).unlink()
        if part not in ("phases", "state", "steps"):
            broken = make_run(tmp_path, f"broken-{part}", spec=method("qlora"))
            getattr(broken, part).write_text('{"gpu": [], "model": 3, "train": null}')
    code, out, err = ftbench(
        "report", tmp_path, "--compare", "method", "--baseline", "lora", "--answers", "--format", format
    )
    assert (code, err) == (0, "")
    assert "lora" in out


def test_killed_run_with_a_torn_line_is_compared(tmp_path):
    make_run(tmp_path, "a", steps(seed=1))
    killed = make_run(tmp_path, "b", steps(seed=2), spec=method("full"))
    with killed.steps.open("a") as file:
        file.write("31,0.5")
    killed.summary.unlink()
    assert only(compared(tmp_path, "method", "lora")).speed is not None


@pytest.mark.parametrize("column", ["loss", "grad_norm"])
def test_nan_is_a_failure(tmp_path, column):
    make_run(tmp_path, "a", steps(seed=1, grad_norm=1.0))
    rows = steps(seed=2, **{"grad_norm": 1.0, column: lambda step: float("nan") if step > 1 else 2.0})
    make_run(tmp_path, "b", rows, spec={"optimizations.compile": True})
    pair = only(compared(tmp_path, "optimization"))
    assert pair.cell.state.startswith("not finite: ")
    assert pair.speed is None


def test_recipes_are_compared_with_plain(tmp_path):
    def keys(name):
        found = recipe(name, FOLDER)
        return {f"{part}.{key}": value for part in found for key, value in found[part].items()}

    make_run(tmp_path, "a", steps(seed=1), spec=keys("plain"))
    make_run(tmp_path, "b", steps(seconds=0.5, seed=2), spec=keys("fastest") | {"optimizations.fp8": "off"})
    make_run(tmp_path, "c", steps(seed=3), spec=keys("plain") | {"optimizations.liger": True})
    small = method("qlora")["method"] | {"upcast": False}
    make_run(tmp_path, "d", steps(seed=4), spec={"method": small} | keys("smallest"))
    found = compared(tmp_path, "recipe")
    assert found.baseline == "plain"
    assert sorted(found.value(cell) for cell in found.cells) == ["fastest", "liger", "plain", "smallest"]
    assert all(pair.speed and not pair.differences for pair in found.pairs), [pair.differences for pair in found.pairs]
    assert comparison.section(found).title == "Compared by recipe"


def test_baseline_with_the_same_graph_is_preferred(tmp_path):
    for name in ("fastest", "fastest-fp8"):
        found = recipe(name, FOLDER)
        for graph in (True, False):
            on = found["optimizations"] | {"cuda_graph": graph, "triton_kernels": True}
            spec = {f"optimizations.{key}": value for key, value in on.items()}
            spec |= {f"train.{key}": value for key, value in found["train"].items()}
            make_run(tmp_path, f"{name}-{graph}", spec=spec)
    pairs = compared(tmp_path, "recipe", "fastest").pairs
    sides = [(pair.baseline.facts, pair.cell.facts) for pair in pairs]
    assert sorted([facts["optimizations.cuda_graph"] for facts in each] for each in sides) == [["off"] * 2, ["on"] * 2]


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--compare", "metod"], "did you mean method?"),
        (["--compare", "model"], "nothing to compare: these keys vary: method.name"),
        (["--compare", "method", "--baseline", "H100"], "--baseline H100: not one of full, lora"),
        (["--compare", "method", "--baseline", "l"], "matches full, lora: write the full value"),
        (["--baseline", "lora"], "needs an axis"),
        (["--fail-above", "5%"], "--fail-above needs --against"),
    ],
)  # fmt: skip
def test_invalid_options_are_errors(tmp_path, ftbench, arguments, said):
    make_run(tmp_path, "a")
    make_run(tmp_path, "b", spec=method("full"))
    code, out, err = ftbench("report", tmp_path, *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert "Traceback" not in err


def test_any_spec_key_or_machine_fact_is_an_axis(tmp_path):
    make_run(tmp_path, "a", steps(seed=1))
    make_run(
        tmp_path, "b", steps(seconds=1.5, seed=2),
        machine={"gpu.name": MAX_Q, "versions.torch": "2.12.0", "ftbench.commit": "e" * 40, "gpu.driver": "1"},
        spec={"train.batch_size": 8, "launch.framework": "axolotl", "train.learning_rate": 1.0},
    )  # fmt: skip
    for axis in ("gpu", "batch", "framework", "train.learning_rate", "versions.torch", "commit", "driver"):
        assert len(compared(tmp_path, axis).pairs) == 1, axis


def test_a_release_is_compared_if_there_is_no_commit(tmp_path):
    for number, version in enumerate(["0.1.0", "0.2.0"]):
        machine = {"ftbench.commit": None, "ftbench.version": version}
        make_run(tmp_path, f"run-{number}", steps(seed=number), machine=machine)
    (pair,) = compared(tmp_path, "commit").pairs
    assert pair.baseline is not None
    assert [pair.cell.facts["commit"], pair.baseline.facts["commit"]] == ["release 0.2.0", "release 0.1.0"]


# Files of LoRA runs at batch 2 on a tiny model: axolotl 0.19.0, LLaMA-Factory 0.9.5 and trl.
OURS = {
    "trained_dtype": "float32",
    "model.weights_gb_by_dtype": {"bfloat16": 15.3, "float32": 0.08},
    "loss_normalisation": "label tokens of the step",
    "loss": "chunked_nll",
    "padding": "to the longest of a batch",
    "gradient_checkpointing": 0.0,
    "optimizer": {"class": "torch.optim.adamw.AdamW", "state": {"exp_avg: float32": 28, "exp_avg_sq: float32": 28}},
}
AXOLOTL = {"loss": "axolotl.core.trainers.base.AxolotlTrainer", "loss_normalisation": "label tokens of a micro-batch"}
LLAMA_FACTORY = {"loss": "llamafactory.train.sft.trainer.CustomSeq2SeqTrainer", "padding": "to a multiple of 8"}
OTHERS = {"trained_dtype": "bfloat16", "model.weights_gb_by_dtype": {"float32": 4.6, "uint8": 3.2, "bfloat16": 0.04},
          "parameters.trainable": 3, "model.attention": "eager",
          "optimizer": {"class": "torch.optim.adamw.AdamW", "state": {"exp_avg: bfloat16": 28}},
          "dataset.order_hash": "f" * 64}  # fmt: skip


def test_framework_comparison_lists_different_work(tmp_path, ftbench):
    torch = rundir.read_json(make_run(tmp_path, "a", steps(seed=1), applied=OURS).machine)["versions"]["torch"]
    for name, more in {"axolotl": AXOLOTL, "llamafactory": LLAMA_FACTORY, "ms-swift": OTHERS}.items():
        own = {"versions.transformers": f"of {name}", "versions.torch": "2.9.0" if name == "ms-swift" else torch}
        make_run(tmp_path, name, steps(seed=name), spec={"launch.framework": name}, machine=own, applied=OURS | more)
    document = json.loads(ftbench("report", tmp_path, "--compare", "framework", "--format", "json")[1])
    told = {row["value"]: row["differences"] for row in document["comparison"]["records"]}
    assert told["trl"] is None
    assert told["axolotl"] == ("applied.loss_normalisation: label tokens of the step → label tokens of a micro-batch")
    assert told["llamafactory"] == "applied.padding: to the longest of a batch → to a multiple of 8"
    for said in (
        "applied.trained_dtype: float32 → bfloat16", "applied.weights_dtype: bfloat16 → float32, uint8",
        "applied.attention: sdpa → eager", "applied.trainable: ",
        "applied.optimizer_state: exp_avg: float32, exp_avg_sq: float32 → exp_avg: bfloat16", "dataset.order_hash: ",
        "versions.torch: ",
    ):  # fmt: skip
        assert said in told["ms-swift"]
    assert "versions.transformers" not in told["ms-swift"]


@pytest.fixture
def of_frameworks(tmp_path):
    """Make runs of two methods with trl and axolotl, plain and best settings, and QLoRA of trl in another dtype."""
    work = {"lora": {"dtype": "float32", "seconds": {"trl": 0.101, "plain": 0.1, "best": 0.07}},
            "qlora": {"dtype": "bfloat16", "seconds": {"trl": 0.15, "plain": 0.1, "best": 0.08}}}  # fmt: skip
    for number, (name, each) in enumerate(work.items()):
        for which, seconds in each["seconds"].items():
            trl = which == "trl"
            launch = {} if trl else {"launch.framework": "axolotl", "launch.settings": which}
            applied = OURS | {"trained_dtype": each["dtype"] if trl else "float32"}
            make_run(
                tmp_path, f"{name}-{which}", steps(seconds=seconds, seed=number), spec=method(name) | launch,
                machine={} if trl else {"versions.transformers": "4.0.0"}, applied=applied,
            )  # fmt: skip
    return tmp_path


def test_trl_is_named_only_next_to_another_framework(of_frameworks):
    make_run(of_frameworks, "packed", steps(seed=9), spec={"optimizations.packing": True})
    cells = cells_of(runs_of(collect([of_frameworks])))
    assert {cell.variant for cell in cells} == {
        "trl plain", "axolotl plain", "axolotl's best lora", "trl plain qlora", "axolotl plain qlora",
        "axolotl's best qlora",
        "lora with packing",
    }  # fmt: skip


def test_imported_log_counts_for_no_framework(tmp_path, ftbench):
    make_run(tmp_path, "ours", steps(seed=1), spec={"launch.framework": "axolotl"})
    run = make_run(tmp_path, "imported", steps(seconds=0.5, seed=2))
    spec = rundir.read_json(run.spec_json)
    rundir.write_json(run.spec_json, {name: part for name, part in spec.items() if name != "launch"} | {"imported": {}})
    assert "Framework for" not in ftbench("report", tmp_path, "--answers")[1]


def test_framework_libraries_are_one_note(of_frameworks, ftbench):
    out = " ".join(ftbench("report", of_frameworks, "--compare", "framework")[1].split())
    assert out.count("transformers 4.0.0") == 1
    assert "note: separate libraries: trl has transformers " in out
    assert "versions.transformers" not in out
    assert "also differs: launch." not in out
    assert "axolotl's best lora at batch" in out
    assert "(framework" not in out
    assert re.search(r"baseline trl: \d+ rows, each above the rows compared with it · model", out)


def test_narrow_comparison_names_the_rows_of_notes_and_baseline(ftbench, monkeypatch):
    """The column with the note numbers is hidden, and no row is named `plain`."""
    monkeypatch.setenv("COLUMNS", "60")
    out = " ".join(ftbench("report", RESULTS / "headline/full", "--compare", "recipe")[1].split())
    assert "more columns: use --wide" in out
    assert "baseline plain (#3) · " in out
    assert re.search(r"\(1\) #\d+ differs: dataset.samples: 184 → \d+", out)


def test_baseline_row_shows_its_speed(of_frameworks, ftbench):
    out = ftbench("report", of_frameworks, "--compare", "framework")[1]
    rows = [line for line in out.splitlines() if re.match(r" *\d+  trl ", line)]
    assert len(rows) == 2
    assert all(re.search(r"  [\d,]+ tokens/s  ", row) for row in rows)


def test_joint_differences_are_one_note(of_frameworks, ftbench):
    out = " ".join(ftbench("report", of_frameworks, "--compare", "framework")[1].split())
    notes = re.findall(r"note: \((\d)\) #[^:]* differs?: (.*?)(?= note:)", out)
    assert notes == [("1", "launch.settings: plain → best"), ("2", "applied.trained_dtype: bfloat16 → float32")]
    assert re.search(r"axolotl's best qlora .*? \(1, 2\)", out)


def test_repeats_in_two_folders_are_named_by_folder(tmp_path, ftbench):
    for seed, folder in enumerate(("first", "second")):
        make_run(tmp_path / folder, "a-r1", steps(seed=seed)).path.parent.rename(tmp_path / f"{folder}-gpu")
    out = ftbench("report", tmp_path)[1]
    assert "(first-gpu/r1)" in out
    assert "(second-gpu/r1)" in out


def test_facts_missing_in_older_runs_are_not_differences(tmp_path):
    make_run(tmp_path, "a", steps(seed=1))
    make_run(tmp_path, "b", steps(seed=2), machine=gpu(MAX_Q, 300, 300), applied={"padding": "to a multiple of 8"})
    assert only(compared(tmp_path, "gpu", "H200")).differences == ()


def test_comparison_in_every_format(tmp_path, ftbench):
    make_run(tmp_path, "a", steps(seed=1))
    make_run(tmp_path, "b", steps(seconds=2.0, seed=2), spec=method("full"))
    call = ["report", tmp_path, "--compare", "method", "--baseline", "lora", "--format"]
    document = json.loads(ftbench(*call, "json")[1])
    rows = document["comparison"]["records"]
    assert [row["value"] for row in rows] == ["lora", "full"]
    assert rows[0]["speed_ratio"] is None
    assert rows[1]["speed_low"] < rows[1]["speed_ratio"] < rows[1]["speed_high"]
    assert rows[1]["same_recipe"] is True
    listed = list(csv.DictReader(io.StringIO(ftbench(*call, "csv")[1])))
    assert float(listed[1]["speed_ratio"]) == pytest.approx(rows[1]["speed_ratio"])
    assert listed[0]["speed_ratio"] == ""
    markdown = ftbench(*call, "md")[1]
    assert len({line.count("|") for line in markdown.splitlines() if line.startswith("|")}) == 1
    for text in (markdown, ftbench(*call, "table")[1]):
        assert "-50." in text or "-49." in text
        assert "same" in text


_PIECES = st.sampled_from(["=", "-", "\r", "\n", ",", '"', " ", "\t", "a", "1", "|", "'", ";"])


@settings(max_examples=30)
@given(st.lists(st.dictionaries(st.text(_PIECES, min_size=1, max_size=6), st.text(_PIECES, max_size=8)), min_size=1))
def test_a_csv_reader_gets_the_same_cells(records):
    names = list(dict.fromkeys(name for record in records for name in record))
    lines = list(csv.reader(io.StringIO(csv_text(records), newline="")))
    assert lines == [names, *([record.get(name, "") for name in names] for record in records)]


def test_markdown_cells_are_escaped():
    assert cell("![x](http://a.test) <b>\x1b[31m|") == "!\\[x](http://a.test) &lt;b>\\[31m\\|"


def test_output_files_contain_no_control_characters(tmp_path, ftbench):
    make_run(tmp_path / "runs", "a", state={"state": "error", "reason": "a\x1b[2Jb\x9bc"})
    for format in ("md", "csv", "json", "table", "html"):
        assert ftbench("report", tmp_path / "runs", "--format", format, "-o", tmp_path / format)[:2] == (0, "")
        assert not {"\x1b", "\x9b"} & {*(tmp_path / format).read_text()}, format


# --- the plain table -------------------------------------------------------------------------------------------------


def test_table_gets_columns_for_varying_keys(tmp_path):
    make_run(tmp_path, "a", spec={"train.seed": 1, "train.learning_rate": 1e-4})
    make_run(tmp_path, "b", spec={"train.seed": 2, "dataset.seed": 7})
    _, keys = with_axes(runs_of(collect([tmp_path])))
    assert keys == ["spec.train.learning_rate", "spec.dataset.seed", "spec.train.seed"]
    assert axes.headings(keys) == ["learning rate", "dataset.seed", "train.seed"]


def test_thousands_of_axes_are_limited(tmp_path, ftbench):
    for value in (1, 2):
        make_run(tmp_path, f"r{value}", spec={f"future.key{i}": value for i in range(2000)})
    code, out, _ = ftbench("report", tmp_path)
    assert code == 0
    assert "1990 more keys vary" in out
    assert len(out.splitlines()[1]) < 400


# --- the figures, by another route -----------------------------------------------------------------------------------


def by_pandas(run: RunDir) -> dict[str, float]:
    """Return a run's figures computed from steps.csv, with warm-up and mean length from the summary."""
    frame = pd.read_csv(run.steps)
    frame = frame[frame.phase == "train"]
    steady = frame.iloc[rundir.read_json(run.summary)["steps"]["warmup"] :]
    window = steady.step_time_s.sum()
    length = rundir.read_json(run.summary)["dataset"]["tokens"]["mean"]
    return {
        "tokens_per_s.real": steady.real_tokens.sum() / window,
        "samples_per_hour": steady.real_tokens.sum() / length / window * 3600,
        "memory_gb.allocated_peak": frame.peak_memory_gb.max(),
        "first_step_s": frame.step_time_s.iloc[0],
        "energy.joules_per_1k_samples": steady.energy_j.sum() / (steady.real_tokens.sum() / length) * 1000,
    }


RATIOS = ("tokens_per_s.real", "memory_gb.allocated_peak", "first_step_s", "energy.joules_per_1k_samples")


def check_against_pandas(folder) -> int:
    found = compared(folder, "method", "lora")
    records = {record["run_ids"]: record for record in comparison.section(found).records}
    runs = {run.run_id: by_pandas(run) for run in rundir.find_runs(folder) if rundir.read_state(run)["state"] == "ok"}
    checked = 0
    for ids, record in records.items():
        own = pd.DataFrame([runs[name] for name in ids.split() if name in runs])
        for name in own.columns:
            if name == "first_step_s":  # one figure for each state of the compiler's cache
                continue
            assert record[name] == pytest.approx(np.exp(np.log(own[name]).mean())), (ids, name)
            checked += 1
        if record["speed_ratio"] is not None:
            base = pd.DataFrame([runs[name] for name in record["baseline_run_ids"].split() if name in runs])
            names = dict(zip(("speed", "memory", "first_step", "energy"), RATIOS, strict=True))
            for ratio, name in names.items():
                computed = np.exp(np.log(own[name]).mean() - np.log(base[name]).mean())
                assert record[f"{ratio}_ratio"] == pytest.approx(computed), (ids, ratio)
                checked += 1
    return checked


@pytest.mark.parametrize("folder", ["plain", "qwen3-8b-frontier"])
def test_figures_of_committed_runs_match_pandas(tmp_path, folder):
    shutil.copytree(RESULTS / folder, tmp_path / folder)
    assert check_against_pandas(tmp_path / folder) > 10


@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.sampled_from(["lora", "qlora", "full"]), st.sampled_from([2, 4]), st.floats(0.01, 50),
                  st.integers(2, 25), st.integers(0, 99)),
        min_size=2, max_size=6,
    )
)  # fmt: skip
def test_figures_of_made_runs_match_pandas(tmp_path_factory, made):
    out = tmp_path_factory.mktemp("made")
    make_run(out, "base", spec={"train.batch_size": 2})
    make_run(out, "other", spec=method("full") | {"train.batch_size": 2})
    for number, (name, batch, seconds, count, seed) in enumerate(made):
        rows = steps(count, seconds, first=3 * seconds, noise=0.1, seed=seed, samples=batch,
                     real_tokens=lambda step, seed=seed: 1000 + (seed * step) % 700)  # fmt: skip
        make_run(out, f"r{number}", rows, spec=method(name) | {"train.batch_size": batch})
    assert check_against_pandas(out / "made") > 10


def test_unsloth_is_a_separate_recipe():
    found = json.loads(report(Request([Path("results/h200/recipes/full")], "json", compare="recipe")).text)
    rows = {row["value"]: row for row in found["comparison"]["records"]}
    assert {"plain", "fastest", "small", "unsloth 16-bit + padded", "unsloth 4-bit + padded"} <= set(rows)
    assert rows["unsloth 16-bit + padded"]["baseline_run_ids"] == rows["plain"]["run_ids"]


@pytest.mark.parametrize(
    ("key", "value", "other"),
    [("machine", {"gpu.power_limit_w": 350.0}, {}), ("applied", {"dataset.hash": "1"}, {"dataset.hash": "2"})],
)
def test_baseline_with_the_same_power_limit_and_tokens_is_preferred(tmp_path, key, value, other):
    make_run(tmp_path, "a", steps(seconds=2.0, seed=1), **{key: value})
    make_run(tmp_path, "b", steps(seed=2), **{key: other})
    make_run(tmp_path, "c", steps(seconds=1.1, seed=3), spec=method("qlora"), **{key: other})
    (pair,) = compare(runs_of(collect([tmp_path])), "method", "lora").pairs
    assert pair.baseline.runs[0].run_id == "b"


def test_ratio_of_first_steps_fits_the_seconds_that_are_shown():
    from types import SimpleNamespace

    from ftbench.core.compare import ratio_of_runs
    from ftbench.report.compare.words import first_step_of

    sides = [SimpleNamespace(first_steps=lambda values=values: {"warm": values})
             for values in ([16.6, 6.6, 6.7], [16.3, 8.0, 7.4])]  # fmt: skip
    seconds = [first_step_of(side)["first_step_s_warm"] for side in sides]
    ratio = ratio_of_runs(*(side.first_steps()["warm"] for side in sides))
    assert seconds[1] / seconds[0] == pytest.approx(ratio.value)


def test_compared_key_keeps_its_column_beside_a_key_with_the_same_end(ftbench, tmp_path):
    seeds = [(1, 7), (2, 7), (1, 8), (2, 8)]
    for number, (train, data) in enumerate(seeds):
        make_run(tmp_path, f"r{number}", steps(seed=number), spec={"train.seed": train, "dataset.seed": data})
    out = ftbench("report", tmp_path, "--compare", "train.seed")[1]
    heading = next(line for line in out.splitlines() if line.startswith("#"))
    assert {"train.seed", "dataset.seed"} <= set(heading.split())


def test_unknown_is_no_baseline(ftbench, tmp_path):
    make_run(tmp_path, "a", steps(seed=1))
    make_run(tmp_path, "b", steps(seed=2), spec={"method.rank": 64})
    make_run(tmp_path, "c", steps(seed=3), spec={"method": {"name": "full"}})
    code, _, err = ftbench("report", tmp_path, "--compare", "method.rank", "--baseline", "unknown")
    assert (code, "not one of 8, 64" in err) == (2, True)

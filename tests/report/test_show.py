"""`ftbench show`: the card of a run, and suggestions by its bottleneck."""

from __future__ import annotations

import json
import re
import shlex
import shutil

import pytest
from rich.cells import cell_len

from ftbench.report.data.groups import row_names
from ftbench.spec.experiment import Experiment
from ftbench.spec.load import load
from ftbench.spec.methods import METHODS
from ftbench.store import rundir
from made_runs import OOM, RESULTS, make_run, method, steps

IDLE, WAITING = {"gpu_busy": 0.4}, {"gpu_busy": 0.5, "data_time_s": 0.3}


def suggestions(ftbench, *arguments):
    """Return the suggestions for a run and its bottleneck."""
    code, out, _ = ftbench("show", *arguments, "--json")
    document = json.loads(out)
    assert code == 0
    return document["what_to_try"], (document["summary"]["bound"] or {}).get("verdict")


def changed(suggestion):
    """Return the spec that a suggested command trains."""
    program, command, path, *options, out, results = shlex.split(suggestion["command"])
    assert (program, command, out, results) == ("ftbench", "run", "--out", str(rundir.Path(path).parents[2]))
    return load(rundir.Path(path), options[1::2])


def test_data_bound_run_suggests_loading_options(ftbench, tmp_path):
    found, bound = suggestions(ftbench, make_run(tmp_path, "a", steps(**WAITING)).path)
    assert bound == "data-bound"
    assert ["optimizations.loader_processes=on"] in [each["sets"] for each in found]
    assert all(changed(each) for each in found[:-1])


@pytest.mark.parametrize("graphed", [False, True])
def test_out_of_memory_suggests_half_the_batch_and_checkpointing(ftbench, tmp_path, graphed):
    needed = ("cuda_graph", "packing", "fixed_shape", "chunked_loss")
    spec = {f"optimizations.{name}": True for name in needed if graphed}
    run = make_run(tmp_path, "a", steps(1), state=OOM, spec=spec)
    found, _ = suggestions(ftbench, run.path)
    launched = ["optimizations.cuda_graph=off"] * graphed
    assert [each["sets"] for each in found] == [
        ["train.batch_size=2", "train.gradient_accumulation_steps=2", *launched],
        ["optimizations.gradient_checkpointing=on", *launched], [],
    ]  # fmt: skip
    assert changed(found[0]).global_batch == load(run.spec_json).global_batch


@pytest.mark.parametrize(
    ("rows", "verdict", "command"),
    [(IDLE, "launch-bound: the GPU worked 40 %", "run SPEC --set optimizations.compile=on"),
     ({"gpu_busy": 0.99, "tensor_busy": 0.2, "memory_busy": 0.6}, "memory-bound: ", "recommend SPEC --gpu 'H200 SXM'"),
     (WAITING, "data-bound: ", "run SPEC --set optimizations.loader_processes=on"),
     ({"padded_tokens": 16384}, "the bottleneck is unknown", "run SPEC --set optimizations.packing=on"),
     ({"host_cpu_by_others": 0.9}, "no valid speed: other processes used the machine", "run SPEC"),
     ({"loss": float("nan")}, "not finite: ", "run SPEC --set train.learning_rate=0.0001"),
     ({"machine": {"gpu": None}}, "limited by the CPU's arithmetic", "estimate SPEC --gpu 'RTX 4090'")],
)  # fmt: skip
def test_show_ends_in_a_verdict_and_one_thing_to_try(ftbench, tmp_path, rows, verdict, command):
    machine = rows.pop("machine", None)
    run = make_run(tmp_path, "a", steps(**rows), machine=machine)
    shown = ftbench("show", run.path, "--wide")[1]
    *said, _, tried = shown[shown.index("\nverdict: ") + 1 :].splitlines()
    assert said[0].startswith(f"verdict: {verdict}")
    assert len(said) <= 2
    out = f" --out {run.path.parents[1]}" * command.startswith("run")  # repeats of a run are in one folder of results
    assert tried.strip() == f"ftbench {command.replace('SPEC', str(run.spec_json))}{out}"


def test_show_ranks_a_run_among_comparable_ones(ftbench, tmp_path):
    make_run(tmp_path, "a", steps(seed=1))
    make_run(tmp_path, "b", steps(seconds=0.5, seed=2), spec=method("full"))
    slow = make_run(tmp_path, "c", steps(seconds=9.0, seed=3, host_cpu_by_others=0.9), spec=method("qlora"))
    ranks = [line for name in "abc" for line in ftbench("show", name, tmp_path, "--wide")[1].splitlines()
             if line.startswith("rank: ")]  # fmt: skip
    assert ranks[0].startswith("rank:    plain is number 2 of 2 comparable recipes; plain full is likely 2.0")
    assert ranks[1] == "rank:    plain full is the fastest of 2 comparable recipes"
    assert ranks[2] == "rank:    left out of comparisons: contended"
    assert slow.run_id == "c"


def test_a_run_that_shared_the_gpu_is_repeated_without_sharing(ftbench, tmp_path):
    run = make_run(tmp_path, "a", steps(host_cpu_by_others=0.9), spec={"measure.share_gpu": True})
    (again,), _ = suggestions(ftbench, run.path)
    assert again["sets"] == ["measure.share_gpu=off"]
    assert " --set measure.share_gpu=off " in again["command"]


@pytest.mark.parametrize(
    "change",
    [{"spec": {"launch.mock": "ok"}}, {"spec": {"model": 3}}, {"spec": {"measure.control": "learning_rate_0"}}],
)
def test_mocks_controls_and_unreadable_specs_have_no_suggestions(ftbench, tmp_path, change):
    run = make_run(tmp_path, "a", steps(**WAITING), **change)
    assert suggestions(ftbench, run.path)[0] == []


@pytest.mark.parametrize(
    ("objective", "has_formula"), [({"name": "sft"}, True), ({"name": "grpo", "num_generations": 4}, False)]
)
def test_a_run_without_formulas_gets_no_suggestion_to_estimate(ftbench, tmp_path, objective, has_formula):
    run = make_run(tmp_path, "a", spec={"objective": objective, "dataset.loss_on": "completion"})
    commands = [each["command"] for each in suggestions(ftbench, run.path)[0]]
    assert any(each.startswith("ftbench recommend") for each in commands) == has_formula


def test_run_is_found_by_folder_id_or_number(ftbench):
    store = RESULTS / "launch-bound"
    rows = json.loads(ftbench("report", store, "--format", "json")[1])["runs"]
    for row in rows[:2]:
        cards = {ftbench("show", name, store)[1] for name in (row["number"], row["run_id"])}
        assert len(cards) == 1
        assert cards.pop().startswith(f"{row['run_id']}: ok\n")
    assert ftbench("show", rows[0]["path"])[1].startswith(f"{rows[0]['run_id']}: ok\n")


@pytest.mark.parametrize(
    ("rows", "name", "value"),
    [(WAITING, "loader_processes", True), (IDLE, "compile", "lean"), ({"padded_tokens": 16384}, "packing", True)],
)  # fmt: skip
def test_optimizations_that_are_on_are_not_suggested(ftbench, tmp_path, rows, name, value):
    spec = {f"optimizations.{name}": value}
    found, _ = suggestions(ftbench, make_run(tmp_path, "a", steps(**rows), spec=spec).path)
    assert [f"optimizations.{name}=on"] not in [each["sets"] for each in found]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("99", f"no run matches (3 runs; `ftbench report {RESULTS / 'launch-bound'}` lists them)"),
        ("nothing", "matches"),
        ("b1", "choose one by its number"),
    ],
)
def test_unknown_and_ambiguous_names_are_errors(ftbench, name, message):
    code, out, err = ftbench("show", name, RESULTS / "launch-bound")
    assert (code, out) == (2, "")
    assert message in err


def test_lines_fit_the_terminal_except_long_paths(ftbench, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = ftbench("show", "1", RESULTS / "launch-bound")[1]
    assert [line for line in out.splitlines() if cell_len(line) > 80 and "/spec.json" not in line] == []


@pytest.mark.parametrize("name", METHODS)
def test_recorded_spec_can_be_loaded_again(tmp_path, name):
    run = make_run(tmp_path, "a", spec=method(name))
    values = rundir.read_json(run.spec_json)
    asked = {key: values[key] for key in Experiment.model_fields if key in values}
    assert load(run.spec_json) == Experiment.model_validate(asked)
    assert load(run.spec_json, ["train.batch_size=8"]).train.batch_size == 8


@pytest.mark.parametrize(
    ("section", "forged"),
    [
        ("memory_gb", {"allocated_peak": 3.0}), ("tokens_per_s", {"padded": 5.0}),
        ("step_time_s", {"median": 1.0, "ci95": [1.0]}), ("bound", {"verdict": "compute-bound"}),
        ("ranks", {"count": 2, "spread": {"a": {"x": 1}}}), ("forward_s", {"vision": None}), ("parameters", {}),
    ],
)  # fmt: skip
def test_card_of_an_incomplete_summary_is_shown(ftbench, tmp_path, section, forged):
    run = make_run(tmp_path, "a")
    rundir.write_json(run.summary, rundir.read_json(run.summary) | {section: forged})
    code, out, err = ftbench("show", run.path)
    assert code == 0, err
    assert out.startswith("a: ")


def test_folder_with_one_run_is_shown_and_several_are_listed(ftbench, tmp_path):
    make_run(tmp_path / "one", "a")
    make_run(tmp_path / "two", "b")
    make_run(tmp_path / "two", "c", spec={"train.batch_size": 8})
    code, out, err = ftbench("show", tmp_path / "one", tmp_path)
    assert (code, out.startswith("a: ")) == (0, True), err
    code, _, err = ftbench("show", tmp_path / "two", tmp_path)
    assert (code, "several runs match: 1 (" in err) == (2, True), err


def test_folder_outside_results_is_searched(ftbench, tmp_path, monkeypatch):
    """Both with and without a `results` folder."""
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "mine", "a-r1", steps())
    for number in range(2):
        made = make_run(tmp_path / "both", f"b-r{number}", steps(seed=number))
    for _ in range(2):
        code, out, err = ftbench("show", "mine")
        assert (code, out.splitlines()[0], err) == (0, "a-r1: ok", "")
        code, _, err = ftbench("show", "both")
        assert (code, "choose one by its number, `ftbench show NUMBER both`" in " ".join(err.split())) == (2, True), err
        shutil.copytree(made.path.parent, tmp_path / "results" / "made", dirs_exist_ok=True)


def test_missing_results_folder_is_an_error_with_the_command(ftbench, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = ftbench("show", "3")
    message = "ftbench: show 3: results does not exist: name the folder, `ftbench show RUN FOLDER`"
    assert (code, out, " ".join(err.split())) == (2, "", message)


def test_card_of_an_imported_log_omits_unknown_values(ftbench, tmp_path):
    log = [{"step": step, "loss": 2.0 - step / 10, "epoch": step / 3} for step in (1, 2, 3)]
    log.append({"step": 3, "epoch": 1.0, "train_runtime": 30.0, "train_samples_per_second": 4.0})
    state = tmp_path / "trainer_state.json"
    state.write_text(json.dumps({"global_step": 3, "train_batch_size": 4, "log_history": log}))
    told = ("--name", "x", "--model", "Qwen/Qwen3-8B", "--method", "lora", "--gpu", "H200", "--out", tmp_path / "runs")
    assert ftbench("import", state, *told)[0] == 0
    code, out, err = ftbench("show", "1", tmp_path / "runs")
    assert code == 0, err
    assert re.search(r"what +lora of Qwen/Qwen3-8B on H200$", out, re.MULTILINE)
    assert re.search(r"speed +14,400 samples/h$", out, re.MULTILINE)
    assert "ftbench recommend" not in out  # its spec.json is not a spec


def test_show_of_a_run_in_a_bundle_names_no_temporary_folder(ftbench, tmp_path):
    make_run(tmp_path / "runs", "a", steps(**WAITING))
    assert ftbench("bundle", tmp_path / "runs", "-o", tmp_path / "x.tar.zst")[0] == 0
    code, out, err = ftbench("show", "1", tmp_path / "x.tar.zst", "--wide")
    assert code == 0, err
    assert "ftbench-bundle-" not in out
    assert "x.tar.zst:" in out


def test_row_names_mention_the_cpu_if_gpus_vary():
    rows = [("Qwen/Qwen3-8B", "lora", gpu, "synthetic") for gpu in ("none (CPU)", "NVIDIA H200")]
    assert row_names(rows) == ["lora on the CPU", "lora on H200 SXM"]


def test_suggested_batch_keeps_the_samples_per_step_of_an_odd_batch(ftbench, tmp_path):
    run = make_run(tmp_path, "a", steps(1), state=OOM, spec={"train.batch_size": 3})
    found, _ = suggestions(ftbench, run.path)
    assert changed(found[0]).global_batch == load(run.spec_json).global_batch

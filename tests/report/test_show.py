"""`ftbench show`: a run's card again, and what to try next by what it was bound by."""

from __future__ import annotations

import json
import re
import shlex
import shutil

import pytest
from rich.cells import cell_len

from ftbench.core.hardware import find_gpu
from ftbench.estimate.memory.estimate import estimate_memory
from ftbench.estimate.time.duration import estimate_duration
from ftbench.estimate.time.history import RunHistory
from ftbench.estimate.time.timed_runs import step_key
from ftbench.report.data.names import row_names
from ftbench.spec.experiment import Experiment
from ftbench.spec.load import load
from ftbench.spec.methods import METHODS
from ftbench.store import rundir
from made_runs import OOM, RESULTS, make_run, method, steps

IDLE, WAITING = {"gpu_busy": 0.4}, {"gpu_busy": 0.5, "data_time_s": 0.3}
MEMORY = {"gpu_busy": 0.99, "tensor_busy": 0.2, "memory_busy": 0.6}


def tried(ftbench, *arguments):
    """The suggestions of a run, and the verdict that they follow from."""
    code, out, _ = ftbench("show", *arguments, "--json")
    document = json.loads(out)
    assert code == 0
    return document["what_to_try"], (document["summary"]["bound"] or {}).get("verdict")


def changed(suggestion):
    """The spec that a suggested command would train."""
    program, command, path, *options = shlex.split(suggestion["command"])
    assert (program, command) == ("ftbench", "run")
    return load(rundir.Path(path), options[1::2])


@pytest.mark.parametrize(("rows", "verdict"), [(IDLE, "launch-bound"), (MEMORY, "memory-bound")])
def test_each_suggestion_is_a_command_that_the_estimate_finds_faster_and_that_fits(ftbench, tmp_path, rows, verdict):
    run = make_run(tmp_path, "a", steps(**rows))
    suggestions, bound = tried(ftbench, run.path)
    gpu, before = find_gpu("NVIDIA H200"), load(run.spec_json)
    others = RunHistory.read(tmp_path).without(step_key(before))  # neither side as measured: what is off is off on both
    rate = estimate_duration(before, gpu, others).tokens_per_s
    assert bound == verdict
    assert {"optimizations.compile=on"} <= {change for each in suggestions for change in each["sets"]}
    for each in suggestions:
        spec = changed(each)
        faster = estimate_duration(spec, gpu, others).tokens_per_s / rate - 1
        assert f"about {faster * 100:+.0f} % tokens/s" in each["effect"]
        assert faster > 0
        assert estimate_memory(spec, gpu).verdict != "does not fit"


def test_what_an_estimate_is_off_is_not_taken_for_what_a_change_brings(ftbench, tmp_path):
    run = make_run(tmp_path, "a", steps(seconds=60, **IDLE))  # far slower than any estimate, for whatever reason
    rate = estimate_duration(load(run.spec_json), find_gpu("NVIDIA H200"), RunHistory()).tokens_per_s
    suggestions, _ = tried(ftbench, run.path)
    names = [each["name"] for each in suggestions]
    assert rate > 2 * json.loads(run.summary.read_text())["tokens_per_s"]["real"]
    assert "compile" in names
    assert not {"loader processes", "adamw_torch_fused"} & set(names)  # of a step as long as this they change nothing


def test_what_the_store_has_measured_is_what_a_change_brings(ftbench, tmp_path):
    run = make_run(tmp_path, "a", steps(**IDLE))
    make_run(tmp_path, "b", steps(seconds=0.25, seed=2, **IDLE), spec={"optimizations.compile": True})
    suggestions, _ = tried(ftbench, run.path)
    measured = next(each for each in suggestions if each["sets"] == ["optimizations.compile=on"])
    assert re.match(r"about \+(299|300|301) % tokens/s", measured["effect"])
    assert "measured (same step, same GPU, 1 run)" in measured["effect"]


def test_one_that_waits_for_its_data_is_told_to_make_batches_beside_the_training(ftbench, tmp_path):
    suggestions, bound = tried(ftbench, make_run(tmp_path, "a", steps(**WAITING)).path)
    assert bound == "data-bound"
    assert ["optimizations.loader_processes=on"] in [each["sets"] for each in suggestions]
    assert all(changed(each) for each in suggestions)


def test_one_that_did_not_fit_is_told_the_nearest_that_does(ftbench, tmp_path):
    changes = method("full") | {"train.batch_size": 16}
    suggestions, _ = tried(ftbench, make_run(tmp_path, "a", steps(1), spec=changes, state=OOM).path)
    spec = changed(suggestions[0])
    assert estimate_memory(spec, find_gpu("NVIDIA H200")).verdict == "fits"
    assert spec.train.batch_size * spec.train.gradient_accumulation_steps == 16


def test_one_that_should_have_fitted_is_told_to_halve_its_batch(ftbench, tmp_path):
    run = make_run(tmp_path, "a", steps(1), state=OOM)
    assert next(each["sets"] for each in tried(ftbench, run.path)[0]) == [
        "train.batch_size=2", "train.gradient_accumulation_steps=2",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "change", [{"spec": {"launch.mock": "ok"}}, {"machine": {"gpu": None}}, {"spec": {"model": 3}}]
)
def test_where_nothing_is_known_nothing_is_advised(ftbench, tmp_path, change):
    run = make_run(tmp_path, "a", steps(**IDLE), **change)
    assert tried(ftbench, run.path)[0] == []


def test_a_run_is_known_by_its_folder_its_id_and_its_number(ftbench):
    store = RESULTS / "launch-bound"
    rows = json.loads(ftbench("report", store, "--format", "json")[1])["runs"]
    for row in rows[:2]:
        cards = {ftbench("show", name, store)[1] for name in (row["number"], row["run_id"])}
        assert len(cards) == 1
        assert cards.pop().startswith(f"{row['run_id']}: ok\n")
    assert ftbench("show", rows[0]["path"])[1].startswith(f"{rows[0]['run_id']}: ok\n")


def test_what_is_on_already_is_not_advised(ftbench):
    advised = re.findall(r"--set (\S+)", ftbench("show", "6a9d518ab180", RESULTS / "images")[1])
    assert advised == ["optimizations.fp8=tensorwise"], "compile, which goes with it, is on"


@pytest.mark.parametrize(
    ("name", "said"), [("99", "holds 3 runs, with numbers from 1"), ("nothing", "is called so"), ("b1", "say which")]
)
def test_a_name_of_none_or_of_several_is_a_sentence(ftbench, name, said):
    code, out, err = ftbench("show", name, RESULTS / "launch-bound")
    assert (code, out) == (2, "")
    assert said in err


@pytest.mark.parametrize("width", [80, 120, 160])
def test_every_line_but_commands_fits(ftbench, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    out = ftbench("show", "1", RESULTS / "launch-bound")[1]
    assert [line for line in out.splitlines() if cell_len(line) > width and "ftbench " not in line] == []


@pytest.mark.parametrize("name", METHODS)
def test_the_spec_of_a_run_is_a_spec(tmp_path, name):
    run = make_run(tmp_path, "a", spec=method(name))
    values = rundir.read_json(run.spec_json)
    asked = {key: values[key] for key in Experiment.model_fields if key in values}
    assert load(run.spec_json) == Experiment.model_validate(asked)
    assert load(run.spec_json, ["train.batch_size=8"]).train.batch_size == 8


@pytest.mark.parametrize(
    ("section", "forged"),
    [
        ("memory_gb", {"allocated_peak": 3.0, "peak_phase": None}), ("memory_gb", {"allocated_peak": 3.0}),
        ("tokens_per_s", {"real": None, "padded": 5.0}), ("tokens_per_s", {"padded": 5.0}),
        ("step_time_s", {"median": 1.0, "ci95": [1.0]}), ("step_time_s", {"ci95": [1.0, 2.0]}),
        ("steps", {"total": 3}), ("bound", {"verdict": "compute-bound"}), ("parameters", {"trainable": 5}),
        ("ranks", {"token_skew": 0.5}), ("ranks", {"count": 10**9}), ("ranks", {"count": 2, "spread": {"a": {"x": 1}}}),
        ("forward_s", {"vision": None}), ("parameters", {}),
    ],
)  # fmt: skip
def test_a_summary_that_lacks_what_a_card_tells_is_shown_all_the_same(ftbench, tmp_path, section, forged):
    run = make_run(tmp_path, "a")
    rundir.write_json(run.summary, rundir.read_json(run.summary) | {section: forged})
    code, out, err = ftbench("show", run.path)
    assert code == 0, err
    assert out.startswith("a: ")


def test_a_folder_that_holds_one_run_is_that_run_and_of_several_says_their_numbers(ftbench, tmp_path):
    make_run(tmp_path / "one", "a")
    make_run(tmp_path / "two", "b")
    make_run(tmp_path / "two", "c", spec={"train.batch_size": 8})
    code, out, err = ftbench("show", tmp_path / "one", tmp_path)
    assert (code, out.startswith("a: ")) == (0, True), err
    code, _, err = ftbench("show", tmp_path / "two", tmp_path)
    assert (code, "there are several: 2 (" in err) == (2, True), err


def test_a_folder_beside_the_usual_one_is_looked_into(ftbench, tmp_path, monkeypatch):
    """With `results` and without it."""
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "mine", "a-r1", steps())
    for number in range(2):
        made = make_run(tmp_path / "both", f"b-r{number}", steps(seed=number))
    for _ in range(2):
        code, out, err = ftbench("show", "mine")
        assert (code, out.splitlines()[0], err) == (0, "a-r1: ok", "")
        code, _, err = ftbench("show", "both")
        assert (code, "say which by its number, `ftbench show NUMBER both`" in " ".join(err.split())) == (2, True), err
        shutil.copytree(made.path.parent, tmp_path / "results" / "made", dirs_exist_ok=True)


def test_where_there_are_no_runs_it_says_how_to_name_their_folder(ftbench, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = ftbench("show", "3")
    said = "ftbench: show 3: there is no results: say where the runs are, `ftbench show RUN FOLDER`"
    assert (code, out, " ".join(err.split())) == (2, "", said)


def test_the_card_of_an_imported_log_leaves_out_what_the_log_does_not_say(ftbench, tmp_path):
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


def test_a_row_of_the_cpu_beside_one_of_a_gpu_is_on_the_cpu():
    rows = [("Qwen/Qwen3-8B", "lora", gpu, "synthetic") for gpu in ("none (CPU)", "NVIDIA H200")]
    assert row_names(rows) == ["lora on the CPU", "lora on H200 SXM"]


@pytest.mark.exhaustive
def test_a_run_below_the_root_is_shown(ftbench, tmp_path, monkeypatch):
    run = make_run(tmp_path, "a")
    monkeypatch.setattr(rundir.Path, "resolve", lambda path, strict=False: rundir.Path("/a"))
    assert ftbench("show", run.path)[0] == 0


def test_a_condition_of_spaces_is_refused_at_once(ftbench, tmp_path):
    make_run(tmp_path, "a")
    code, _, err = ftbench("report", tmp_path, "--where", "a" + " " * 120_000 + "b")
    assert code == 2
    assert "write it as method=lora" in err

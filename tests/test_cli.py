"""The command line: mistakes give helpful messages before anything is loaded; reports work without torch."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from commands import write_spec
from ftbench.cli import app
from ftbench.errors import DataError, MissingError
from ftbench.launch import runner
from ftbench.store import machine, rundir
from made_runs import OOM, make_run, steps

HEAVY = ("torch", "transformers", "trl", "peft", "datasets", "accelerate", "bitsandbytes")


# --- mistakes of `run`, found before anything is loaded -------------------------------------------------------------


@pytest.fixture
def refused(ftbench, tmp_path, monkeypatch):
    """Runs a spec that is refused: exit code 2, nothing on stdout, no traceback, no directory, nothing launched."""

    def launched(*_: object) -> None:
        raise AssertionError("was launched")

    monkeypatch.setattr(runner, "execute", launched)

    def call(*arguments: object, code: int = 2, **parts: object) -> str:
        spec = write_spec(tmp_path, **parts)
        out = tmp_path / "out"
        found, stdout, stderr = ftbench("run", spec, "--out", out, *arguments)
        assert (found, stdout) == (code, ""), stderr
        assert "Traceback" not in stderr
        assert all(line.startswith("ftbench: ") for line in stderr.splitlines())
        assert not out.exists()
        return stderr

    return call


def test_unknown_key_is_named_with_the_nearest_one(refused):
    err = refused(train={"batch_sise": 2})
    assert "spec.yaml:1: train.batch_sise: no such key; did you mean batch_size?" in err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("objective=GRPO", "'GRPO' is not allowed; did you mean grpo?"),
        ("method=ＬＯＲＡ", "'ＬＯＲＡ' is not allowed; did you mean lora?"),
        ("Train.batch_size=1", "Train: no such key; did you mean train?"),
        ("launch.strategy={tp: 2}", "launch.strategy: {'tp': 2} is not allowed (allowed: none, ddp"),
    ],
)
def test_invalid_value_is_shown_with_the_nearest_one(refused, text, said):
    assert said in refused("--set", text)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (
            {
                "method": "unsloth",
                "objective": "dpo",
                "train": {"batch_size": 3},
                "launch": {"pp": 4, "micro_batches": 2},
            },
            (
                "launch.pp: tiny/qwen3 has 2 layers, too few for 4 stages: lower launch.pp, or use fsdp",
                "launch.micro_batches: 2 micro-batches cannot fill 4 stages, and GPUs would wait for each other: set",
                "train.batch_size: 3 rows cannot form 2 equal micro-batches: set it to 4, or set launch.micro_batches",
                "objective dpo supports one GPU and launch.gpus is 4: set it to 1",
                "method unsloth trains on one GPU: set launch.gpus to 1, or use method lora or qlora",
            ),
        ),
        (
            {"model": "tiny/gpt-oss", "method": "qlora", "launch": {"gpus": 4, "pp": 2}},
            (
                "launch.strategy: pp supports llama, qwen2, qwen3, mistral, gemma2, gemma3_text, qwen3_moe, and",
                "pp+ddp does not support 4-bit weights, because the copies of a stage would get different gradients",
            ),
        ),
    ],
    ids=["layers and batch", "model and method"],
)
def test_impossible_stages_are_refused(refused, parts, said):
    message = refused(**parts)
    assert [each for each in said if each not in message] == [], message


def test_model_folder_without_weights(refused, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    err = refused(model={"id": "mine", "path": "model"})
    assert "no weights" in err
    assert "model.weights=random" in err


def test_method_without_gpu_names_alternatives(refused):
    err = refused(method="unsloth", code=3)
    assert "method unsloth" in err
    assert "use lora or qlora" in err


ONLY_WITH_A_GPU = [
    ("run", {"train": {"optimizer": "paged_adamw_8bit"}}),
    ("sweep", {"optimizations": {"fp8": "tensorwise"}}),
    ("ablate", {"method": "unsloth"}),
]


@pytest.mark.parametrize(("command", "parts"), ONLY_WITH_A_GPU)
def test_missing_gpu_exits_with_3(ftbench, tmp_path, monkeypatch, command, parts):
    """Not the spec is wrong: on a machine with a GPU it runs."""
    monkeypatch.setattr(machine, "gpus", lambda visible=None, count=1: [])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, out, err = ftbench(command, write_spec(tmp_path, **parts), "--out", tmp_path / "out")
    assert code == 3
    assert (out, "GPU" in err) == ("", True)


def test_all_missing_files_are_reported_at_once(refused):
    err = refused(model={"id": "mine", "path": "nowhere"}, dataset={"name": "file", "path": "missing.jsonl"})
    assert len(err.splitlines()) == 2


def test_unwritable_output_fails_before_loading(ftbench, tmp_path):
    code, out, err = ftbench("run", write_spec(tmp_path, launch={"mock": "ok"}), "--out", "/proc/version/results")
    assert (code, out) == (3, "")
    assert "cannot be written" in err
    assert "--out" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (MissingError("no GPU: rent one"), 3, "no GPU: rent one"),
        (DataError("a.csv, line 2: bad\nb.csv, line 3: bad"), 2, "a.csv, line 2: bad\nftbench: b.csv, line 3: bad"),
        (KeyboardInterrupt(), 130, None),
    ],
)
def test_every_error_has_its_exit_code(ftbench, tmp_path, monkeypatch, error, code, said):
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(runner, "run", fail)
    found, out, err = ftbench("run", write_spec(tmp_path))
    assert (found, out) == (code, "")
    assert "Traceback" not in err
    if said:
        assert err == f"ftbench: {said}\n"


# --- report ----------------------------------------------------------------------------------------------------------

INTERRUPTED = {"state": "interrupted", "reason": "interrupted by a signal"}


@pytest.fixture
def study(tmp_path) -> Path:
    make_run(tmp_path / "results", "ok", steps(20, 0.5, 0.5, noise=0.0))
    for end in (OOM, INTERRUPTED):
        make_run(tmp_path / "results", end["state"], [], state=end)
    return tmp_path / "results"


def test_failed_run_has_a_row_with_empty_figures(ftbench, study):
    code, out, _ = ftbench("report", study, "--format", "csv")
    assert code == 0
    found = {row["state"]: row for row in csv.DictReader(io.StringIO(out))}
    assert found.keys() == {"ok", "oom", "interrupted"}
    for name in ("step_time_s.median", "samples_per_hour", "tokens_per_s.real", "loss.last"):
        assert float(found["ok"][name]) > 0
        assert found["oom"][name] == found["interrupted"][name] == ""
    assert float(found["ok"]["samples_per_hour"]) == pytest.approx(8 * 3600)
    assert found["oom"]["oom.bytes_requested"].startswith(str(OOM["oom"]["bytes_requested"]))


def test_table_shows_why_a_run_failed(ftbench, study, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    code, out, _ = ftbench("report", study)
    assert code == 0
    assert "interrupted by a signal" in out
    assert "0.75 GiB requested" in " ".join(out.split())


def test_unknown_format_names_the_known_ones(ftbench, study):
    code, out, err = ftbench("report", study, "--format", "jsn")
    assert (code, out) == (2, "")
    assert "'jsn' is not one of 'table', 'md', 'csv', 'json', 'html'" in err


@pytest.mark.parametrize("name", ["empty", "nowhere"])
def test_path_without_runs_is_an_error(ftbench, tmp_path, name):
    (tmp_path / "empty").mkdir()
    code, out, err = ftbench("report", tmp_path / name)
    assert (code, out) == (2, "")
    assert name in err
    assert err.count("\n") == 1


# --- a machine without torch -----------------------------------------------------------------------------------------


PROGRAM = """
import contextlib, io, json, sys
sys.modules.update(dict.fromkeys(HEAVY))
from ftbench.cli import main
for words in json.loads(sys.argv[1]):
    sys.argv, out, err, code = ["ftbench", *words], io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code
    print(json.dumps([code or 0, out.getvalue(), err.getvalue()]))
"""


def without_torch(*commands: str) -> list[list[Any]]:
    """Run commands in one Python without the training libraries. Return exit code, stdout and stderr of each."""
    words = json.dumps([command.split() for command in commands])
    program = [sys.executable, "-c", PROGRAM.replace("HEAVY", str(HEAVY)), words]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_commands_without_training_work_without_torch(study, tmp_path):
    lists = ("--help", "--version", "run --help", "list methods", "list models", "list gpus")
    reports = [f"report {study} --format {name}" for name in ("table", "md", "csv", "json")]
    *found, (code, _, err) = without_torch(*lists, *reports, f"run {write_spec(tmp_path)} --out {tmp_path / 'out'}")
    assert [(code, bool(out), err) for code, out, err in found[: len(lists)]] == [(0, True, "")] * len(lists)
    assert [(code, "interrupted" in out) for code, out, _ in found[len(lists) :]] == [(0, True)] * 4
    assert code == 3
    assert "training needs torch, transformers, trl, peft, accelerate, datasets" in err
    assert "pip install 'ftbench[train]'" in err
    assert not (tmp_path / "out").exists()


def test_commands_import_no_heavy_package():
    modules = "ftbench.cli, ftbench.launch.runner, ftbench.launch.mock, ftbench.report.formats, ftbench.store.summary"
    others = (
        "ftbench.doctor.diagnosis, ftbench.doctor.probe, ftbench.estimate.estimates, ftbench.estimate.recommend.request"
    )
    heavy = {*HEAVY, "pandas"}
    code = f"import sys, {modules}; print(sorted({heavy | {'numpy'}} & set(sys.modules)))\n"
    code += f"import ftbench.doctor.diagnosis, {others}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n[]\n"


def test_closed_pipe_exits_with_141(study):
    """`ftbench report … | head -1` is silent and exits with 141, as other tools do with `pipefail`."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        done = ftbench_process("report", study, "--format", "json", stdout=closed)
    assert (done.returncode, done.stderr) == (141, "")


# --- what leaves -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("/dev/full", 2, "is not a regular file"),
        ("/proc/self/mem", 3, "mem: cannot be written"),
        (".", 2, "is not a regular file"),
    ],
)
def test_unwritable_output_file_is_an_error(ftbench, study, name, code, said):
    found, out, err = ftbench("report", study, "-o", name, "--force")
    assert (found, out, said in err.lower()) == (code, "", True), err
    assert "Traceback" not in err


def ftbench_process(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ftbench", *map(str, arguments)]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, **options)


@pytest.mark.parametrize(("arguments", "name"), [(("list", "methods"), "stdout"), (("--help",), "the output")])
def test_full_stdout_exits_with_3(arguments, name):
    with open("/dev/full", "w") as full:
        done = ftbench_process(*arguments, stdout=full)
    assert done.returncode == 3
    assert f"{name}: No space left" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_closed_stdout_is_not_an_error():
    done = ftbench_process("list", "gpus", preexec_fn=lambda: os.close(1))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("command", "lost"), [("run", "full disk"), ("sweep", "closed pipe")])
def test_lost_stderr_ends_no_run(tmp_path, command, lost):
    data = {"name": "synthetic", "samples": 64, "length": 32}
    spec = write_spec(tmp_path, dataset=data, train={"max_steps": 3}, launch={"mock": "ok"})
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed, open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "ftbench", command, spec, "--out", tmp_path / "out"], stdout=subprocess.PIPE,
            stderr=closed if lost == "closed pipe" else full, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 0
    assert "tokens/s" in done.stdout
    (run,) = rundir.find_runs(tmp_path / "out")
    assert rundir.read_state(run)["state"] == "ok"


def test_escape_sequences_are_removed_from_messages(ftbench, tmp_path):
    path = write_spec(
        tmp_path, model={"id": "\x1b[2J\x9b31mevil", "weights": "random"}, train={"batch_size": "9" * 20_000}
    )
    code, out, err = ftbench("run", path, "--out", tmp_path / "out")
    assert (code, out) == (2, "")
    assert not {"\x1b", "\x9b"} & set(err)
    assert len(err) < 5_000


def test_missing_base_names_the_file_that_extends_it(ftbench, tmp_path):
    (tmp_path / "spec.yaml").write_text("# one\nextends: bsae.yaml\n")
    (tmp_path / "base.yaml").write_text("model: tiny/qwen3\n")
    code, _, err = ftbench("run", tmp_path / "spec.yaml", "--out", tmp_path / "out")
    assert code == 2
    assert "spec.yaml:2: " in err
    assert "bsae.yaml: no such file" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--batch-size", "1,2", "--axis", "train.batch_size=4,8"], "is given twice"),
        (["--axis", "method=lora", "--axis", "method=full"], "is given twice"),
        (["--axis", "train.batch_size=1,2:30"], "'2:30' must be a whole number"),
        (["--axis", "method=!!set {lora}"], "write it as key=value,value"),
        (["--batch-size", "1", "--time-budget", ""], "write it as 8h"),
        (["--batch-size", "1", "--gpu-ids", "0", "--on", "slurm"], "use one of them"),
        (["--batch-size", "1", "--gpu-ids", "all"], "name GPUs by number, for example --gpu-ids 0,1"),
        (["--status", "."], "only shows a sweep: remove"),
    ],
)  # fmt: skip
def test_conflicting_sweep_options_are_refused(ftbench, tmp_path, arguments, said):
    code, out, err = ftbench("sweep", write_spec(tmp_path), "--out", tmp_path / "out", *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["report", "STUDY", "--format", ""], 2, "'' is not one of 'table', 'md'"),
        (["doctor", "--set", "train.batch_size=8"], 2, "--set: changes a spec; name the spec file"),
        (["run", "tiny/qwen4"], 2, "the shape of tiny/qwen4 is unknown"),
        (["run", "tiny/qwen3", "--gpus", "2"], 2, "set the key of the spec, --set launch.gpus=2"),
        (["estimate", "tiny/qwen3", "--method", "full"], 2, "set the key of the spec, --set method=qlora"),
        (["estimate", "tiny/qwen3", "--gpus", "all"], 2, "must be a number from 1 to 1024, for example --gpus 2"),
        (["estimate", "tiny/qwen3", "--gpus", "0", "--strategy", "all"], 2, "for example --gpus 2"),
        (["recommend", "tiny/qwen3", "--gpus", "100000"], 2, "must be a number from 1 to 1024"),
        (["verify", "STUDY"], 2, "is a folder; pack it with `ftbench bundle"),
    ],
)
def test_misplaced_options_are_refused(ftbench, study, arguments, code, said):
    ended, out, err = ftbench(*(word.replace("STUDY", str(study)) for word in arguments))
    assert ended == code
    assert said in out + err


@pytest.mark.parametrize("option", ["--answers", "--hours=8", "--rows=merge"])
def test_gate_refuses_options_without_effect(ftbench, study, option):
    code, out, err = ftbench("report", study, "--against", study, option)
    assert (code, out, "leave it out" in err) == (2, "", True), err


# --- how it goes -----------------------------------------------------------------------------------------------------


def test_progress_lines_without_a_terminal(tmp_path, ftbench):
    path = write_spec(tmp_path, launch={"mock": "slow"}, train={"max_steps": 3})
    code, _, err = ftbench("run", path, "--out", tmp_path / "out", "--log-every", "1s")
    lines = [line for line in err.splitlines() if "  step " in line]
    assert code == 0
    assert lines
    told = re.compile(r"\d\d:\d\d:\d\d  step \d of 3 · .* tokens/s · loss .* GiB · .* so far")
    assert all(map(told.fullmatch, lines))


def test_invalid_interval_is_an_error(tmp_path, ftbench):
    code, _, err = ftbench("run", write_spec(tmp_path), "--log-every", "often")
    assert code == 2
    assert "'--log-every': often: write it as 8h, 90m or 60s, or off" in err


def test_run_notes_that_it_ignores_the_sweep_section(tmp_path, ftbench):
    path = write_spec(tmp_path, launch={"mock": "ok"}, sweep={"axes": {"train.batch_size": [1, 2]}})
    code, _, err = ftbench("run", path, "--out", tmp_path / "out")
    assert code == 0
    assert f"`ftbench sweep {path}` runs every cell" in err


def test_help_fits_80_columns_and_begins_with_at_most_five_options(ftbench, monkeypatch):
    """The options that are used most are in the first group; --help is the sixth."""
    monkeypatch.setenv("COLUMNS", "80")
    for command in (None, *typer.main.get_command(app).commands):
        code, out, _ = ftbench(*([command] if command else []), "--help")
        assert code == 0
        assert max(map(len, out.splitlines())) <= 80, command
        assert "--help" in out
        first = out.partition("\nOptions:\n")[2].partition("\n\n")[0]
        assert command is None or 1 <= len(re.findall(r"(?m)^  -", first)) <= 6, command

"""`ftbench sweep` with real processes and signals: one problem at a time. Most runs are mocks."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import warm
from ftbench.launch import outcome, process, progress
from ftbench.store import rundir
from ftbench.store.rundir import RunDir
from ftbench.store.steps import read_steps
from sweeps import ENVIRONMENT, MOCK, Folder, Night, held, released, sweep, write_sweep
from waiting import eventually, fill, processes_about

BATCHES = {"train.batch_size": [1, 2, 4]}
RATES = {"train.learning_rate": [1e-4, 2e-4, 3e-4, 4e-4]}
ENDLESS = {"launch": {"mock": "slow"}, "train": {"max_steps": 1000}}


def ftbench(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run another command."""
    return warm.run(arguments, os.environ | ENVIRONMENT)


# --- Ctrl-C, TERM, HUP -----------------------------------------------------------------------------------------------


def test_ctrl_c_interrupts_the_run_and_the_sweep_resumes(tmp_path):
    spec, out = write_sweep(tmp_path, {"train.batch_size": [1, 2]}), tmp_path / "out"
    with Night(spec, out, before=partial(held, tmp_path, "-b2-")) as night:
        night.until(lambda: "ok" in night.states().values())
        night.until_training()
        before = night.content()
        night.send(signal.SIGINT)
        night.finish()
    assert night.code == 130, night.stderr
    assert "Traceback" not in night.stderr
    assert night.told() == ["interrupted", "ok"]
    assert night.children() == []
    assert "1 run still to come" in night.table()
    assert "run the same command to continue" in night.stderr
    interrupted = next(run for run in night.runs() if rundir.read_json(run.state)["state"] == "interrupted")
    assert rundir.read_json(interrupted.summary)["state"] == "interrupted"
    again = sweep(spec, out)
    assert again.code == 0
    assert again.told() == ["ok", "ok"]
    assert before.items() <= again.content().items()
    assert "still to come" not in again.table()


# --- runs that hang and crash ----------------------------------------------------------------------------------------


def impatient() -> None:
    """Treat a run as hung one second after its third step, and kill it after another second."""
    progress.STEP_S, progress.PATIENCE, process.GRACE_S = 1.0, 0, 1.0


def test_hanging_run_is_killed_and_the_sweep_continues(tmp_path):
    axes, train = {"launch.mock": ["hang", "ok"]}, {"max_steps": 5}  # two steps are too few for the watchdog
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as bystander:
        night = sweep(write_sweep(tmp_path, axes, train=train), tmp_path / "out", before=impatient)
        assert bystander.poll() is None
        bystander.kill()
    assert night.code == 1, night.stderr
    assert night.told() == ["ok", "timeout"]
    assert night.children() == []
    hung = next(run for run in night.runs() if rundir.read_json(run.state)["state"] == "timeout")
    state = rundir.read_json(hung.state)
    assert state["child_exit"] == -signal.SIGKILL  # it ignores SIGTERM
    assert "after step 3" in state["reason"]
    assert "launch.no_step_s" in state["reason"]
    assert "timeout: no progress" in night.table()
    assert [row.step for row in read_steps(hung.steps)[0]] == [1, 2, 3]


def test_force_runs_all_cells_again_and_archives_earlier_runs(tmp_path):
    spec, out = write_sweep(tmp_path, {"train.batch_size": [1, 2]}), tmp_path / "out"
    before = sweep(spec, out).content()
    night = sweep(spec, out, "--force")
    assert (night.code, night.told()) == (0, ["ok"] * 2)
    kept = {run.run_id.rpartition(".")[0]: run.path.stat().st_ino for run in night.superseded()}
    assert kept == {name: inode for name, (inode, _, _) in before.items()}
    assert not set(kept.values()) & {inode for inode, _, _ in night.content().values()}
    assert len(ftbench("report", str(out), "--format", "csv").stdout.splitlines()) == 3


# --- lock and status -------------------------------------------------------------------------------------------------


def test_folder_allows_one_sweep_at_a_time(tmp_path):
    spec, out = write_sweep(tmp_path, {"train.batch_size": [1, 2]}), tmp_path / "out"
    with Night(spec, out, before=partial(held, tmp_path, "-b1-")) as night:
        night.until_training()
        status = ftbench("sweep", "--status", str(night.path)).stdout
        assert ("2 runs left" in status, "summary.md" in status) == (True, False)  # there is no table yet
        second = sweep(spec, out)
        assert (second.code, second.stdout) == (3, "")
        assert f"process {night.process.pid} " in second.stderr
        assert "--status" in second.stderr
        assert night.process.poll() is None
        assert night.told() == ["running"]
        night.kill()
    third = sweep(spec, out)
    assert (third.code, third.told()) == (0, ["ok", "ok"])
    assert len(third.superseded()) == 1


def test_status_of_a_running_a_killed_and_a_finished_sweep(tmp_path):
    spec, out = write_sweep(tmp_path, {"train.batch_size": [1, 2]}, train={"max_steps": 5}), tmp_path / "out"
    with Night(spec, out, before=partial(held, tmp_path, "-b2-")) as night:
        night.until(lambda: "ok" in night.states().values())
        night.until_training()
        folder = str(night.path)
        text = ftbench("sweep", "--status", folder)
        assert text.returncode == 0, text.stderr
        assert "1 ok · 1 run left" in text.stdout
        assert "running  train.batch_size=2: step 1 of 5 · " in text.stdout
        found = json.loads(ftbench("sweep", "--status", folder, "--json").stdout)
        assert found["alive"] is True
        assert {job["state"] for job in found["jobs"]} <= {"ok", "running", "pending"}
        assert list(found["running"]) == [found["jobs"][1]["run"]]
        night.kill()
    killed = ftbench("sweep", "--status", folder).stdout
    assert "1 ok · 1 run left" in killed
    assert "run the same command to continue" in killed
    found = json.loads(ftbench("sweep", "--status", folder, "--json").stdout)
    assert (found["alive"], found["running"]) == (False, {})
    assert sweep(spec, out).code == 0
    over = ftbench("sweep", "--status", folder).stdout
    assert "2 ok" in over
    assert "left" not in over
    assert str(Path(folder) / "summary.md") in over


# --- --time-budget ---------------------------------------------------------------------------------------------------


def hurried(folder: Path) -> None:
    """Add 100 s to the sweep's clock per finished run, and a day once the file `late` exists."""
    monotonic = time.monotonic

    def warped() -> float:
        ended = sum('"ok"' in path.read_text() for path in folder.glob("out/*/*/state.json"))
        return monotonic() + 100 * ended + 86_400 * (folder / "late").exists()

    time.monotonic = warped


def test_time_budget_starts_no_run_that_cannot_finish(tmp_path):
    spec, out = write_sweep(tmp_path, RATES), tmp_path / "out"
    night = sweep(spec, out, "--time-budget", "390s", before=partial(hurried, tmp_path))
    assert night.code == 0, night.stderr
    assert night.told() == ["ok"] * 3  # a fourth needs more than the remaining 90 s
    rates = [json.loads((night.path / name / "spec.json").read_text())["train"]["learning_rate"]
             for name in night.started()]  # fmt: skip
    assert rates == [1e-4, 2e-4, 3e-4]
    assert "1 run still to come" in night.table()
    again = sweep(spec, out)
    assert (again.code, again.told()) == (0, ["ok"] * 4)
    assert sorted(again.started()) == sorted(again.states())


def test_run_beyond_the_time_budget_is_interrupted(tmp_path):
    spec, out = write_sweep(tmp_path, BATCHES, **ENDLESS), tmp_path / "out"
    with Night(spec, out, "--time-budget", "1h", before=partial(hurried, tmp_path)) as night:
        night.until_training()
        (tmp_path / "late").touch()
        night.finish()
    assert night.code == 0, night.stderr
    assert night.told() == ["interrupted"]
    assert "the sweep's time budget ran out" in rundir.read_json(night.runs()[0].state)["reason"]
    assert "3 runs still to come" in night.table()
    assert "3 runs left" in ftbench("sweep", "--status", str(night.path)).stdout


def terminated(name: str) -> None:
    """Let runs whose name contains `name` end as a training process that got a SIGTERM records it."""
    final = outcome.final_state

    def interrupted(run: RunDir, ended: process.Ended) -> dict[str, Any]:
        return final(run, ended) | ({"state": "interrupted"} if name in run.run_id else {})

    outcome.final_state = interrupted


def test_a_run_that_another_program_ends_does_not_end_the_time_budget(tmp_path):
    spec, out = write_sweep(tmp_path, {"train.batch_size": [1, 2]}), tmp_path / "out"
    night = sweep(spec, out, "--time-budget", "8h", before=partial(terminated, "-b1-"))
    assert (night.code, night.told()) == (1, ["interrupted", "ok"])


# --- several GPUs ----------------------------------------------------------------------------------------------------


def test_two_gpus_run_two_jobs_at_once(tmp_path):
    spec = write_sweep(tmp_path, {"train.batch_size": [1, 2, 3, 4]})
    with Night(spec, tmp_path / "out", "--gpu-ids", "0,1", before=partial(held, tmp_path, "-b1-", "-b2-")) as night:
        night.until(lambda: night.told() == ["running"] * 2)
        for run in night.runs():
            released(tmp_path, run)
        night.finish()
    assert (night.code, night.told()) == (0, ["ok"] * 4)
    for run in night.runs():
        assert any(text.startswith("shared host") for text in rundir.read_json(run.summary)["warnings"])
    assert "shared host" in night.table()


# --- --until-oom -----------------------------------------------------------------------------------------------------


def frontier(night: Night) -> dict[str, tuple[int | None, int | None]]:
    """Return by method the largest batch that fits and the first that does not."""
    board = json.loads((night.path / "sweep.json").read_text())["frontier"]
    return {
        edge["method"]: tuple((edge[name] or {}).get("batch") for name in ("largest", "first_failing"))
        for edge in board
    }  # fmt: skip


@pytest.mark.parametrize("fits", [0, 3])
def test_search_finds_the_largest_batch(tmp_path, fits):
    spec = write_sweep(tmp_path, {"method": ["lora", "qlora"]}, launch={"mock": "oom", "mock_fits": fits})
    night = sweep(spec, tmp_path / "out", "--until-oom")
    assert night.code == 0, night.stderr
    assert frontier(night) == dict.fromkeys(["lora", "qlora"], (fits or None, fits + 1))
    assert len(night.started()) == len(set(night.started()))
    assert f"| lora | {fits or 'none'} |" in night.table()


def test_search_ignores_axes_that_each_trial_sets(tmp_path):
    """Otherwise, two GPUs train the same trial at the same time."""
    spec = write_sweep(tmp_path, {"train.max_steps": [5, 10]}, launch={"mock": "oom", "mock_fits": 2})
    night = sweep(spec, tmp_path / "out", "--until-oom", "--gpu-ids", "0,1")
    assert night.code == 0, night.stderr
    assert "it ignores the values of train.max_steps" in night.stderr
    assert len(json.loads((night.path / "sweep.json").read_text())["frontier"]) == 1
    assert night.superseded() == []


# --- --dry-run -------------------------------------------------------------------------------------------------------


def typed(command: list[str], out: Path) -> subprocess.CompletedProcess[str]:
    assert command[0] == "ftbench"
    return ftbench(*command[1:])


def test_commands_of_a_dry_run_make_the_runs_of_the_sweep(tmp_path):
    axes = {"method": ["lora", {"name": "qlora", "rank": 4}], "train.batch_size": [1, 8]}
    spec = write_sweep(tmp_path, axes, launch={"mock": "oom", "mock_fits": 4})
    out = tmp_path / "my out"
    arguments = ("sweep", str(spec), "--out", str(out), "--set", "train.max_steps=4")
    text = ftbench(*arguments, "--dry-run")
    assert text.returncode == 0, text.stderr
    assert text.stdout.count("pending") == 4
    assert not out.exists()
    lines = text.stdout.replace("\\\n", "").splitlines()
    commands = [shlex.split(line) for line in lines if line.strip().startswith("ftbench run")]
    planned = json.loads(ftbench(*arguments, "--dry-run", "--json").stdout)
    assert [line["command"] for line in planned] == commands
    assert {line["state"] for line in planned} == {"pending"}
    assert [typed(command, out).returncode for command in commands] == [0, 1, 0, 1]
    before = Folder(out).content()
    night = sweep(spec, out, "--set", "train.max_steps=4")
    assert (night.code, night.content(), night.superseded()) == (0, before, [])
    assert night.told() == ["ok", "ok", "oom", "oom"]
    after = json.loads(ftbench(*arguments, "--dry-run", "--json").stdout)
    assert "total:" not in ftbench(*arguments, "--dry-run").stdout
    assert [line["state"] for line in after] == ["ok", "oom"] * 2


# --- a full disk -----------------------------------------------------------------------------------------------------


def test_full_disk_loses_no_finished_run(tmp_path, small_disk):
    spec, out = write_sweep(tmp_path, BATCHES, train={"max_steps": 300}), small_disk / "out"
    with Night(spec, out, before=partial(held, tmp_path, "-b2-")) as night:
        night.until(lambda: "ok" in night.states().values())
        run = night.until_training()
        before = night.content()
        filler = fill(small_disk)
        released(tmp_path, run)
        night.finish()
    assert night.code == 3, night.stderr
    assert "free some, or write elsewhere" in night.stderr
    assert "Traceback" not in night.stderr
    assert before.items() <= night.content().items()
    assert night.children() == []
    assert ftbench("sweep", "--status", str(night.path)).returncode == 0
    refused = sweep(spec, out)
    assert refused.code == 3
    assert "free some, or write elsewhere" in refused.stderr
    filler.unlink()
    again = sweep(spec, out)
    assert again.code == 0, again.stderr
    assert again.told() == ["ok"] * 3
    assert before.items() <= again.content().items()
    assert "still to come" not in again.table()


# --- damaged, edited and deleted files -------------------------------------------------------------------------------


def test_sweep_resumes_with_damaged_tables_and_lock(tmp_path):
    spec, out = write_sweep(tmp_path, {"train.batch_size": [1, 2]}), tmp_path / "out"
    before = sweep(spec, out)
    table, content = before.table(), before.content()
    for name in ("sweep.json", "summary.md", "summary.csv", ".lock"):
        (before.path / name).write_bytes(b'\xff\x00{"at": "2026')
    again = sweep(spec, out)
    assert (again.code, again.told(), again.table()) == (0, ["ok"] * 2, table)
    assert content == again.content()
    assert ftbench("sweep", "--status", str(again.path)).returncode == 0


def test_runs_with_an_unreadable_or_missing_state_are_archived_and_run_again(tmp_path):
    spec, out = write_sweep(tmp_path, {"train.batch_size": [1, 2, 4]}), tmp_path / "out"
    torn, missing, _ = sweep(spec, out).runs()
    torn.state.write_bytes(b'{"state": "ok"')
    missing.state.unlink()
    again = sweep(spec, out)
    assert (again.code, again.told()) == (0, ["ok"] * 3)
    assert again.started()[3:] == [torn.run_id, missing.run_id]
    assert [RunDir(found.path).steps.exists() for found in again.superseded()] == [True, True]


def test_deleted_run_directory_ends_the_sweep(tmp_path):
    spec, out = write_sweep(tmp_path, {"train.batch_size": [1, 2]}), tmp_path / "out"
    with Night(spec, out, before=partial(held, tmp_path, "-b1-")) as night:
        run = night.until_training()
        while run.path.exists():  # the run may be writing
            shutil.rmtree(run.path, ignore_errors=True)
        released(tmp_path, run)
        night.finish()
    assert "Traceback" not in night.stderr
    assert night.code == 3
    assert "the folder was deleted; run the same command again" in night.stderr
    again = sweep(spec, out)
    assert (again.code, again.told()) == (0, ["ok", "ok"])


# --- mistakes --------------------------------------------------------------------------------------------------------

REAL = {"launch": {"mock": "off"}}
WRONG = [
    ({}, [], ["--axis", "train.batch_sise=1,2"], 2, "did you mean"),
    ({}, [], ["--axis", "train.batch_size"], 2, "key=value,value"),
    ({}, [], ["--batch-size", "0,1"], 2, "batch_size"),
    ({}, [], ["--method", "lora,lara"], 2, "lara"),
    ({}, [], ["--repeats", "0"], 2, "repeats"),
    ({}, [], ["--time-budget", "soon"], 2, "write it as 8h, 90m or 60s"),
    ({}, [], ["--set", "launch.mock=maybe"], 2, "launch.mock"),
    ({}, [], ["--axis", "train.seed=" + ",".join(map(str, range(400))), "--batch-size",
              ",".join(map(str, range(1, 400)))], 2, "split it"),
    ({}, [], ["--gpu-ids", "0,0"], 2, "--gpu-ids"),
    ({"axes": {"train.batch_size": 4}}, [], [], 2, "4 must be a list of values: [a, b]"),
    ({"axes": {"train.batch_size": []}}, [], [], 2, "[] must have at least 1 item"),
    ({"axis": {"train.batch_size": [4]}}, [], [], 2, "did you mean axes"),
    ({"axes": {"launch.mock": ["ok", "off"]}}, [], [], 2, "cannot mix mock runs and real runs"),
    ({"axes": {"train.batch_size": [1, 2]}}, REAL, ["--until-oom"], 3, "needs a GPU"),
    ({"axes": {"train.batch_size": [1, 2]}}, REAL, ["--until-oom"], 3, "it ignores the values of train.batch_size"),
    ({"axes": {"train.batch_size": [1, 2]}}, REAL, ["--gpu-ids", "0,1"], 3, "no such GPU"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("section", "parts", "arguments", "code", "said"),
    [pytest.param(*w, marks=[pytest.mark.torch] if w[4] == "needs a GPU" else []) for w in WRONG],
    ids=[f"{w[2][:2]}{list(w[0])}" for w in WRONG],
)
def test_invalid_command_creates_nothing(ftbench, monkeypatch, tmp_path, section, parts, arguments, code, said):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    spec = write_sweep(tmp_path, sweep=section, **dict(parts))
    ended, out, err = ftbench("sweep", spec, "--out", tmp_path / "out", *arguments)
    assert ended == code, err
    assert said in err
    assert "Traceback" not in err
    assert out == ""
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("more", [[], ["--until-oom"]], ids=["grid", "search"])
def test_settings_without_effect_are_noted(ftbench, tmp_path, more):
    spec = write_sweep(tmp_path, {"launch.timeout_s": [60, 90], "method": ["lora", "qlora"]})
    code, out, err = ftbench("sweep", spec, "--out", tmp_path / "out", "--dry-run", "--json", *more)
    assert code == 0
    assert err == "ftbench: note: 2 of 4 cells equal another one, except for settings without effect: they run once\n"
    assert json.loads(out)


@pytest.mark.torch
def test_dry_run_needs_no_gpu_and_the_advice_of_the_sweep_works(ftbench, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    spec = write_sweep(tmp_path, {"recipe": ["fastest", "fastest-fp8"]}, **dict(REAL))
    arguments = ("sweep", spec, "--out", tmp_path / "out")
    code, planned, note = ftbench(*arguments, "--dry-run")
    assert (code, planned.count("skipped"), note.count("\n")) == (0, 2, 1)
    assert note.startswith("ftbench: note: recipe=fastest, recipe=fastest-fp8: recipes are published with")
    code, out, error = ftbench(*arguments)
    assert (code, out, error) == (3, "", note.replace("note: ", ""))
    advice = error.partition("add ")[2].split()
    code, planned, note = ftbench(*arguments, *advice, "--dry-run")
    assert (code, note, planned.count("optimizations.triton_kernels=off:")) == (0, "", 2)
    code, _, error = ftbench(*arguments, *advice)
    assert (code, "published" in error, "varlen needs a GPU" in error) == (3, False, True)


def test_sweep_needs_a_valid_file_and_folder(ftbench, tmp_path):
    out = tmp_path / "out"
    (tmp_path / "bad.yaml").write_text("model: [")
    for name in ("none.yaml", "", "bad.yaml"):
        assert ftbench("sweep", tmp_path / name, "--out", out)[0] == 2
    spec = write_sweep(tmp_path, BATCHES)
    out.write_text("a file")
    assert ftbench("sweep", spec, "--out", out)[0] == 3
    code, _, err = ftbench("sweep", "--status", tmp_path)
    assert (code, "no sweep found" in err) == (2, True)


@pytest.mark.parametrize(("precision", "working"), [("bf16", 3), ("auto", 2)])
def test_impossible_cells_are_listed_and_the_others_run(tmp_path, precision, working):
    """Without a GPU `auto` becomes fp32, which excludes fp8."""
    axes = {"method": ["lora", "qlora"], "optimizations.fp8": ["off", "tensorwise"]}
    night = sweep(write_sweep(tmp_path, axes, train={"precision": precision}), tmp_path / "out")
    assert (night.code, night.told()) == (0, ["ok"] * working), night.stderr
    assert "method=qlora optimizations.fp8=tensorwise" in night.table().partition("## Impossible")[2]


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_ray_that_is_not_installed_is_reported(ftbench, tmp_path):
    code, _, err = ftbench("sweep", write_sweep(tmp_path, BATCHES), "--out", tmp_path / "out", "--on", "ray")
    assert (code, "pip install" in err) == (3, True)


# --- real training ---------------------------------------------------------------------------------------------------


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_real_sweep_runs_once_and_can_be_reported(tmp_path):
    pytest.importorskip("torch", reason="training libraries are not installed")
    spec = tmp_path / "tiny.yaml"
    spec.write_text(json.dumps(MOCK | {"name": "tiny", "sweep": {"axes": {"method": ["lora", "full"]}}}))
    first = sweep(spec, tmp_path / "out", experiment="tiny")
    assert first.code == 0, first.stderr
    assert first.told() == ["ok"] * 2
    before = first.content()
    again = sweep(spec, tmp_path / "out", experiment="tiny")
    assert (again.code, again.content(), len(again.started())) == (0, before, 2)
    assert again.table() == first.table()
    found = json.loads(ftbench("report", str(tmp_path / "out" / "tiny"), "--format", "json").stdout)
    assert sorted(run["method"] for run in found["runs"]) == ["full", "lora"]
    assert {run["steps"]["total"] if isinstance(run.get("steps"), dict) else run["steps.total"]
            for run in found["runs"]} == {3}  # fmt: skip
    eventually(lambda: not processes_about(tmp_path / "out"))

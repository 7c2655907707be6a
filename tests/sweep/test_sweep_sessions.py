"""What a sweep does with the runs of earlier sessions, with a worker that fails late, and with ignored axes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ftbench.launch import outcome, process, runner
from ftbench.store import rundir
from ftbench.store.rundir import RunDir
from ftbench.sweep.gpu_slots import local_slots
from sweeps import Folder, write_sweep


def test_a_run_that_ended_after_ftbench_was_killed_gets_its_files(ftbench, tmp_path: Path) -> None:
    sweep = ("sweep", write_sweep(tmp_path), "--out", tmp_path / "out")
    assert ftbench(*sweep)[0] == 0
    (run,) = Folder(tmp_path / "out").runs()
    run.summary.unlink()
    run.reserve.write_bytes(b"0")
    rundir.write_json(run.state, rundir.read_json(run.state) | {"owner": {"pid": 1}})
    assert ftbench(*sweep)[0] == 0
    assert run.summary.exists()
    assert not run.reserve.exists()
    assert "owner" not in rundir.read_json(run.state)


@pytest.mark.parametrize(("code", "state"), [(0, "ok"), (1, "error"), (-9, "ok")])
def test_a_worker_that_fails_after_its_result_has_failed(tmp_path: Path, code: int, state: str) -> None:
    """A kill after the result does not matter."""
    run = RunDir(tmp_path)
    rundir.write_json(run.state, rundir.running() | {"state": "ok"})
    ended = outcome.final_state(run, process.Exit(code, None, False, 1.0))
    assert (ended["state"], ended["child_exit"]) == (state, code)


def test_a_rank_that_is_killed_after_its_result_does_not_matter(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    rundir.write_json(run.state, rundir.running() | {"state": "ok", "rank": 1})
    assert outcome.final_state(run, process.Exit(-9, None, False, 1.0))["state"] == "ok"


def test_a_trial_keeps_the_accumulation_of_an_ignored_axis(ftbench, tmp_path: Path) -> None:
    spec = write_sweep(tmp_path, {"train.gradient_accumulation_steps": [2]}, launch={"mock": "oom"})
    _, out, _ = ftbench("sweep", spec, "--until-oom", "--dry-run", "--json", "--out", tmp_path / "out")
    (trial,) = json.loads(out)
    assert "train.gradient_accumulation_steps=2" in trial["command"]


def test_secrets_are_removed_from_the_logs_of_all_nodes(tmp_path: Path) -> None:
    secret = "hf_" + "aBcDeFgHiJkLmNoPqRsTuVwXyZaBcDeFgH"
    for name in ("log.txt", "log.node1.txt"):
        (tmp_path / name).write_text(f"token {secret}\n")
    outcome._redact_logs(RunDir(tmp_path))
    assert [path.name for path in tmp_path.iterdir() if secret in path.read_text()] == []


def test_each_run_of_several_gpus_describes_its_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Any] = []
    monkeypatch.setattr(runner, "describe", lambda spec, visible: {"gpus": [visible]})
    monkeypatch.setattr(runner, "execute", lambda run, order, described, *others: used.append((described, others[2])))
    unused: Any = SimpleNamespace(spec=None, stop_pipe=0, deadline=None)
    for slot in local_slots(["0", "1"], mock=True):
        slot.train(RunDir(tmp_path), unused, unused)
    assert used == [({"gpus": [gpu], "shared_host": True}, {"CUDA_VISIBLE_DEVICES": gpu}) for gpu in ("0", "1")]

"""A sweep that is killed with -9 many times loses no finished run, repeats none, and leaves no process."""

from __future__ import annotations

import csv
import importlib.util
import random
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from slurms import SKIP
from sweeps import Folder, sweep
from waiting import LIMIT_S

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "kills"
KILLS = runpy.run_path(str(SCRIPT))
RAY = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: ftbench[ray]")


def rows(folder: Folder) -> list[dict[str, str]]:
    """Return the rows of summary.csv without times and paths."""
    with (folder.path / "summary.csv").open(newline="") as file:
        return [
            {key: value for key, value in row.items() if not key.startswith(("path", "phases_s.", "started", "ended"))}
            for row in csv.DictReader(file)
        ]


def test_kills_lose_and_repeat_no_finished_run(tmp_path, monkeypatch):
    """The script checks the runs after each kill. At the end the tables equal those of an undisturbed sweep."""
    monkeypatch.setitem(KILLS["Target"].wait_until_ended.__globals__, "WITHIN_S", LIMIT_S)
    victim = KILLS["Target"](tmp_path, "mock", {})
    victim.kinds_to_kill, victim.pause_s = ("ftbench", "descendant", "ftbench and descendant"), 0.5
    KILLS["kill_repeatedly"](victim, 2, random.Random(9))
    states = victim.finish()
    assert states == dict.fromkeys(["ok", "oom"], victim.seeds)
    calm = sweep(victim.spec, tmp_path / "calm", victim.axis)
    assert calm.states() == victim.states()
    assert (victim.path / "summary.md").read_bytes() == (calm.path / "summary.md").read_bytes()
    assert rows(victim) == rows(calm)


@pytest.mark.exhaustive
@pytest.mark.parametrize("on", [pytest.param("ray", marks=RAY), pytest.param("slurm", marks=[pytest.mark.slurm, SKIP])])
def test_kills_on_a_cluster(on):
    ended = subprocess.run([sys.executable, SCRIPT, "--only", on, "--kills", "1"], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr

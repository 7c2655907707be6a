"""A sweep that is killed with -9 many times loses no finished run, repeats none, and leaves no process."""

from __future__ import annotations

import csv
import importlib.util
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from ftbench.store import rundir
from slurms import SKIP
from sweeps import Folder, Night, sweep, write_sweep
from waiting import eventually, processes_about

ROOT = Path(__file__).resolve().parents[2]
RAY = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: ftbench[ray]")
KILLS = int(os.environ.get("FTBENCH_KILLS", "9"))  # for a long test: FTBENCH_KILLS=500
AXES = {
    "method": ["lora", "qlora", "full"],
    "train.learning_rate": [rate / 10_000 for rate in range(1, 2 + KILLS // 7)],
    "train.batch_size": [1, 2, 4, 8, 16],  # 8 does not fit, 16 is skipped
}
PARTS = {"measure": {"repeats": 2}, "launch": {"mock": "oom", "mock_fits": 4}, "train": {"max_steps": 8}}
RUNS = len(AXES["method"]) * len(AXES["train.learning_rate"]) * (3 * 2 + 1)


def kill(processes: Sequence[psutil.Process]) -> int:
    killed = 0
    for process in processes:
        try:
            process.kill()
            killed += 1
        except psutil.NoSuchProcess:
            pass
    return killed


def rows(folder: Folder) -> list[dict[str, str]]:
    """Return the rows of summary.csv without wall times and paths."""
    with (folder.path / "summary.csv").open(newline="") as file:
        return [
            {key: value for key, value in row.items() if key != "path" and not key.startswith("phases_s.")}
            for row in csv.DictReader(file)
        ]


Known = dict[str, tuple[int, str, bytes]]


def with_result(folder: Folder, closed_only: bool = False) -> Known:
    """Return inode, state and steps.csv of each finished run. `closed_only` excludes runs without final files."""
    found = {}
    for run in folder.runs():
        state = rundir.read_json(run.state)
        if state.get("state") in ("ok", "oom") and ("ended_at" in state or not closed_only):
            steps = run.steps.read_bytes() if run.steps.exists() else b""
            found[run.run_id] = (run.path.stat().st_ino, state["state"], steps)
    return found


def assert_none_lost(folder: Folder, known: Known) -> None:
    now = with_result(folder)
    assert {name: now.get(name) for name in known} == known


def assert_none_run_twice(folder: Folder) -> None:
    assert [
        run.run_id for run in folder.superseded() if rundir.read_json(run.state).get("state") in ("ok", "oom")
    ] == []
    over: set[str] = set()
    for event in folder.events("start", "ended"):
        assert event["run"] not in over, f"{event['run']} was finished and was run again"
        if event.get("state") in ("ok", "oom"):
            over.add(event["run"])


class Victim:
    """A sweep that is started again after each kill."""

    def __init__(self, spec: Path, out: Path) -> None:
        self.spec, self.folder, self.sessions = spec, Folder(out), 0
        self.known: Known = {}
        self.start()

    def start(self) -> None:
        self.night = Night(self.spec, self.folder.out)
        self.sessions += 1

    def go_on(self, runs: int) -> None:
        """Wait until it has started `runs` more runs."""
        enough = len(self.folder.events("start")) + runs
        self.night.until(lambda: len(self.folder.events("start")) >= enough)

    def strike(self, whom: str) -> int:
        """Kill, and if the sweep was killed, check the folder and start it again. Return the number of victims."""
        if whom != "parent":
            eventually(lambda: self.folder.children() or self.night.process.poll() is not None)
        children = [] if whom == "parent" else self.folder.children()
        if whom == "child":
            struck = kill(children)
            self.check()
            return struck
        kill([psutil.Process(self.night.process.pid), *children])
        self.night.process.communicate()
        eventually(lambda: not processes_about(self.folder.out), "a process has outlived its sweep")
        self.check()
        self.start()
        return 1

    def check(self) -> None:
        assert_none_lost(self.folder, self.known)
        self.known |= with_result(self.folder, closed_only=self.night.process.poll() is None)


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> Victim:
    """A sweep that was killed many times and has then finished."""
    folder = tmp_path_factory.mktemp("kills")
    chance = random.Random(9)
    victim = Victim(write_sweep(folder / "disturbed", AXES, **PARTS), folder / "disturbed" / "out")
    strikes = 0
    try:
        while strikes < KILLS:
            victim.go_on(chance.randrange(4))
            time.sleep(chance.uniform(0.0, 0.2))
            assert victim.night.process.poll() is None, f"done after {strikes} kills: the sweep is too short"
            strikes += min(1, victim.strike(chance.choice(["parent", "child", "both"])))
        victim.night.finish()
    finally:
        victim.night.__exit__()
    return victim


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    folder = tmp_path_factory.mktemp("kills")
    night = sweep(write_sweep(folder, AXES, **PARTS), folder / "out")
    assert night.code == 0, night.stderr
    return night


def test_kills_lose_and_repeat_no_finished_run(disturbed):
    victim = disturbed
    victim.check()
    assert "Traceback" not in victim.night.stderr
    again = sweep(victim.spec, victim.folder.out, "--retry-failed")  # a killed worker is an error until then
    assert again.code == 0, again.stderr
    victim.check()
    assert_none_run_twice(victim.folder)
    assert victim.sessions > KILLS / 3
    assert processes_about(victim.folder.out) == []


def test_table_after_kills_equals_that_of_an_undisturbed_sweep(disturbed, undisturbed):
    sweep(disturbed.spec, disturbed.folder.out, "--retry-failed")
    assert len(undisturbed.states()) == RUNS
    assert disturbed.folder.states() == undisturbed.states()
    assert (disturbed.folder.path / "summary.md").read_bytes() == (undisturbed.path / "summary.md").read_bytes()
    assert rows(disturbed.folder) == rows(undisturbed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("on", [pytest.param("ray", marks=RAY), pytest.param("slurm", marks=[pytest.mark.slurm, SKIP])])
def test_kills_on_a_cluster(on):
    command = [sys.executable, str(ROOT / "scripts/cluster-kills"), "--on", on, "--cells", "24", "--kills", "3"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "none lost, none changed, each there once" in ended.stdout

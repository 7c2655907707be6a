"""Two runs on one GPU: the second waits until the first one's process has ended, however it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ftbench.store import rundir
from ftbench.store.rundir import WAITING, RunDir
from ftbench.worker import gpu_lock
from ftbench.worker.measure.phases import Phases
from ftbench.worker.probe import __main__ as probe
from waiting import eventually

WORKER = """
import sys, time
from ftbench.store import machine
from ftbench.store.rundir import RunDir
from ftbench.worker import gpu_lock
from ftbench.worker.measure.phases import Phases
from pathlib import Path
directory = RunDir(Path(sys.argv[1]))
machine.gpu = lambda uuid: {"uuid": uuid, "memory_used_before_gb": 0.5}
phases = Phases(directory, "import")
gpu_lock.take(directory, phases)
phases.enter("load")
time.sleep(60)
"""


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """Starts a process that takes its turn on a GPU and keeps it; its directory."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    processes = []

    def start(name: str, uuid: str = "GPU-1") -> tuple[RunDir, subprocess.Popen]:
        directory = RunDir(tmp_path / name)
        directory.path.mkdir()
        rundir.write_json(directory.machine, {"gpu": {"uuid": uuid, "memory_used_before_gb": 70.0}})
        process = subprocess.Popen([sys.executable, "-c", WORKER, str(directory.path)])
        processes.append(process)
        return directory, process

    yield start
    for process in processes:
        process.kill()
        process.wait()


def phase(directory: RunDir) -> str | None:
    return rundir.read_json(directory.phases).get("phases", [{}])[-1].get("name")


def until_phase(directory: RunDir, name: str) -> None:
    eventually(lambda: phase(directory) == name, f"not in phase {name}")


def memory_before(directory: RunDir) -> float:
    return rundir.first_gpu(rundir.read_json(directory.machine))["memory_used_before_gb"]


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_the_second_begins_when_the_first_has_ended(begin, end):
    first, process = begin("first")
    until_phase(first, "load")
    second, _ = begin("second")
    until_phase(second, WAITING)
    time.sleep(0.3)
    assert phase(second) == WAITING
    process.send_signal(end)
    until_phase(second, "load")
    assert (memory_before(first), memory_before(second)) == (70.0, 0.5)  # who waited looks again


def test_a_probe_does_not_measure_beside_a_run(begin, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_lock.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(gpu_lock, "_held", [])
    first, process = begin("first")
    until_phase(first, "load")
    monkeypatch.setattr(probe.machine, "gpu", lambda: {"uuid": "GPU-1"})
    assert probe.main(tmp_path / "probe.json", 5.0) == 3
    assert "probe again when it has ended" in rundir.read_json(tmp_path / "probe.json")["missing"]
    process.kill()
    process.wait()
    assert gpu_lock.take_now({"uuid": "GPU-1"})


def test_another_gpu_is_not_waited_for(begin):
    for name, uuid in (("first", "GPU-1"), ("second", "GPU-2")):
        directory, _ = begin(name, uuid)
        until_phase(directory, "load")


def test_without_a_gpu_nobody_waits(tmp_path):
    directory = RunDir(tmp_path)
    rundir.write_json(directory.machine, {"gpu": None})
    gpu_lock.take(directory, Phases(directory, "import"))
    assert [phase["name"] for phase in rundir.read_json(directory.phases)["phases"]] == ["import"]


def test_a_place_that_cannot_be_written_keeps_no_run_from_its_work(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_lock.tempfile, "gettempdir", lambda: str(Path(tmp_path, "missing")))
    directory = RunDir(tmp_path)
    rundir.write_json(directory.machine, {"gpu": {"uuid": "GPU-1"}})
    gpu_lock.take(directory, Phases(directory, "import"))
    assert not gpu_lock._held

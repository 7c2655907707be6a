"""Two runs on one GPU: the second waits until the first one's process has ended, however it ends."""

from __future__ import annotations

import os
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
gpu_lock.acquire(directory, phases)
phases.enter("load")
time.sleep(600)
"""


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """Starts a process that takes its turn on a GPU and keeps it; its directory."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    processes = []

    def start(name: str, uuid: str = "GPU-1") -> tuple[RunDir, subprocess.Popen]:
        directory = RunDir(tmp_path / name)
        directory.path.mkdir()
        rundir.write_json(directory.machine, {"gpus": [{"uuid": uuid, "memory_used_before_gb": 70.0}]})
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
    assert (memory_before(first), memory_before(second)) == (0.5, 0.5)  # as it was when they began


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """Acquires a GPU of which the driver tells these used GiB one after the other; what machine.json says then."""
    monkeypatch.setattr(gpu_lock.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(gpu_lock, "_held", [])
    monkeypatch.setattr(gpu_lock, "_POLL_S", 0.0)

    def acquire(*used: float) -> tuple[dict, list[str]]:
        readings = iter(used)
        last = used[-1]

        def gpu(uuid: str) -> dict:
            now = next(readings, last)
            return {"uuid": uuid, "memory_used_before_gb": now, "foreign_processes": int(now > 1)}

        monkeypatch.setattr(gpu_lock.machine, "gpu", gpu)
        directory = RunDir(tmp_path)
        rundir.write_json(directory.machine, {"gpus": [{"uuid": "GPU-1", "memory_used_before_gb": 70.0}], "kept": 1})
        gpu_lock.acquire(directory, Phases(directory, "import"))
        described = rundir.read_json(directory.machine)
        assert described["kept"] == 1
        return rundir.first_gpu(described), [p["name"] for p in rundir.read_json(directory.phases)["phases"]]

    yield acquire
    for lock in gpu_lock._held:
        os.close(lock)


def test_the_memory_of_a_run_that_has_ended_is_waited_for(alone):
    """The parent of a run reads the GPU while the one before it ends: 70 of 72 runs of a grid began so."""
    gpu, phases = alone(70.0, 41.0, 12.0, 0.5)
    assert (gpu["memory_used_before_gb"], gpu["foreign_processes"]) == (0.5, 0)
    assert phases == ["import", WAITING, "import"]


def test_a_free_gpu_is_not_waited_for_and_written_as_it_is(alone):
    gpu, phases = alone(0.4)
    assert (gpu["memory_used_before_gb"], phases) == (0.4, ["import"])


def test_memory_that_somebody_keeps_is_not_waited_for_long_and_told(alone, monkeypatch):
    monkeypatch.setattr(gpu_lock, "STILL_S", 0.2)
    gpu, _ = alone(30.0, 20.0)
    assert (gpu["memory_used_before_gb"], gpu["foreign_processes"]) == (20.0, 1)


def test_memory_that_keeps_changing_is_not_waited_for_for_ever(alone, monkeypatch):
    monkeypatch.setattr(gpu_lock, "RETURN_S", 0.2)
    gpu, _ = alone(*(20.0 + n % 2 for n in range(10**6)))
    assert gpu["foreign_processes"] == 1


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
    assert gpu_lock.try_acquire({"uuid": "GPU-1"})


def test_another_gpu_is_not_waited_for(begin):
    for name, uuid in (("first", "GPU-1"), ("second", "GPU-2")):
        directory, _ = begin(name, uuid)
        until_phase(directory, "load")


def test_without_a_gpu_nobody_waits(tmp_path):
    directory = RunDir(tmp_path)
    rundir.write_json(directory.machine, {"gpu": None})
    gpu_lock.acquire(directory, Phases(directory, "import"))
    assert [phase["name"] for phase in rundir.read_json(directory.phases)["phases"]] == ["import"]


def test_a_place_that_cannot_be_written_keeps_no_run_from_its_work(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_lock.tempfile, "gettempdir", lambda: str(Path(tmp_path, "missing")))
    directory = RunDir(tmp_path)
    rundir.write_json(directory.machine, {"gpu": {"uuid": "GPU-1"}})
    gpu_lock.acquire(directory, Phases(directory, "import"))
    assert not gpu_lock._held

"""Runs on one GPU take turns: the second waits until the process of the first has ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ftbench.store import rundir
from ftbench.store.rundir import WAITING, RunDir
from ftbench.worker import gpu_lock
from ftbench.worker.outcome import Phases
from waiting import eventually

WORKER = """
import sys, time
from ftbench.store import machine
from ftbench.store.rundir import RunDir
from ftbench.worker import gpu_lock
from ftbench.worker.outcome import Phases
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
    """Start a process that locks a GPU and keeps it."""
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


def test_second_run_waits_for_the_first(begin):
    first, process = begin("first")
    until_phase(first, "load")
    second, _ = begin("second")
    until_phase(second, WAITING)
    time.sleep(0.3)
    assert phase(second) == WAITING
    process.kill()
    until_phase(second, "load")
    assert (memory_before(first), memory_before(second)) == (0.5, 0.5)  # the state when they started


@pytest.fixture
def acquire(tmp_path, monkeypatch):
    """Acquire a GPU whose used memory takes these values in GiB. Return machine.json's GPU and the phases."""
    monkeypatch.setattr(gpu_lock.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(gpu_lock, "_held", [])
    monkeypatch.setattr(gpu_lock, "_POLL_S", 0.0)

    def run(*used: float) -> tuple[dict, list[str]]:
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

    yield run
    for lock in gpu_lock._held:
        os.close(lock)


def test_run_waits_for_the_memory_of_a_finished_run(acquire):
    """The parent often reads the GPU while the previous run is still ending."""
    gpu, phases = acquire(70.0, 41.0, 12.0, 0.5)
    assert (gpu["memory_used_before_gb"], gpu["foreign_processes"]) == (0.5, 0)
    assert phases == ["import", WAITING, "import"]


def test_free_gpu_is_used_without_waiting(acquire):
    gpu, phases = acquire(0.4)
    assert (gpu["memory_used_before_gb"], phases) == (0.4, ["import"])


def test_constant_foreign_memory_ends_the_wait(acquire, monkeypatch):
    monkeypatch.setattr(gpu_lock, "STILL_S", 0.2)
    gpu, _ = acquire(30.0, 20.0)
    assert (gpu["memory_used_before_gb"], gpu["foreign_processes"]) == (20.0, 1)


def test_changing_foreign_memory_is_waited_for_with_a_limit(acquire, monkeypatch):
    monkeypatch.setattr(gpu_lock, "RETURN_S", 0.2)
    gpu, _ = acquire(*(20.0 + n % 2 for n in range(10**6)))
    assert gpu["foreign_processes"] == 1


def test_probe_fails_during_a_run(begin, tmp_path, monkeypatch):
    pytest.importorskip("torch", reason="training libraries are not installed")
    from ftbench.worker import probe

    monkeypatch.setattr(gpu_lock.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(gpu_lock, "_held", [])
    first, process = begin("first")
    until_phase(first, "load")
    monkeypatch.setattr(probe.machine, "gpu", lambda: {"uuid": "GPU-1"})
    assert probe.main(tmp_path / "probe.json") == 3
    assert "probe again when it has ended" in rundir.read_json(tmp_path / "probe.json")["missing"]
    process.kill()
    process.wait()
    assert gpu_lock.try_acquire({"uuid": "GPU-1"})


def test_run_does_not_wait_for_another_gpu(begin):
    for name, uuid in (("first", "GPU-1"), ("second", "GPU-2")):
        directory, _ = begin(name, uuid)
        until_phase(directory, "load")


def test_run_does_not_wait_without_a_gpu(tmp_path):
    directory = RunDir(tmp_path)
    rundir.write_json(directory.machine, {"gpu": None})
    gpu_lock.acquire(directory, Phases(directory, "import"))
    assert [phase["name"] for phase in rundir.read_json(directory.phases)["phases"]] == ["import"]


def test_unwritable_lock_folder_disables_locking(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_lock.tempfile, "gettempdir", lambda: str(Path(tmp_path, "missing")))
    directory = RunDir(tmp_path)
    rundir.write_json(directory.machine, {"gpu": {"uuid": "GPU-1"}})
    gpu_lock.acquire(directory, Phases(directory, "import"))
    assert not gpu_lock._held


def test_another_machine_of_a_run_locks_its_own_gpus(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_lock.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(gpu_lock, "_held", [])
    monkeypatch.setattr(gpu_lock.machine, "gpu", lambda uuid: None)
    monkeypatch.setenv("GROUP_RANK", "1")
    run = RunDir(tmp_path, 8)
    rundir.write_json(run.machine, {"gpus": [{"uuid": "GPU-A"}]})
    rundir.write_json(run.path / "machine.node1.json", {"gpus": [{"uuid": "GPU-B"}]})
    gpu_lock.acquire(run, Phases(run, "import"))
    assert [path.name for path in tmp_path.glob("*.lock")] == ["ftbench-GPU-B.lock"]
    os.close(*gpu_lock._held)

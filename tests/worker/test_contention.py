"""Load of other processes on the host and the GPU, from counters of the kernel and the driver."""

from __future__ import annotations

import os
import subprocess
import sys
import types

import pytest
import torch

from conftest import spec_of
from ftbench.store import rundir
from ftbench.worker import training_run
from ftbench.worker.measure import meters, utilization
from ftbench.worker.measure.meters import Sampler
from ftbench.worker.measure.utilization import GpuLoad, HostLoad, own_processes

TICKS = os.sysconf("SC_CLK_TCK")


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A sampler of a HostLoad with a simulated clock and two CPUs. `host(busy, idle, own)` advances by seconds per CPU
    and returns the shares so far. CPU 1 is offline, and CPU 3 is outside the affinity mask."""
    monkeypatch.setattr(utilization.os, "sched_getaffinity", lambda _: {0, 2})
    clock = types.SimpleNamespace(now=0.0, busy=0.0, idle=0.0, own=0.0)
    monkeypatch.setattr(meters.time, "perf_counter", lambda: clock.now)

    def write():
        busy, idle, away = (round(each * TICKS) for each in (clock.busy, clock.idle, clock.now * 1000))
        fields = f"{busy} 0 0 {idle} 0 0 0 0 {busy} 0"
        stat.write_text(f"cpu  {fields}\ncpu0 {fields}\ncpu2 {fields}\ncpu3 {away} 0 0 0 0 0 0 0 0 0\nintr 5\n")

    stat = tmp_path / "stat"
    write()
    sampler = Sampler(others=[HostLoad(lambda: clock.own, stat)])

    def move(busy, idle, own):
        clock.now, clock.busy, clock.idle = clock.now + busy + idle, clock.busy + busy, clock.idle + idle
        clock.own += own
        write()
        sampler.take()
        return lambda begin, end: sampler.over(begin, end).get("host_cpu_by_others")

    return move


def test_own_cpu_time_is_not_load_of_others(host):
    assert host(busy=0.5, idle=0.5, own=1.0)(0.0, 1.0) == pytest.approx(0.0)  # half of two CPUs


def test_load_of_others_is_a_share_of_available_cpus(host):
    host(busy=0.9, idle=0.1, own=1.0)
    share = host(busy=1.0, idle=0.0, own=0.0)
    assert (share(0.0, 1.0), share(1.0, 2.0)) == (pytest.approx(0.4), pytest.approx(1.0))
    assert share(0.5, 1.5) == pytest.approx(0.7), "weighted by overlap"


def test_short_interval_is_added_to_the_next(host):
    assert host(busy=0.05, idle=0.0, own=0.0)(0.0, 0.05) is None
    assert host(busy=0.15, idle=0.0, own=0.2)(0.0, 0.05) == pytest.approx(0.5)


def test_children_count_as_own_time(monkeypatch):
    program = "import sys; sys.stdin.read(1); sum(i * i for i in range(3_000_000)); print('done', flush=True); input()"
    own = utilization.OwnTime()
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        before = own()
        child.stdin.write("g")
        child.stdin.flush()
        child.stdout.readline()
        monkeypatch.setattr(utilization, "CHILDREN_S", 0.0)
        spent = own() - before
        child.kill()
    assert spent > 0.05


# --- the GPU ---------------------------------------------------------------------------------------------------------


class Failure(Exception):
    def __init__(self, value):
        self.value = value


def driver(samples, pids=()):
    def utilization(_, last):
        found = [sample for sample in samples if sample.timeStamp > last]
        if not found:
            raise Failure(6)
        return found

    return types.SimpleNamespace(
        NVMLError=Failure,
        NVML_ERROR_NOT_FOUND=6,
        nvmlDeviceGetProcessUtilization=utilization,
        nvmlDeviceGetComputeRunningProcesses=lambda _: [types.SimpleNamespace(pid=pid) for pid in pids],
    )


def sample(pid, share, later=1):
    return types.SimpleNamespace(pid=pid, smUtil=share, timeStamp=int(4e15) + later)  # the year 2096


def test_kernels_of_other_processes_are_a_share_of_time():
    load = GpuLoad(driver([sample(1, 90), sample(2, 20), sample(2, 40, later=2), sample(3, 5)]), None, own={1})
    assert load.read() == {"gpu_by_others": pytest.approx(0.35)}
    assert load.read() == {"gpu_by_others": 0.0}  # no samples since


def test_failing_meter_is_not_read_again(monkeypatch):
    monkeypatch.setattr(meters, "SHORTEST_S", 0.0)
    nvml, calls = driver([]), []
    nvml.nvmlDeviceGetProcessUtilization = lambda *_: calls.append(1) or (_ for _ in ()).throw(Failure(3))
    sampler = Sampler(nvml, None, [GpuLoad(nvml, None, own={1})])
    for _ in range(3):
        sampler.take()
    assert len(calls) == 1


def test_other_ranks_belong_to_the_run(monkeypatch):
    """All ranks are children of one process."""
    ranks = [types.SimpleNamespace(pid=0, cpu_times=lambda: (40.0, 10.0, 0.0, 0.0)) for _ in range(2)]
    found = {os.getppid(): ranks}
    process = lambda pid=None: types.SimpleNamespace(children=lambda recursive: found.get(pid, []))  # noqa: E731
    monkeypatch.setattr(utilization.psutil, "Process", process)
    monkeypatch.setattr(utilization.parallel, "rank", lambda: 1)
    assert utilization.OwnTime()() == pytest.approx(100 + sum(os.times()[:4]), abs=1)


def test_own_process_is_found_by_its_id():
    assert own_processes(driver([], pids=[7, os.getpid()]), None, before=()) == {os.getpid()}


def test_own_process_in_a_container_is_the_new_one():
    assert own_processes(driver([], pids=[7, 8]), None, before=[7]) == {8}


def test_processes_before_the_run_are_read_from_the_file_of_the_own_node(tmp_path, monkeypatch):
    """Rank 1 has the first GPU of the second of two nodes."""
    seen: list[int] = []
    for name, uuid, pid in (("machine", "GPU-A", 7), ("machine.node1", "GPU-B", 8)):
        rundir.write_json(tmp_path / f"{name}.json", {"gpus": [{"uuid": uuid, "process_ids": [pid]}]})
    monkeypatch.setattr(training_run, "device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(uuid="B"))
    monkeypatch.setattr(training_run, "nvml_module", lambda: driver([]))
    monkeypatch.setattr(training_run, "handle_of", lambda *_: 0)
    monkeypatch.setattr(training_run, "Recorder", lambda *_: None)
    monkeypatch.setattr(training_run, "own_processes", lambda nvml, handle, before: seen.extend(before) or set())
    training_run.recorder_of(spec_of(), rundir.RunDir(tmp_path, 1))
    assert seen == [8]

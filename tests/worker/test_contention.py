"""What others take of the machine: counted from the kernel's and the driver's own figures."""

from __future__ import annotations

import os
import subprocess
import sys
import types

import pytest

from ftbench.worker.measure import contention
from ftbench.worker.measure.contention import GpuLoad, HostLoad, own_processes
from ftbench.worker.measure.sampler import Sampler

TICK = 1 / os.sysconf("SC_CLK_TCK")


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A HostLoad whose two CPUs, clock and own time a test moves: `host(busy, idle, own)` are seconds on each CPU."""
    monkeypatch.setattr(contention.os, "sched_getaffinity", lambda _: {0, 1})
    clock = types.SimpleNamespace(now=0.0, busy=0.0, idle=0.0, own=0.0)
    monkeypatch.setattr(contention.time, "perf_counter", lambda: clock.now)
    path = tmp_path / "stat"

    def write():
        fields = f"{clock.busy / TICK:.0f} 0 0 {clock.idle / TICK:.0f} 0 0 0 0 0 0"
        away = f"{clock.now * 1000 / TICK:.0f} 0 0 0 0 0 0 0 0 0"  # a CPU that this process may not use
        path.write_text(f"cpu  {fields}\ncpu0 {fields}\ncpu1 {fields}\ncpu2 {away}\nintr 5\n")

    write()
    load = HostLoad(path, lambda: clock.own)

    def move(busy, idle, own):
        clock.now, clock.busy, clock.idle = clock.now + busy + idle, clock.busy + busy, clock.idle + idle
        clock.own += own
        write()
        return load.read()

    return move


def test_a_host_that_only_this_run_uses_is_quiet(host):
    (interval,) = host(busy=0.5, idle=0.5, own=1.0)  # half of two CPUs
    assert interval.shares["host_cpu_by_others"] == pytest.approx(0.0)
    assert (interval.begin, interval.end) == (0.0, 1.0)


def test_what_others_use_is_a_share_of_the_cpus_that_this_process_may_use(host):
    (first,) = host(busy=0.9, idle=0.1, own=1.0)
    (second,) = host(busy=1.0, idle=0.0, own=0.0)
    assert first.shares["host_cpu_by_others"] == pytest.approx(0.4)
    assert second.shares["host_cpu_by_others"] == pytest.approx(1.0)


def test_an_interval_too_short_to_count_in_is_kept_for_the_next(host):
    assert host(busy=0.05, idle=0.0, own=0.0) == []
    (interval,) = host(busy=0.15, idle=0.0, own=0.0)
    assert (interval.begin, interval.end) == (0.0, pytest.approx(0.2))


def test_a_host_that_does_not_say_is_not_known(tmp_path):
    assert HostLoad(tmp_path / "missing", lambda: 0.0).read() == []


def test_a_step_has_the_share_of_the_time_it_took(host):
    meter = types.SimpleNamespace(read=lambda: [*host(0.5, 0.5, 0.0), *host(0.0, 1.0, 0.0)])
    sampler = Sampler(others=[meter])
    sampler.take()
    assert sampler.over(0.5, 1.5)["host_cpu_by_others"] == pytest.approx(0.25)
    assert sampler.over(1.0, 2.0)["host_cpu_by_others"] == pytest.approx(0.0)


def test_children_are_no_others(monkeypatch):
    program = "import sys; sys.stdin.read(1); sum(i * i for i in range(3_000_000)); print('done', flush=True); input()"
    own = contention.OwnTime()
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        before = own()
        child.stdin.write("g")
        child.stdin.flush()
        child.stdout.readline()
        monkeypatch.setattr(contention, "CHILDREN_S", 0.0)
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


def test_kernels_of_others_are_a_share_of_the_time():
    load = GpuLoad(driver([sample(1, 90), sample(2, 20), sample(2, 40, later=2), sample(3, 5)]), None, own={1})
    assert load.read()[0].shares == {"gpu_by_others": pytest.approx(0.35)}
    assert load.read()[0].shares == {"gpu_by_others": 0.0}  # none since


def test_without_knowing_who_we_are_nobody_is_another():
    assert GpuLoad(driver([sample(2, 50)]), None, own=()).read() == []


def test_a_driver_that_does_not_say_is_not_asked_again():
    nvml = driver([])
    nvml.nvmlDeviceGetProcessUtilization = lambda *_: (_ for _ in ()).throw(Failure(3))
    load = GpuLoad(nvml, None, own={1})
    assert load.read() == load.read() == []


def test_this_process_is_itself_where_the_driver_knows_its_number():
    assert own_processes(driver([], pids=[7, os.getpid()]), None, before=()) == {os.getpid()}


def test_in_a_container_this_process_is_the_one_that_came():
    assert own_processes(driver([], pids=[7, 8]), None, before=[7]) == {8}

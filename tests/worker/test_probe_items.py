"""The measuring process of `ftbench probe` on the CPU."""

from __future__ import annotations

import os
import sys
import time
import types
from contextlib import nullcontext

import pytest

pytest.importorskip("torch", reason="training libraries are not installed")

import torch

from ftbench.core.processes import process_start
from ftbench.doctor import probe as probing
from ftbench.worker.measure.meters import HostClock
from ftbench.worker.measure.sampler import Sampler
from ftbench.worker.probe import __main__ as child
from ftbench.worker.probe import links, products, timing, transfers
from ftbench.worker.probe.__main__ import Document, _measure
from ftbench.worker.probe.timing import Budget
from waiting import eventually

CPU = torch.device("cpu")
PLENTY = 4 * 2**30


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(products, "SIZES", {"cpu": (64, 128)})
    monkeypatch.setattr(products, "BEST_S", 0.06)
    monkeypatch.setattr(products, "LASTING_S", 0.15)
    monkeypatch.setattr(transfers, "SECONDS", 0.06)
    monkeypatch.setattr(timing, "BATCH_S", 0.002)


class Metronome:
    """A clock on which every call takes `beat` seconds, and every `slow`-th batch twice as long."""

    def __init__(self, beat=0.001, slow=0):
        self.now, self.beat, self.slow, self.batches = 0.0, beat, slow, 0

    def call(self):
        self.now += self.beat

    def mark(self):
        return self.now

    def done(self, mark):
        return True

    def seconds(self, begin, end):
        self.batches += 1
        return (end - begin) * (2 if self.slow and self.batches % self.slow == 0 else 1)

    def wait(self):
        return None


def test_one_slow_batch_in_three_does_not_change_the_best_rate():
    clock = Metronome(slow=3)
    assert timing.best(clock.call, clock, 0.03, 0.001) == pytest.approx(0.001)


def test_the_sustained_rate_is_a_mean_after_settling(monkeypatch):
    clock = Metronome(beat=0.002)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock.now)

    def call():
        clock.now += 0.002 if clock.now >= 0.1 else 0.008  # slow until the clocks have risen

    lasting = timing.lasting(call, clock, 0.3, 0.002)
    assert lasting.seconds == pytest.approx(0.002, rel=0.5)  # one slow batch at most is in the window
    assert 0.3 <= lasting.end <= 0.3 + 2 * timing.BATCH_S
    assert 0.1 <= lasting.begin <= 0.1 + 5 * timing.BATCH_S


@pytest.mark.parametrize("kind", products.ON_CPU)
def test_products_have_a_best_and_a_sustained_rate(quick, kind, monkeypatch):
    monkeypatch.setattr(products, "BEST_S", 0.5)  # long enough for the second size on a loaded machine
    found = products.measure(kind, CPU, HostClock(), None, Budget(3600), PLENTY)
    assert [entry["size"] for entry in found["sizes"]] == [64, 128]
    assert found["best_tflops"] == max(entry["tflops"] for entry in found["sizes"]) > 0
    assert found["best_size"] in (64, 128)
    assert found["sustained_tflops"] > 0
    assert found["power_w"] is found["sm_clock_mhz"] is None


def test_matrices_that_do_not_fit_are_skipped(quick):
    found = products.measure("fp32", CPU, HostClock(), None, Budget(3600), 64 * 64 * products.ELEMENT_BYTES)
    assert [entry["size"] for entry in found["sizes"]] == [64]


def test_slow_sizes_are_skipped(quick, monkeypatch):
    monkeypatch.setattr(products, "SIZES", {"cpu": (64, 65536)})
    found = products.measure("fp32", CPU, HostClock(), None, Budget(0), float("inf"))
    assert [entry["size"] for entry in found["sizes"]] == [64]


def test_parent_and_child_use_the_same_data_types():
    assert tuple(products.KINDS) == probing.PRECISIONS
    assert set(products.ON_CPU) <= set(products.KINDS)


@pytest.mark.parametrize(
    ("capability", "without"),
    [((7, 0), {"bf16", "tf32", "fp8", "int8"}), ((8, 0), {"fp8"}), ((9, 0), set()), ((12, 0), set())],
)
def test_unsupported_data_types_are_skipped(monkeypatch, capability, without):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    for name in products.KINDS:
        refused = pytest.raises(products.Unsupported, match="needs compute capability")
        with refused if name in without else nullcontext():
            products.supported(name, torch.device("cuda", 0))


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_eight_bit_products_use_column_major_matrices(name):
    """The same calls as on a GPU; a CPU can make them, slowly."""
    out = products.KINDS[name].operands(64, CPU)()
    assert out.shape == (64, 64)
    assert out.dtype == {"fp8": torch.bfloat16, "int8": torch.int32}[name]
    assert out.float().std() > 0


def test_memory_bandwidth_counts_bytes_read_and_written(quick):
    found = transfers.memory(CPU, HostClock(), 8 * 4 * 2**20)
    assert found["tensor_bytes"] == 4 * 2**20
    assert found["copy_gbs"] > 0
    assert found["triad_gbs"] > 0


# --- the document ----------------------------------------------------------------------------------------------------


def test_a_failed_item_gives_a_note(tmp_path):
    def fail():
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED\nmore")

    document = Document(tmp_path / "out.json")
    assert document.item("fp8", Budget(9), 1, fail) is None
    assert document.item("int8", Budget(9), 1, lambda: 5) == 5
    assert document.figures["notes"] == ["fp8: not measured: CUBLAS_STATUS_NOT_SUPPORTED"]


def test_items_without_time_left_are_skipped(tmp_path):
    document = Document(tmp_path / "out.json")
    assert document.item("memory", Budget(0.5), 3, lambda: pytest.fail("begun")) is None
    assert document.figures["notes"] == ["memory: not measured: no time left"]


# --- several processes -----------------------------------------------------------------------------------------------


def run_ranks(tmp_path, *codes, timeout_s=240.0):
    commands = [[sys.executable, "-S", "-c", code] for code in codes]
    return links.supervise(commands, os.environ, tmp_path, timeout_s)


def test_a_failed_rank_ends_the_others(tmp_path):
    reason = run_ranks(tmp_path, "import time; time.sleep(600)", "print('no NCCL here'); raise SystemExit(7)")
    assert reason == "failed: rank 1 ended with exit code 7: no NCCL here"


def test_hanging_ranks_are_killed_with_their_children(tmp_path, monkeypatch):
    """Their time is over once the hanging one has started something."""
    child = tmp_path / "child"
    over = types.SimpleNamespace(
        monotonic=lambda: 9.0 if child.exists() and child.read_text() else 0.0, sleep=time.sleep
    )
    monkeypatch.setattr(links, "time", over)
    hang = (
        "import signal, subprocess, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        f"open({str(child)!r}, 'w').write(str(subprocess.Popen(['sleep', '600']).pid)); time.sleep(600)"
    )
    reason = run_ranks(tmp_path, "pass", hang, timeout_s=1.5)
    assert reason == "did not finish within 2 s and were killed: a collective or a link hangs"
    pid = int(child.read_text())
    eventually(lambda: process_start(pid) is None, "outlives the ranks")


def attempts(monkeypatch, *ends):
    """Stands in for the ranks: each attempt ends in the next way; gives the environments they were started with."""
    seen, left = [], list(ends)

    def attempt(world, backend, environment, timeout_s):
        seen.append(environment.get("NCCL_P2P_DISABLE"))
        reason = left.pop(0)
        return {"gpus": world, "all_reduce_bus_gbs": None if reason else 40.0, "pairs": []}, reason

    monkeypatch.setattr(links, "attempt", attempt)
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    return seen


def test_a_hang_is_repeated_without_peer_access(monkeypatch):
    seen = attempts(monkeypatch, "did not finish", None)
    found, notes = links.self_test(2, "nccl", Budget(20))
    assert seen == [None, "1"]
    assert found["all_reduce_bus_gbs"] == 40
    assert found["peer_access"] is False
    assert "NCCL_P2P_DISABLE=1" in notes[1]


@pytest.mark.slow
def test_two_processes_measure_an_all_reduce(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(links, "TIMEOUT_S", 240.0)  # two processes import torch, maybe on a loaded machine
    found, notes = links.self_test(2, "gloo", Budget(1000))
    assert notes == []
    assert found["gpus"] == 2
    assert found["all_reduce_bus_gbs"] > 0


# --- a machine with two GPUs, as far as one without can play it ------------------------------------------------------


def test_items_of_two_gpus_are_stored_with_notes_of_failures(monkeypatch, tmp_path):
    def measure(name, *_):
        if name == "int8":
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")
        return {"best_tflops": 1.0}

    stand_ins = {
        "device_count": lambda: 2, "empty_cache": lambda: None, "get_device_name": lambda _: "NVIDIA H200",
        "mem_get_info": lambda _: (2**34, 2**35),
    }  # fmt: skip
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(products, "measure", measure)
    monkeypatch.setattr(transfers, "memory", lambda place, clock, free: {"copy_gbs": free})
    monkeypatch.setattr(transfers, "host_link", lambda *_: {"to_device_gbs": 1.0})
    monkeypatch.setattr(transfers, "launch_us", lambda *_: 4.0)
    monkeypatch.setattr(links, "self_test", lambda gpus, backend, budget: ({"gpus": gpus, "via": backend}, ["a note"]))
    document = Document(tmp_path / "out.json")
    _measure(document, Budget(60), torch.device("cuda", 0), None)
    found = document.figures
    assert found["device"] == {"kind": "cuda", "name": "NVIDIA H200", "gpus": 2}
    assert {name for name, product in found["products"].items() if product} == set(products.KINDS) - {"int8"}
    assert found["memory"] == {"copy_gbs": 2**34}
    assert (found["host_link"], found["launch_us"]) == ({"to_device_gbs": 1.0}, 4.0)
    assert found["links"] == {"gpus": 2, "via": "nccl"}
    assert found["notes"] == ["int8: not measured: CUBLAS_STATUS_NOT_SUPPORTED", "a note"]


def test_idle_power_is_the_mean_of_a_second(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(child.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(child.time, "sleep", lambda seconds: clock.append(clock.pop() + seconds))
    watts = iter([70_000, 90_000] * 20)
    nvml = types.SimpleNamespace(
        NVMLError=RuntimeError, NVML_CLOCK_SM=1, NVML_TEMPERATURE_GPU=0, nvmlDeviceGetClockInfo=lambda *_: 345,
        nvmlDeviceGetPowerUsage=lambda _: next(watts), nvmlDeviceGetTemperature=lambda *_: 34,
    )  # fmt: skip
    found = child._idle(Sampler(nvml, None))
    assert found["power_w"] == pytest.approx(80, abs=1)  # twelve or thirteen samples
    assert (found["sm_clock_mhz"], found["temperature_c"], found["throttle"]) == (345, 34, None)
    assert child._idle(None) is None

"""The measuring process of `ftbench probe` on the CPU."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("torch", reason="training libraries are not installed")

import torch

from ftbench.doctor import probe as probing
from ftbench.store import rundir
from ftbench.worker import probe, probe_links
from ftbench.worker.probe import Document

CPU = torch.device("cpu")
PLENTY = 4 * 2**30


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(probe, "SIZES", {"cpu": (64, 128)})
    monkeypatch.setattr(probe, "BEST_S", 0.06)
    monkeypatch.setattr(probe, "LASTING_S", 0.15)


def test_the_faster_half_is_not_its_single_fastest():
    assert probe.faster_half([1.0, 2.0, 3.0, 9.0, 9.0]) == 2.0
    assert probe.faster_half([5.0]) == 5.0


def test_the_best_time_of_a_call_is_the_time_it_takes(monkeypatch):
    monkeypatch.setattr(probe, "BEST_S", 0.2)
    assert probe.best(lambda: time.sleep(0.002)) == pytest.approx(0.0022, rel=0.2)


@pytest.mark.parametrize("kind", probe.ON_CPU)
def test_products_have_a_best_and_a_sustained_rate(quick, kind, monkeypatch):
    monkeypatch.setattr(probe, "MOST_CALLS", 0)  # both sizes, also on a loaded machine
    found = probe.product(kind, CPU, 3600, PLENTY)
    assert [entry["size"] for entry in found["sizes"]] == [64, 128]
    assert found["best_tflops"] == max(entry["tflops"] for entry in found["sizes"]) > 0
    assert found["best_size"] in (64, 128)
    assert found["sustained_tflops"] > 0


def test_matrices_that_do_not_fit_are_skipped(quick):
    found = probe.product("fp32", CPU, 3600, 64 * 64 * probe.ELEMENT_BYTES)
    assert [entry["size"] for entry in found["sizes"]] == [64]


def test_slow_sizes_are_skipped(quick, monkeypatch):
    monkeypatch.setattr(probe, "SIZES", {"cpu": (64, 65536)})
    found = probe.product("fp32", CPU, 0, float("inf"))
    assert [entry["size"] for entry in found["sizes"]] == [64]


def test_parent_and_child_use_the_same_data_types():
    assert tuple(probe.KINDS) == probing.PRECISIONS
    assert set(probe.ON_CPU) <= set(probe.KINDS)


@pytest.mark.parametrize(
    ("capability", "without"), [((7, 0), {"bf16", "tf32", "fp8", "int8"}), ((8, 0), {"fp8"}), ((9, 0), set())]
)
def test_unsupported_data_types_are_skipped(monkeypatch, capability, without):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(probe, "SIZES", {"cuda": ()})
    for name in probe.KINDS:
        with pytest.raises((RuntimeError, ValueError)) as error:
            probe.product(name, torch.device("cuda", 0), 60, PLENTY)
        assert ("needs compute capability" in str(error.value)) == (name in without)


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_eight_bit_products_use_column_major_matrices(name):
    """The same calls as on a GPU; a CPU can make them, slowly."""
    out = probe.operands(name, 64, CPU)()
    assert out.shape == (64, 64)
    assert out.dtype == {"fp8": torch.bfloat16, "int8": torch.int32}[name]
    assert out.float().std() > 0


def test_memory_bandwidth_counts_bytes_read_and_written(quick):
    found = probe.memory(CPU, 8 * 4 * 2**20)
    assert found["tensor_bytes"] == 4 * 2**20
    assert found["copy_gbs"] > 0
    assert found["triad_gbs"] > 0


# --- the document ----------------------------------------------------------------------------------------------------


def test_a_failed_item_gives_a_note(tmp_path):
    def fail():
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED\nmore")

    document = Document(tmp_path / "out.json", 9)
    assert document.item("fp8", 1, fail) is None
    assert document.item("int8", 1, lambda: 5) == 5
    assert document.item("memory", 10, lambda: pytest.fail("begun")) is None
    assert document.figures["notes"] == [
        "fp8: not measured: CUBLAS_STATUS_NOT_SUPPORTED", "memory: not measured: no time left"
    ]  # fmt: skip


def test_the_file_names_the_current_item(tmp_path):
    path = tmp_path / "out.json"
    assert Document(path, 9).item("bf16", 1, lambda: rundir.read_json(path)["doing"]) == "bf16"


# --- several processes -----------------------------------------------------------------------------------------------


def attempts(monkeypatch, *ends):
    """Stands in for the ranks: each attempt ends in the next way; gives the environments they were started with."""
    seen, left = [], list(ends)

    def attempt(world, backend, environment, timeout_s):
        seen.append(environment.get("NCCL_P2P_DISABLE"))
        reason = left.pop(0)
        return {"gpus": world, "all_reduce_bus_gbs": None if reason else 40.0}, reason

    monkeypatch.setattr(probe_links, "attempt", attempt)
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    return seen


def test_a_hang_is_repeated_without_peer_access(monkeypatch):
    seen = attempts(monkeypatch, "did not finish", None)
    found, notes = probe_links.self_test(2, "nccl", 20)
    assert seen == [None, "1"]
    assert found["all_reduce_bus_gbs"] == 40
    assert found["peer_access"] is False
    assert "NCCL_P2P_DISABLE=1" in notes[1]


@pytest.mark.slow
def test_two_processes_measure_an_all_reduce(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(probe_links, "TIMEOUT_S", 240.0)  # two processes import torch, maybe on a loaded machine
    found, notes = probe_links.self_test(2, "gloo", 1000)
    assert notes == []
    assert found["gpus"] == 2
    assert found["all_reduce_bus_gbs"] > 0


def hang(rank, *_):
    time.sleep(600 if rank else 0)


def fail(rank, *_):
    raise SystemExit(time.sleep(600) if rank else "no NCCL here")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "reason"), [(hang, "did not finish within 2 s and were killed: a collective or a link hangs"),
                         (fail, "failed: process 0 terminated with exit code 1")],
)  # fmt: skip
def test_ranks_that_hang_or_fail_are_killed(monkeypatch, rank, reason):
    monkeypatch.setattr(probe_links, "_rank", rank)
    assert probe_links.attempt(2, "gloo", {}, 2.0 if rank is hang else 100.0)[1] == reason
    assert not torch.multiprocessing.active_children()


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
    monkeypatch.setattr(probe, "product", measure)
    monkeypatch.setattr(probe, "memory", lambda place, free: {"copy_gbs": free})
    monkeypatch.setattr(probe, "_host_link", lambda *_: {"to_device_gbs": 1.0})
    monkeypatch.setattr(probe, "_launch_us", lambda *_: 4.0)
    monkeypatch.setattr(
        probe_links, "self_test", lambda gpus, backend, left: ({"gpus": gpus, "via": backend}, ["a note"])
    )
    document = Document(tmp_path / "out.json", 60)
    probe.measure(document, torch.device("cuda", 0))
    found = document.figures
    assert found["device"] == {"kind": "cuda", "name": "NVIDIA H200", "gpus": 2}
    assert {name for name, product in found["products"].items() if product} == set(probe.KINDS) - {"int8"}
    assert found["memory"] == {"copy_gbs": 2**34}
    assert (found["host_link"], found["launch_us"]) == ({"to_device_gbs": 1.0}, 4.0)
    assert found["links"] == {"gpus": 2, "via": "nccl"}
    assert found["notes"] == ["int8: not measured: CUBLAS_STATUS_NOT_SUPPORTED", "a note"]

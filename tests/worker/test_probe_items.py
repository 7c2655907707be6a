"""The measuring process of `ftbench probe` on the CPU."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("torch", reason="training libraries are not installed")

import torch

from ftbench.doctor import probe as probing
from ftbench.store import rundir
from ftbench.worker import probe
from ftbench.worker.probe import Document

CPU = torch.device("cpu")
PLENTY = 4 * 2**30


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(probe, "SIZES", {"cpu": (64, 128)})
    monkeypatch.setattr(probe, "BEST_S", 0.06)
    monkeypatch.setattr(probe, "LASTING_S", 0.15)


def test_the_best_time_of_a_call_is_the_time_it_takes(monkeypatch):
    monkeypatch.setattr(probe, "BEST_S", 0.2)
    assert probe.best(lambda: time.sleep(0.002)) == pytest.approx(0.0022, rel=0.2)


@pytest.mark.parametrize("kind", probe.ON_CPU)
def test_products_have_a_best_and_a_sustained_rate(quick, kind):
    found = probe.product(kind, CPU, PLENTY)
    assert found["best_size"] in (64, 128)
    assert found["best_tflops"] > 0
    assert found["sustained_tflops"] > 0


@pytest.mark.parametrize(("sizes", "calls", "free"), [((64, 128), 0, 64 * 64 * probe.ELEMENT_BYTES),
                                                      ((64, 65536), 2**40, float("inf"))])  # fmt: skip
def test_slow_sizes_and_matrices_that_do_not_fit_are_skipped(quick, monkeypatch, sizes, calls, free):
    monkeypatch.setattr(probe, "SIZES", {"cpu": sizes})
    monkeypatch.setattr(probe, "MOST_CALLS", calls)
    assert probe.product("fp32", CPU, free)["best_size"] == 64


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
            probe.product(name, torch.device("cuda", 0), PLENTY)
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
    assert found["copy_gbs"] > 0
    assert found["triad_gbs"] > 0


# --- the document ----------------------------------------------------------------------------------------------------


def test_a_failed_item_gives_a_note_and_the_file_names_the_current_item(tmp_path):
    def fail():
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED\nmore")

    path = tmp_path / "out.json"
    document = Document(path)
    assert document.item("fp8", fail) is None
    assert document.item("int8", lambda: rundir.read_json(path)["doing"]) == "int8"
    assert document.figures["notes"] == ["fp8: not measured: CUBLAS_STATUS_NOT_SUPPORTED"]


def test_items_of_a_gpu_are_stored_with_notes_of_failures(monkeypatch, tmp_path):
    def measure(name, *_):
        if name == "int8":
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")
        return {"best_tflops": 1.0}

    stand_ins = {
        "empty_cache": lambda: None, "get_device_name": lambda _: "NVIDIA H200",
        "mem_get_info": lambda _: (2**34, 2**35),
    }  # fmt: skip
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(probe, "product", measure)
    monkeypatch.setattr(probe, "memory", lambda place, free: {"copy_gbs": free})
    monkeypatch.setattr(probe, "_host_link", lambda *_: {"to_device_gbs": 1.0})
    monkeypatch.setattr(probe, "_launch_us", lambda *_: 4.0)
    document = Document(tmp_path / "out.json")
    probe.measure(document, torch.device("cuda", 0), {"memory_gb": 33.0})
    found = document.figures
    assert found["device"] == {"kind": "cuda", "name": "NVIDIA H200"}
    assert {name for name, product in found["products"].items() if product} == set(probe.KINDS) - {"int8"}
    assert found["memory"] == {"copy_gbs": 2**34}
    assert (found["host_link"], found["launch_us"]) == ({"to_device_gbs": 1.0}, 4.0)
    assert found["capacity"] == {"total_gb": 32.0, "driver_total_gb": 33.0}
    assert found["notes"] == ["int8: not measured: CUBLAS_STATUS_NOT_SUPPORTED"]

"""`ftbench probe` with a mock child process."""

from __future__ import annotations

import copy
import importlib.util
import sys
import types
from pathlib import Path

import pytest

from ftbench import cli
from ftbench.doctor import probe
from ftbench.errors import FtbenchError, MissingError
from ftbench.launch import process
from ftbench.store import machine, rundir
from ftbench.store.rundir import first_gpu

H200 = {
    "name": "NVIDIA H200", "uuid": "GPU-1", "driver": "580.1", "power_limit_w": 700.0, "sm_clock_max_mhz": 1980,
    "foreign_processes": 0, "memory_used_before_gb": 0.6,
}  # fmt: skip
PRODUCT = {"best_tflops": 800.0, "best_size": 8192, "sustained_tflops": 790.0}
MEASURED = {
    "notes": [],
    "doing": None,
    "device": {"kind": "cuda", "name": "NVIDIA H200"},
    "products": {"bf16": PRODUCT, "fp32": {**PRODUCT, "best_tflops": 50.0, "sustained_tflops": 49.9}, "fp8": None},
    "memory": {"copy_gbs": 4300.0, "triad_gbs": 4250.0},
    "host_link": {"to_device_gbs": 55.0, "to_host_gbs": 54.0},
    "launch_us": 4.2,
    "capacity": {"total_gb": 139.8, "driver_total_gb": 140.4},
}


@pytest.fixture
def child(monkeypatch):
    """Replace the child process by one that writes `measured`."""

    def stand_in(measured=None, gpu=H200, code=0, state=None, said=""):
        described = {"gpu": gpu, "cpu": {"model": "AMD EPYC", "threads": 2}, "versions": {"torch": "2.11.0"}}

        def run_child(argv, env, log, asked, watch):
            assert watch() is None
            if measured is not None:
                rundir.write_json(Path(argv[4]), measured)
            log.write_text(said)
            stop = process.Stop(state, "was stopped after 60 s") if state else None
            return process.Exit(code, stop, False, 30.0)

        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
        monkeypatch.setattr(machine, "describe", lambda: described)
        monkeypatch.setattr(process, "run_child", run_child)

    return stand_in


def changed(**changes):
    return {**copy.deepcopy(MEASURED), **changes}


def test_the_file_name_contains_gpu_and_uuid(child, tmp_path):
    child(MEASURED)
    document, path = probe.probe(tmp_path)
    assert path.parent == tmp_path / "probe"
    assert path.name == probe.file_name({"gpu": H200, "cpu": {"model": "AMD EPYC"}})
    assert path.name.startswith("nvidia-h200-")
    assert rundir.read_json(path) == document
    assert list(path.parent.iterdir()) == [path]
    assert document["schema"] == 1
    assert document["date"].endswith("Z")
    assert first_gpu(document["machine"])["uuid"] == "GPU-1"


@pytest.mark.parametrize(
    ("ended", "reason"),
    [({"state": "timeout", "code": -15}, "stopped after 60 s"), ({"code": -11, "said": "Killed\n"}, "Killed")],
)
def test_measurements_are_kept_if_the_child_is_killed(child, tmp_path, ended, reason):
    child(changed(doing="launch_us", notes=["a"]), **ended)
    document, path = probe.probe(tmp_path)
    assert document["products"]["bf16"] == PRODUCT
    assert document["notes"][0] == "a"
    assert document["notes"][1].startswith("launch_us: not measured")
    assert reason in document["notes"][1]
    assert path.is_file()


@pytest.mark.parametrize("left", [None, {"notes": [], "doing": "bf16", "products": {}}])
def test_a_child_without_measurements_is_an_error_with_its_last_line(child, tmp_path, left):
    child(left, code=1, said="Traceback\nImportError: libcudart.so.13\n")
    with pytest.raises(FtbenchError, match=r"libcudart.so.13.*nothing was measured"):
        probe.probe(tmp_path)
    assert list((tmp_path / "probe").iterdir()) == []


def test_a_child_is_stopped_after_a_minute(monkeypatch, tmp_path):
    clock = iter([100.0, 159.0, 161.0])
    monkeypatch.setattr(process, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    seen = []

    def run_child(argv, env, log, asked, watch):
        seen.extend([watch(), watch()])
        log.write_text("")
        return process.Exit(-15, seen[-1], False, 61.0)

    monkeypatch.setattr(process, "run_child", run_child)
    with pytest.raises(FtbenchError, match="was stopped after 60 s; nothing was measured"):
        probe._measure(tmp_path)
    assert seen[0] is None


@pytest.mark.torch
def test_a_read_only_folder_is_an_error_before_measuring(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "run_child", lambda *_: pytest.fail("was started"))
    (tmp_path / "file").write_text("")
    with pytest.raises(MissingError, match="write elsewhere"):
        probe.probe(tmp_path / "file")


@pytest.mark.parametrize(("used", "others"), [(0.6, 2), (8.0, 0)])
def test_a_gpu_that_is_not_free_gives_a_note(child, tmp_path, used, others):
    child(MEASURED, gpu=H200 | {"memory_used_before_gb": used, "foreign_processes": others})
    assert probe.probe(tmp_path)[0]["notes"][0].startswith(f"the GPU was not free: {used:.1f} GiB in use")


# --- the ceiling -----------------------------------------------------------------------------------------------------


def kept(store, name="NVIDIA H200", kind="cuda", file="a", **rates):
    products = {precision: {"best_tflops": rate} for precision, rate in rates.items()}
    (store / "probe").mkdir(parents=True, exist_ok=True)
    document = {"machine": {"gpu": {"name": name}}, "device": {"kind": kind}, "products": {**products, "int8": None}}
    rundir.write_json(store / "probe" / f"{file}.json", document)


def rates(store, name):
    return machine.ceilings(store, name).get("tflops", {})


def test_without_measurements_there_is_no_peak_rate(tmp_path):
    assert rates(tmp_path, "NVIDIA H200") == {}
    kept(tmp_path, file="a", bf16=790.0)
    kept(tmp_path, file="cpu", kind="cpu", fp32=0.2)
    (tmp_path / "probe" / "torn.json").write_text("{")
    (tmp_path / "probe" / "list.json").write_text("[1]")
    assert rates(tmp_path, "NVIDIA H200") == {"bf16": 790.0}
    assert rates(tmp_path, "NVIDIA H100") == {}


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["ftbench", "probe", "--out", str(tmp_path), *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return call


def test_the_table_shows_all_results_and_the_file(child, command):
    child(MEASURED)
    code, out, _ = command()
    assert code == 0
    shown = (
        "NVIDIA H200", "torch 2.11.0", "800", "790", "4,300 GB/s", "to host 54 GB/s", "4.2 µs", "of (NVML) 140.4 GiB",
        ".json",
    )  # fmt: skip
    for part in shown:
        assert part in out, part
    assert "fp8" not in out


def test_the_table_of_a_cpu_has_no_gpu_rows(child, command):
    cpu = {
        "notes": ["launch_us: not measured: needs a GPU"],
        "device": {"kind": "cpu", "threads": 2},
        "products": {"fp32": {**PRODUCT, "best_tflops": 0.19, "sustained_tflops": 0.188}},
    }
    child(cpu, gpu=None)
    code, out, _ = command()
    assert code == 0
    assert "AMD EPYC, 2 threads" in out
    assert "0.19" in out
    assert "note: launch_us: not measured" in out
    assert "None" not in out

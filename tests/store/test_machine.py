"""machine.json: the machine and the version of ftbench."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from ftbench.store import machine

ROOT = Path(__file__).resolve().parents[2]


def test_a_checkout_is_named_by_its_commit(monkeypatch):
    monkeypatch.delenv("FTBENCH_COMMIT", raising=False)
    head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    expected = head.stdout.strip() or None  # a copy without history lacks a commit
    assert (machine.commit() or "").removesuffix("-dirty") == (expected or "")


def test_a_commit_can_be_told_where_the_history_is_not_there(monkeypatch):
    monkeypatch.setenv("FTBENCH_COMMIT", "abc123")
    assert machine.commit() == "abc123"


def test_a_checkout_whose_git_fails_has_no_commit(tmp_path, monkeypatch):
    monkeypatch.delenv("FTBENCH_COMMIT", raising=False)
    (tmp_path / "src/ftbench/store").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "src/ftbench/store/machine.py"))
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "git").write_text("#!/bin/sh\necho abc; exit 1\n")
    (tmp_path / "git").chmod(0o755)
    assert machine.commit() is None
    (tmp_path / "git").write_text("#!/bin/sh\necho abc\n")
    assert machine.commit() == "abc"


def test_a_gpu_that_says_nothing_of_a_figure_has_it_unknown():
    class Driver:
        """A fake NVML with a name and two limits in milliwatts."""

        class NVMLError(Exception):
            pass

        NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU, NVML_MEMORY_ERROR_TYPE_UNCORRECTED = range(4)

        def nvmlDeviceGetName(self, handle):
            return b"NVIDIA H200"

        def nvmlSystemGetDriverVersion(self):
            return "570.1"

        def nvmlDeviceGetPowerManagementLimitConstraints(self, handle):
            return [200_000, 700_000]

        def nvmlDeviceGetPowerUsage(self, handle):
            return 75_000

        def nvmlDeviceGetTemperature(self, handle, sensor):
            raise self.NVMLError

    found = machine._gpu(Driver(), object())
    known = {key: value for key, value in found.items() if value is not None}
    assert known == {"name": "NVIDIA H200", "driver": "570.1", "power_limit_max_w": 700.0, "mig": False}


def test_short_commit_keeps_the_mark_of_modified_files():
    assert machine.short("a" * 40) == "a" * 12
    assert machine.short("a" * 40 + "-dirty") == "a" * 12 + "-dirty"
    assert machine.short("abcd1234-dirty") == "abcd1234-dirty"
    assert machine.short(None) == "unknown"


def test_of_two_probes_the_highest_rates_and_the_smallest_memory_count(tmp_path):
    (tmp_path / "probe").mkdir()
    for name, rate, total in (("a", 700, 79.2), ("b", 750, 78.5)):
        document = {
            "device": {"kind": "cuda"}, "machine": {"gpus": [{"name": "NVIDIA H100 80GB HBM3"}]},
            "memory": {"copy_gbs": 4 * rate}, "products": {"bf16": {"best_tflops": rate}}, "launch_us": rate / 100,
            "capacity": {"total_gb": total, "driver_total_gb": total + 0.5},
        }  # fmt: skip
        (tmp_path / "probe" / f"{name}.json").write_text(json.dumps(document))
    assert machine.ceilings(tmp_path, "NVIDIA H100 80GB HBM3") == {
        "tflops": {"bf16": 750}, "memory_gbs": 3000, "launch_us": 7.0, "usable_gb": 78.5, "driver_total_gb": 79.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("visible", "found"), [("", []), ("1", [1]), ("0, 1", [0, 1]), ("GPU-a, GPU-b", ["GPU-a", "GPU-b"])]
)
def test_visible_gpus_may_be_separated_by_spaces(monkeypatch, visible, found):
    nvml = SimpleNamespace(nvmlDeviceGetHandleByUUID=str, nvmlDeviceGetHandleByIndex=int, NVMLError=OSError)
    monkeypatch.setattr(machine, "nvml_module", lambda: nvml)
    monkeypatch.setattr(machine, "_gpu", lambda _, handle: handle)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.gpus(count=2) == found

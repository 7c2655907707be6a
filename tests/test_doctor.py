"""Tests of `ftbench doctor` with the facts of many machines."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from contextlib import nullcontext
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from commands import write_spec
from ftbench import cli
from ftbench.doctor import checks, diagnosis
from ftbench.doctor.checks import Facts
from ftbench.launch import checks as launch_checks
from ftbench.launch import trl
from ftbench.spec.methods import METHODS

GPU = {
    "name": "NVIDIA H200", "uuid": "GPU-1", "driver": "580.159.04", "cuda": 13000, "compute_capability": [9, 0],
    "memory_gb": 140.4, "memory_used_before_gb": 0.6, "foreign_processes": 0, "power_limit_w": 700.0,
    "power_limit_max_w": 700.0, "ecc_uncorrected": 0, "mig": False,
}  # fmt: skip
TORCH = {
    "torch": "2.11.0", "cuda": "13.0", "rocm": False, "works": True, "error": None,
    "devices": [{"name": "NVIDIA H200", "capability": [9, 0]}],
}  # fmt: skip
ON_CPU = TORCH | {"torch": "2.13.0+cpu", "cuda": None, "devices": [], "works": None}
NEEDS = [(Requirement("torch<2.14,>=2.8"), "train"), (Requirement("liger-kernel<0.9,>=0.8"), "liger")]


@pytest.fixture(autouse=True)
def _installed(monkeypatch):
    """Pretend that all packages and a compiler are installed."""
    monkeypatch.setattr(trl, "check_installed", lambda spec: None)
    monkeypatch.setattr(checks.shutil, "which", lambda name: f"/usr/bin/{name}")


def machine(gpu=(), torch=(), kernel="6.8", **env):
    """Return the facts of an H200 with these changes; `gpu=None` is a machine without a GPU."""
    described = {
        "ftbench": {"version": "0.1.0", "commit": None},
        "os": {"python": "3.12.3"},
        "gpu": None if gpu is None else {**GPU, **dict(gpu)},
    }
    return Facts(described, {**(ON_CPU if gpu is None else TORCH), **dict(torch)}, None, env, kernel)


def named(findings, name):
    return next(finding for finding in findings if finding.name == name)


# --- stack -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("torch", "liger", "verdicts", "fragment"),
    [
        ("2.13.0+cpu", "0.8.1", ("ok", "ok"), "2.13.0+cpu, within >=2.8,<2.14"),
        ("2.13.0rc1", None, ("ok", "n/a"), "within"),
        ("2.14.0", None, ("warn", "n/a"), "outside of the tested versions >=2.8,<2.14: pip install 'ftbench[train]'"),
        (None, "0.9.0", ("fail", "warn"), "training needs it: pip install 'ftbench[train]'"),
    ],
)
def test_versions_of_packages_are_compared_with_the_tested_ones(monkeypatch, torch, liger, verdicts, fragment):
    monkeypatch.setattr(checks, "requirements", lambda: NEEDS)
    installed = {name: version for name, version in {"torch": torch, "liger-kernel": liger}.items() if version}
    monkeypatch.setattr(checks.machine, "versions", lambda packages: installed)
    findings = checks.stack(machine())
    assert (named(findings, "torch").verdict, named(findings, "liger-kernel").verdict) == verdicts
    assert fragment in named(findings, "torch").text


@pytest.mark.parametrize(
    ("facts_of", "verdict", "fragment"),
    [
        (machine(), "ok", "a test kernel ran"),
        (machine(torch=ON_CPU), "fail", "built for the CPU"),
        (machine(torch={"works": False, "error": "no kernel image is available"}), "fail", "no kernel image"),
        (machine(torch={"devices": [], "works": None, "error": "The driver is too old"}), "fail", "too old"),
        (machine(gpu={"cuda": 12080}, torch={"works": False}), "fail", "the driver supports CUDA 12.8: update"),
        (machine(gpu=None), "ok", "for the CPU"),
        (machine(gpu=None, torch={"cuda": "13.0"}), "ok", "runs use the CPU"),
        (machine(gpu=None, torch={"torch": "2.11.0+rocm7.1", "rocm": True}), "fail", "Estimates for AMD GPUs"),
        (dataclasses.replace(machine(), torch={}, why_no_torch="ImportError: libcudart"), "n/a", "libcudart: pip"),
    ],
)
def test_torch_must_be_able_to_use_the_gpu(facts_of, verdict, fragment):
    found = named(checks.stack(facts_of), "torch build")
    assert (found.verdict, fragment in found.text) == (verdict, True), found


@pytest.mark.parametrize(
    ("torch", "within_s", "reason"),
    [
        ("import time; time.sleep(60)", 0.3, "torch did not answer within 0 s"),
        ("raise OSError('libtorch.so is gone')", 240, "torch ended with exit code 1: OSError: libtorch.so is gone"),
    ],
    ids=["hangs", "cannot be imported"],
)  # fmt: skip
def test_a_torch_that_hangs_or_fails_is_reported_with_the_reason(monkeypatch, tmp_path, torch, within_s, reason):
    (tmp_path / "torch.py").write_text(torch)
    monkeypatch.setattr(diagnosis.importlib.util, "find_spec", lambda name: name)
    path = f"{tmp_path}:{Path(diagnosis.__file__).parents[2]}"  # without what makes torch absent for other tests
    answer, why = diagnosis.inspect_torch({**os.environ, "PYTHONPATH": path}, within_s)
    assert answer == {}
    assert why.startswith(reason)


# --- GPU and methods -------------------------------------------------------------------------------------------------


def test_a_free_gpu_with_default_settings_is_ok():
    assert {finding.verdict for finding in checks.gpu(machine())} == {"ok"}


@pytest.mark.parametrize(
    ("name", "facts_of", "verdict", "fragment"),
    [
        ("GPU", machine(gpu=None), "n/a", "no NVIDIA driver"),
        ("GPU", machine(gpu=None, CUDA_VISIBLE_DEVICES=""), "n/a", "CUDA_VISIBLE_DEVICES=''"),
        ("GPU", machine(gpu=None, torch=TORCH), "warn", "stay empty"),
        ("GPU", machine(gpu={"name": "NVIDIA X1"}), "warn", "not in ftbench's table"),
        ("GPU", machine(gpu={"mig": True}), "warn", "MIG"),
        ("memory", machine(kernel="5.15.167-microsoft-standard-WSL2"), "warn", "Prefer No Sysmem Fallback"),
        ("other processes", machine(gpu={"foreign_processes": 2}), "warn", "2 other processes"),
        ("other processes", machine(gpu={"memory_used_before_gb": 8.0}), "warn", "8.0 GiB in use: stop"),
    ],
)  # fmt: skip
def test_unusual_settings_of_a_gpu_are_named(name, facts_of, verdict, fragment):
    found = named(checks.gpu(facts_of), name)
    assert (found.verdict, fragment in found.text) == (verdict, True), found


def test_every_method_has_a_verdict(monkeypatch):
    findings = checks.methods(machine())
    assert [finding.name for finding in findings] == list(METHODS)
    assert named(findings, "qlora").verdict == "ok"
    assert named(checks.methods(machine(gpu=None)), "unsloth").verdict == "n/a"

    def missing(_):
        raise checks.MissingError("pip install 'ftbench[train]'")

    monkeypatch.setattr(trl, "check_installed", missing)
    assert named(checks.methods(machine()), "lora").verdict == "n/a"
    assert named(checks.methods(dataclasses.replace(machine(), torch={})), "lora").verdict == "fail"


# --- host ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "names"),
    [
        ({"CUDA_LAUNCH_BLOCKING": "0", "TORCH_LOGS": ""}, []),
        ({"CUDA_LAUNCH_BLOCKING": "1", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
         ["CUDA_LAUNCH_BLOCKING=1", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"]),
    ],
)  # fmt: skip
def test_variables_that_change_measurements_are_named(tmp_path, environment, names):
    found = named(checks.host(tmp_path, {"HF_HUB_OFFLINE": "1", **environment}), "environment")
    assert found.verdict == ("warn" if names else "ok")
    assert all(name in found.text for name in names)


@pytest.mark.parametrize(
    ("error", "fragment"),
    [
        (None, ""), (urllib.error.HTTPError("u", 404, "", {}, None), ""),
        (urllib.error.URLError("Name or service not known"), "Name or service not known"),
        (ValueError("unknown url type"), "unknown url type"),
    ],
)  # fmt: skip
def test_the_reason_is_given_if_the_hub_does_not_answer(monkeypatch, error, fragment):
    def urlopen(request, timeout):
        assert (request.full_url, request.method) == ("https://mirror.example/", "HEAD")
        assert timeout <= 3
        if error:
            raise error
        return nullcontext()

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    verdict, text = launch_checks.reach({"HF_ENDPOINT": "https://mirror.example/"})
    assert (verdict, fragment in text) == ("warn" if fragment else "ok", True)


def test_a_wrong_port_of_the_hub_is_the_reason():
    verdict, text = launch_checks.reach({"HF_ENDPOINT": "https://mirror.example:abc"})
    assert (verdict, "nonnumeric port" in text) == ("warn", True)


def test_the_hub_check_has_a_time_limit(monkeypatch):
    monkeypatch.setattr(launch_checks, "WAIT_S", 0.1)
    answer = threading.Event()
    monkeypatch.setattr(launch_checks, "_connect", lambda endpoint: str(answer.wait()))
    assert launch_checks.reach({})[0] == "warn"
    assert not answer.is_set()
    answer.set()


def test_run_without_the_hub_ends_before_a_run_directory_exists(ftbench, tmp_path, monkeypatch):
    monkeypatch.setattr(launch_checks, "_connect", lambda endpoint: "no route")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    code, out, err = ftbench("run", "nobody/nothing", "--dataset", "alpaca", "--out", tmp_path / "out")
    assert (code, out, (tmp_path / "out").exists()) == (3, "", False)
    for words in (
        "nobody/nothing is not in the cache",
        "tatsu-lab/alpaca is not in the cache",
        "not reachable (no route)",
    ):
        assert words in err
    (tmp_path / "hub" / "models--nobody--nothing").mkdir(parents=True)
    assert "nobody/nothing" not in ftbench("run", "nobody/nothing", "--dataset", "alpaca", "--out", tmp_path)[2]


# --- the spec and the command ----------------------------------------------------------------------------------------


@pytest.fixture
def doctor(monkeypatch, capsys, tmp_path):
    """Return a function that runs the command with these facts."""

    def call(*arguments, facts_of=None, answer="ok"):
        monkeypatch.setattr(diagnosis, "gather", lambda: facts_of or machine())
        monkeypatch.setattr(launch_checks, "reach", lambda environment: (answer, "not reached (no route): …"))
        monkeypatch.setenv("FTBENCH_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(sys, "argv", ["ftbench", "doctor", "--out", str(tmp_path / "out"), *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return call


def test_doctor_reports_that_a_spec_can_run(doctor, tmp_path):
    code, out, _ = doctor(write_spec(tmp_path))
    assert code == 0
    assert out.splitlines()[-1].endswith("the spec can run here")


@pytest.mark.parametrize(
    ("parts", "facts_of", "hub", "fragment"),
    [
        ({"optimizations": {"fp8": "tensorwise"}}, machine(gpu=None), "ok", "optimizations.fp8 needs a GPU"),
        ({"optimizations": {"attention": "flash_attention_2"}}, machine(), "ok", "flash-attn is not installed"),
        ({"model": {"id": "Qwen/Qwen3-8B"}}, machine(), "warn", "Qwen/Qwen3-8B is not in the cache"),
        ({"dataset": {"name": "alpaca"}}, machine(), "n/a", "tatsu-lab/alpaca is not in the cache"),
    ],
)
def test_a_spec_that_cannot_run_gives_exit_code_3_and_the_reason(
    doctor, tmp_path, monkeypatch, parts, facts_of, hub, fragment
):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    code, out, _ = doctor(write_spec(tmp_path, **parts), "--json", facts_of=facts_of, answer=hub)
    document = json.loads(out)
    assert (code, document["can_run"], document["schema"]) == (3, False, 1)
    about = [finding for finding in document["findings"] if finding["area"] == "spec"]
    assert [finding for finding in about if fragment in finding["text"]], about
    assert {finding["verdict"] for finding in about} == {"fail"}


def test_a_file_with_too_few_rows_is_one_finding(doctor, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "a", "answer": "b"}\n' * 3)
    spec = write_spec(tmp_path, dataset={"name": "file", "path": str(tmp_path / "rows.jsonl"), "samples": 100})
    code, out, err = doctor(spec, "--json")
    (found,) = [finding for finding in json.loads(out)["findings"] if finding["area"] == "spec"]
    assert (code, err, found["verdict"]) == (3, "", "fail")
    assert "3 rows" in found["text"]


def test_a_run_needs_a_writable_disk_and_a_working_torch(doctor, tmp_path):
    spec = write_spec(tmp_path, launch={"mock": "ok"})
    assert doctor(spec)[0] == 0
    assert doctor(spec, facts_of=machine(torch=ON_CPU))[0] == 3
    (tmp_path / "file").write_text("")
    code, out, _ = doctor(spec, "--out", tmp_path / "file" / "runs")
    assert (code, "the spec cannot run here" in out) == (3, True)


def test_doctor_runs_on_this_machine(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "ftbench", "doctor", str(write_spec(tmp_path)), "--json", "--out", str(tmp_path)],
        capture_output=True, text=True, env={**copy.copy(os.environ), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    document = json.loads(done.stdout)
    assert {finding["area"] for finding in document["findings"]} == {"stack", "gpu", "methods", "host", "spec"}
    assert set(document["findings"][0]) == {"area", "name", "verdict", "text"}
    assert done.returncode == (0 if document["can_run"] else 3)
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("parts", "ended", "said"),
    [
        ({"model": {"id": "Qwen/Qwen3-8B", "weights": "random"}, "method": "full", "train": {"batch_size": 64}}, 3,
         "this will run out of memory"),
        ({"model": {"id": "Qwen/Qwen3-0.6B", "weights": "random"}}, 0, "expected: "),
    ],
)  # fmt: skip
def test_the_expected_memory_and_time_are_reported(doctor, tmp_path, parts, ended, said):
    code, out, _ = doctor(write_spec(tmp_path, **parts), "--json")
    texts = [each["text"] for each in json.loads(out)["findings"] if each["area"] == "spec"]
    assert (code, said in " ".join(texts)) == (ended, True)

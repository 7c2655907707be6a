"""Tests of `ftbench doctor` with the facts of many machines."""

from __future__ import annotations

import copy
import dataclasses
import json
import subprocess
import sys
import threading
import types
import urllib.error
import urllib.request
from contextlib import nullcontext
from pathlib import Path

import pytest

from commands import write_spec
from ftbench import cli
from ftbench.doctor import abilities, diagnosis, facts, gpu, host, stack
from ftbench.doctor.facts import Facts, Finding, Requirement, as_text
from ftbench.spec.methods import METHODS
from ftbench.spec.optimizations import Optimizations

GPU = {
    "name": "NVIDIA H200", "uuid": "GPU-1", "driver": "580.159.04", "cuda": 13000, "compute_capability": [9, 0],
    "memory_gb": 140.4, "memory_used_before_gb": 0.6, "foreign_processes": 0, "power_limit_w": 700.0,
    "power_limit_max_w": 700.0, "ecc_uncorrected": 0, "mig": False,
}  # fmt: skip
TORCH = {
    "torch": "2.11.0", "cuda": "13.0", "rocm": False, "works": True, "error": None,
    "arch_list": ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"],
    "devices": [{"name": "NVIDIA H200", "capability": [9, 0], "integrated": False}],
}  # fmt: skip
CLOCKS = {"application_clock_mhz": 1980, "default_clock_mhz": 1980, "throttle": 0x1}
ON_CPU = TORCH | {"torch": "2.13.0+cpu", "cuda": None, "arch_list": [], "devices": [], "works": None}
VERSIONS = {
    "torch": "2.11.0", "transformers": "5.17.0", "trl": "1.14.2", "triton": "3.6.0", "xformers": "0.0.35",
    "typer": "0.29.2",
}  # fmt: skip
NEEDS = [
    Requirement("typer>=0.15,<1"), Requirement("torch>=2.8,<2.14; extra == 'train'"),
    Requirement("trl>=1.12,<1.15; extra == 'train'"), Requirement("liger-kernel>=0.8,<0.9; extra == 'liger'"),
]  # fmt: skip
LIBRARIES = (
    "libbitsandbytes_cpu.so",
    "libbitsandbytes_cuda118.so",
    "libbitsandbytes_cuda128.so",
    "libbitsandbytes_cuda130.so",
)
MODULES = ("torch", "triton", "bitsandbytes")


@pytest.fixture(autouse=True)
def _installed(monkeypatch):
    """Pretend that all packages and a compiler are installed."""
    monkeypatch.setattr(abilities.trl, "check_installed", lambda spec: None)
    monkeypatch.setattr(abilities.shutil, "which", lambda name: f"/usr/bin/{name}")


def machine(
    gpu=(), torch=(), clocks=(), versions=(), files=LIBRARIES, modules=MODULES, needs=NEEDS, kernel="6.8", **env
):
    """Return the facts of an H200 with these changes; `gpu=None` is a machine without a GPU."""
    described = {
        "ftbench": {"version": "0.1.0", "commit": None},
        "os": {"python": "3.12.3"},
        "gpu": None if gpu is None else {**GPU, **dict(gpu)},
    }
    have = {**VERSIONS, **dict(versions)}
    return Facts(
        described, {} if gpu is None else {**CLOCKS, **dict(clocks)},
        {**(ON_CPU if gpu is None else TORCH), **dict(torch)}, None, env, list(needs), have.get,
        lambda name: name in modules, lambda package: list(files), kernel,
    )  # fmt: skip


def blackwell(**changes):
    changes = {"torch": {}, "gpu": {}, **changes}
    changes["gpu"] = {"name": "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "compute_capability": [12, 0],
                      "power_limit_w": 600.0, "power_limit_max_w": 600.0, **changes["gpu"]}  # fmt: skip
    return machine(**changes)


def named(findings, name):
    return next(finding for finding in findings if finding.name == name)


# --- bounds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "text", "inside"),
    [
        ("2.13.0+cpu", ">=2.8,<2.14", True), ("2.14.0", ">=2.8,<2.14", False), ("2.8", ">=2.8.0", True),
        ("2.10.0", ">=2.8", True), ("5.9.1", ">=5.10,<5.18", False), ("2026.10.9", ">=2026.10", True),
        ("0.19.0.dev1", "<0.19", False), ("1.0", "", True), ("1.5", "!=1.5", False), ("1.5", "==1.5.0", True),
        ("2.13.0rc1", ">=2.8,<2.14", True), ("1.5.1", "~=1.5.0", True), ("built by hand", ">=1", False),
    ],
)  # fmt: skip
def test_versions_are_compared_by_pep_440(version, text, inside):
    assert Requirement(f"package{text}").met_by(version) is inside


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("torch<2.14,>=2.8; extra == 'train'", ("torch", ">=2.8,<2.14", "train")),
        ('liger-kernel (>=0.8,<0.9) ; extra == "liger"', ("liger-kernel", ">=0.8,<0.9", "liger")),
        ("pandas-stubs; extra == 'dev'", ("pandas-stubs", "", "dev")),
        ("rich>=13.9", ("rich", ">=13.9", None)),
        ("uvicorn[standard]>=0.2", ("uvicorn", ">=0.2", None)),
    ],
)
def test_requirements_are_parsed(text, parts):
    need = Requirement(text)
    assert (need.name, need.bounds, need.extra) == parts


# --- stack -----------------------------------------------------------------------------------------------------------


def test_a_package_outside_its_bounds_is_a_warning():
    findings = stack.check(machine(versions={"trl": "1.15.0"}))
    assert named(findings, "torch").verdict == "ok"
    finding = named(findings, "trl")
    assert finding.verdict == "warn"
    assert "1.15.0 is outside of the tested versions >=1.12,<1.15" in finding.text
    assert "pip install 'ftbench[train]'" in finding.text


def test_a_missing_package_fails_only_if_training_needs_it():
    findings = stack.check(machine(versions={"torch": None}))
    assert named(findings, "torch").verdict == "fail"
    optional = named(findings, "liger-kernel")
    assert optional.verdict == "n/a"
    assert "pip install 'ftbench[liger]'" in optional.text


def test_versions_are_not_checked_without_bounds():
    assert named(stack.check(machine(needs=[])), "ftbench").verdict == "n/a"


@pytest.mark.parametrize(
    ("facts_of", "verdict", "fragment"),
    [
        (machine(), "ok", "a test kernel ran"),
        (machine(torch=ON_CPU), "fail", "built for the CPU"),
        (machine(torch={"works": False, "error": "no kernel image is available"}), "fail", "no kernel image"),
        (machine(torch={"devices": [], "error": "The driver is too old"}, gpu={}), "ok", "a test kernel ran"),
        (machine(torch={"devices": [], "works": None, "error": "The driver is too old"}), "fail", "too old"),
        (machine(gpu={"cuda": 12080}, torch={"works": False}), "fail", "the driver supports CUDA 12.8: update"),
        (machine(gpu=None), "ok", "for the CPU"),
        (machine(gpu=None, torch={"cuda": "13.0"}), "ok", "runs use the CPU"),
        (machine(gpu=None, torch={"torch": "2.11.0+rocm7.1", "rocm": True}), "fail", "Estimates for AMD GPUs"),
    ],
)
def test_torch_must_be_able_to_use_the_gpu(facts_of, verdict, fragment):
    found = named(stack.check(facts_of), "torch build")
    assert (found.verdict, fragment in found.text) == (verdict, True), found


def test_the_reason_is_given_if_torch_cannot_be_imported():
    silent = dataclasses.replace(machine(), torch={}, why_no_torch="ImportError: libcudart.so.13")
    found = named(stack.check(silent), "torch build")
    assert found.verdict == "n/a"
    assert "libcudart.so.13" in found.text


@pytest.mark.parametrize(
    ("cuda", "verdict", "fragment"),
    [("13.0", "ok", "13.0"), ("13.2", "warn", "another minor version"), ("12.6", "warn", "CUDA 12.6"),
     ("14.0", "fail", "11.8, 12.8, 13.0")],
)  # fmt: skip
def test_bitsandbytes_needs_kernels_for_the_major_cuda_version(cuda, verdict, fragment):
    facts_of = machine(torch={"cuda": cuda})
    found = stack.bitsandbytes(facts_of)
    assert (found[0], fragment in found[1]) == (verdict, True), found
    assert abilities.method(facts_of, "qlora")[0] == ("fail" if verdict == "fail" else "ok")


def test_an_overridden_build_of_bitsandbytes_is_a_warning():
    verdict, text = stack.bitsandbytes(machine(BNB_CUDA_VERSION="128"))
    assert verdict == "warn"
    assert "unset it" in text


def test_missing_compilers_are_named(monkeypatch):
    monkeypatch.setattr(abilities.shutil, "which", lambda name: None)
    assert "apt-get" in abilities.optimization(machine(), "compile", True)[1]
    assert "pip install triton" in abilities.optimization(machine(modules=("torch",)), "compile", True)[1]


# --- GPU -------------------------------------------------------------------------------------------------------------


def test_a_free_gpu_with_default_settings_is_ok():
    assert {finding.verdict for finding in gpu.check(machine())} == {"ok"}


@pytest.mark.parametrize(
    ("facts_of", "reason"),
    [(machine(gpu=None), "no NVIDIA driver"), (machine(gpu=None, CUDA_VISIBLE_DEVICES=""), "CUDA_VISIBLE_DEVICES=''")],
)  # fmt: skip
def test_a_missing_gpu_is_one_finding_with_its_reason(facts_of, reason):
    (found,) = gpu.check(facts_of)
    assert found.verdict == "n/a"
    assert reason in found.text


def test_a_gpu_without_nvml_is_a_warning():
    findings = gpu.check(machine(gpu=None, torch=TORCH))
    assert findings[0].verdict == "warn"
    assert "stay empty" in findings[0].text


@pytest.mark.parametrize(
    ("name", "facts_of", "verdict", "fragment"),
    [
        ("GPU", machine(gpu={"name": "NVIDIA X1"}), "warn", "not in ftbench's table"),
        ("memory", machine(torch={"devices": [{"name": "GB10", "capability": [12, 1], "integrated": True}]}), "warn",
         "share their memory"),
        ("memory", machine(gpu={"name": "NVIDIA GB10", "memory_gb": None}), "warn", "share their memory"),
        ("memory", machine(kernel="5.15-tegra"), "warn", "share their memory"),
        ("memory", machine(gpu={"memory_gb": None}), "n/a", "does not report"),
        ("WSL", machine(kernel="5.15.167-microsoft-standard-WSL2"), "warn", "Prefer No Sysmem Fallback"),
        ("MIG", machine(gpu={"mig": True}), "warn", "CUDA_VISIBLE_DEVICES=MIG-"),
        ("other processes", machine(gpu={"foreign_processes": 2}), "warn", "2 processes of others"),
        ("other processes", machine(gpu={"memory_used_before_gb": 8.0}), "warn", "8.00 GiB"),
        ("other processes", machine(gpu={"foreign_processes": None, "memory_used_before_gb": None}), "n/a", "report"),
        ("memory errors", machine(gpu={"ecc_uncorrected": 3}), "fail", "3 uncorrected"),
        ("memory errors", machine(gpu={"ecc_uncorrected": None}), "n/a", "not counted"),
        ("power limit", machine(gpu={"power_limit_w": 450.0}), "warn", "nvidia-smi -pl 700"),
        ("power limit", machine(gpu={"power_limit_w": None}), "n/a", "does not report"),
        ("clocks", machine(clocks={"application_clock_mhz": 1200}), "warn", "nvidia-smi -rac"),
        ("clocks", machine(clocks={"throttle": 0x2}), "warn", "nvidia-smi -rgc"),
        ("clocks", machine(clocks={"throttle": None}), "n/a", "does not report"),
    ],
)  # fmt: skip
def test_unusual_settings_of_a_gpu_are_named(name, facts_of, verdict, fragment):
    found = named(gpu.check(facts_of), name)
    assert (found.verdict, fragment in found.text) == (verdict, True), found


# --- NVML ------------------------------------------------------------------------------------------------------------


class NotSupported(Exception):
    pass


def nvml(**missing):
    def refuse(*_):
        raise NotSupported

    calls = {
        "nvmlDeviceGetApplicationsClock": lambda *_: 1755,
        "nvmlDeviceGetDefaultApplicationsClock": lambda *_: 1980,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda _: 0x1,
    }
    return types.SimpleNamespace(NVMLError=NotSupported, NVML_CLOCK_SM=1, **(calls | dict.fromkeys(missing, refuse)))


def test_clocks_are_read_and_unsupported_ones_are_none():
    assert facts.read_clocks(nvml(), object()) == {
        "application_clock_mhz": 1755, "default_clock_mhz": 1980, "throttle": 1,
    }  # fmt: skip
    assert facts.read_clocks(nvml(nvmlDeviceGetApplicationsClock=1), object())["application_clock_mhz"] is None


@pytest.mark.parametrize(("text", "version"), [("13.0", (13, 0)), (12080, (12, 8)), (None, None), ("", None)])
def test_both_spellings_of_a_cuda_version_are_parsed(text, version):
    assert facts.cuda_version(text) == version


@pytest.mark.torch
def test_torch_is_imported_in_a_child():
    pytest.importorskip("torch", reason="training libraries are not installed")
    answer, reason = facts.inspect_torch({**facts.os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert reason is None
    assert set(answer) == set(TORCH)


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
    monkeypatch.setattr(facts, "has", lambda name: True)
    path = f"{tmp_path}:{Path(facts.__file__).parents[2]}"  # without what makes torch absent for other tests
    answer, why = facts.inspect_torch({**facts.os.environ, "PYTHONPATH": path}, within_s)
    assert answer == {}
    assert why.startswith(reason)


# --- methods and optimizations ---------------------------------------------------------------------------------------


def test_every_method_and_every_choice_has_a_verdict():
    findings = abilities.check(machine())
    assert [finding.name for finding in findings if finding.area == "methods"] == list(METHODS)
    assert {"gradient_checkpointing", "compile", "fp8 rowwise", "attention sdpa"} <= {
        finding.name for finding in findings
    }
    assert all(len(finding.text) > 4 for finding in findings)


@pytest.mark.parametrize(
    ("key", "value", "facts_of", "verdict", "fragment"),
    [
        ("fp8", "rowwise", machine(), "ok", "works"),
        ("fp8", "rowwise", machine(gpu={"compute_capability": [8, 0]}), "n/a", "8.9"),
        ("fp8", "rowwise", machine(gpu=None), "n/a", "no GPU"),
        ("compile", True, machine(), "ok", "works"),
        ("compile", True, machine(modules=("torch",)), "n/a", "pip install triton"),
        ("attention", "flash_attention_2", machine(), "n/a", "flash-attn is not installed"),
        ("attention", "flash_attention_2", machine(gpu={"compute_capability": [7, 5]}), "n/a", "8.0"),
        ("attention", "flash_attention_3", blackwell(), "n/a", "Hopper"),
        ("attention", "flex_attention", machine(), "ok", "works"),
        ("attention", "flex_attention", machine(gpu=None), "n/a", "needs a GPU"),
        ("gradient_checkpointing", True, machine(gpu=None), "ok", "works"),
    ],
)
def test_an_optimization_works_or_its_answer_says_what_to_install(key, value, facts_of, verdict, fragment):
    found, text = abilities.optimization(facts_of, key, value)
    assert (found, fragment in text) == (verdict, True), text


def test_only_methods_say_how_to_install_torch(monkeypatch):
    def missing(_):
        raise abilities.MissingError("pip install 'ftbench[train]'")

    monkeypatch.setattr(abilities.trl, "check_installed", missing)
    findings = abilities.check(machine(modules=(), torch={}))
    assert {finding.verdict for finding in findings if finding.name in METHODS} == {"fail"}
    optional = [finding for finding in findings if finding.area == "optimizations"]
    assert {finding.verdict for finding in optional} == {"n/a"}
    assert "pip" not in " ".join(finding.text for finding in optional)


def test_findings_of_attention_start_with_its_key():
    names = {finding.name for finding in abilities.check(machine()) if finding.area == "optimizations"}
    assert {"attention eager", "attention sdpa", "attention cudnn"} <= names
    assert {name.split()[0] for name in names} <= set(Optimizations.model_fields)


# --- host ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def groups(tmp_path):
    """Return a function that writes control groups into files."""

    def make(entry="0::/a/b\n", **limits):
        (tmp_path / "entry").write_text(entry)
        for path, text in limits.items():
            file = tmp_path / "root" / path.replace("__", "/").replace("_max", ".max")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return tmp_path / "entry", tmp_path / "root"

    return make


def test_the_tightest_limit_of_all_parent_groups_counts(groups):
    where = groups(a__memory_max="1000\n", a__b__memory_max="max\n", memory_max="5000\n")
    assert host.memory_limit(*where) == 1000


def test_limits_of_a_container_are_read_at_the_root(groups):
    where = groups("0::/\n", memory_max="4096\n")
    assert host.memory_limit(*where) == 4096


def test_missing_limits_are_none(groups, tmp_path):
    where = groups(a__memory_max="max\n")
    assert host.memory_limit(*where) is None
    assert host.memory_limit(tmp_path / "none", tmp_path / "none") is None


@pytest.mark.parametrize(
    ("environment", "names"),
    [
        ({}, []), ({"CUDA_LAUNCH_BLOCKING": "0", "TORCH_LOGS": "", "NCCL_DEBUG": "WARN"}, []),
        ({"CUDA_LAUNCH_BLOCKING": "1", "NCCL_DEBUG": "INFO"}, ["CUDA_LAUNCH_BLOCKING", "NCCL_DEBUG"]),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, ["PYTORCH_CUDA_ALLOC_CONF"]),
        ({"TORCH_LOGS": "+dynamo"}, ["TORCH_LOGS"]),
    ],
)  # fmt: skip
def test_debug_variables_are_named_with_a_fix(environment, names):
    answers = host.debug_variables(environment)
    assert {verdict for verdict, _ in answers} == ({"warn"} if names else {"ok"})
    if names:
        assert [text.split("=")[0] for _, text in answers] == sorted(names, key=list(host.DEBUG).index)
        assert all("unset it" in text for _, text in answers)


def test_a_full_or_read_only_disk_fails(monkeypatch, tmp_path):
    assert host.disk(tmp_path / "not" / "yet", "move", 0.0)[0] == "ok"
    assert host.disk(tmp_path, "move", 1e9)[0] == "fail"
    assert host.disk(tmp_path, "move", 1e9, full="warn")[0] == "warn"
    (tmp_path / "file").write_text("")
    assert host.disk(tmp_path / "file" / "results", "move", 0.0)[0] == "fail"


@pytest.mark.parametrize("name", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_the_hub_is_not_contacted_offline(monkeypatch, name):
    monkeypatch.setattr(host, "_connect", lambda endpoint: pytest.fail("asked"))
    verdict, text = host.hub({name: "1"})
    assert verdict == "n/a"
    assert name in text


@pytest.mark.parametrize(
    ("error", "fragment"),
    [
        (None, ""), (urllib.error.HTTPError("u", 404, "", {}, None), ""),
        (urllib.error.HTTPError("u", 403, "", {}, None), "HTTP 403"),
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
    verdict, text = host.hub({"HF_ENDPOINT": "https://mirror.example/"})
    assert (verdict, fragment in text) == ("warn" if fragment else "ok", True)


def test_the_hub_check_has_a_time_limit(monkeypatch):
    monkeypatch.setattr(host, "HUB_S", 0.1)
    answer = threading.Event()
    monkeypatch.setattr(host, "_connect", lambda endpoint: str(answer.wait()))
    assert host.hub({})[0] == "warn"
    assert not answer.is_set()
    answer.set()


# --- the spec and the command ----------------------------------------------------------------------------------------


@pytest.fixture
def doctor(monkeypatch, capsys, tmp_path):
    """Return a function that runs the command with these facts."""

    def call(*arguments, facts_of=None, hub="ok"):
        monkeypatch.setattr(diagnosis, "gather", lambda: facts_of or machine())
        monkeypatch.setattr(host, "hub", lambda environment: (hub, "not reached (no route): …"))
        monkeypatch.setattr(abilities.trl, "check_installed", lambda spec: None)
        monkeypatch.setenv("FTBENCH_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(sys, "argv", ["ftbench", "doctor", "--out", str(tmp_path / "out"), *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return call


def test_without_a_spec_the_exit_code_is_0(doctor):
    code, out, _ = doctor(facts_of=machine(gpu={"ecc_uncorrected": 3}, torch=ON_CPU))
    assert code == 0
    assert "spec" not in out.splitlines()[-1]
    assert "2 fail" in out.splitlines()[-1]
    for area in ("stack", "gpu", "methods", "optimizations", "host"):
        assert area in out.splitlines()


def test_doctor_reports_that_a_spec_can_run(doctor, tmp_path):
    code, out, _ = doctor(write_spec(tmp_path))
    assert code == 0
    assert out.splitlines()[-1].endswith("the spec can run here")


@pytest.mark.parametrize(
    ("parts", "facts_of", "hub", "fragment"),
    [
        ({"optimizations": {"fp8": "rowwise"}}, machine(gpu=None), "ok", "optimizations.fp8 needs a GPU"),
        ({"optimizations": {"attention": "flash_attention_2"}}, machine(), "ok", "flash-attn is not installed"),
        ({"method": "qlora"}, machine(files=()), "ok", "bitsandbytes has kernels for no CUDA version"),
        ({}, machine(torch=ON_CPU), "ok", "built for the CPU"),
        ({}, machine(torch={"works": False}), "ok", "update the driver"),
        ({"model": {"id": "Qwen/Qwen3-8B"}}, machine(), "warn", "Qwen/Qwen3-8B is not in the cache"),
        ({"dataset": {"name": "alpaca"}}, machine(), "n/a", "tatsu-lab/alpaca is not in the cache"),
        ({"dataset": {"name": "file", "path": "none.jsonl"}}, machine(), "ok", "no such file"),
    ],
)
def test_a_spec_that_cannot_run_gives_exit_code_3_and_the_reason(doctor, tmp_path, parts, facts_of, hub, fragment):
    facts_of.environment["HF_HOME"] = str(tmp_path / "hf")
    code, out, _ = doctor(write_spec(tmp_path, **parts), "--json", facts_of=facts_of, hub=hub)
    document = json.loads(out)
    assert (code, document["can_run"]) == (3, False)
    about = [finding for finding in document["findings"] if finding["area"] == "spec"]
    assert [finding for finding in about if fragment in finding["text"]], about
    assert len({finding["text"] for finding in about}) == len(about)
    assert {finding["verdict"] for finding in about} == {"fail"}


def test_a_mock_needs_no_gpu_and_no_hub(doctor, tmp_path):
    spec = write_spec(tmp_path, model={"id": "Qwen/Qwen3-8B"}, launch={"mock": "ok"})
    assert doctor(spec, facts_of=machine(torch=ON_CPU), hub="warn")[0] == 0


def test_a_mock_needs_a_writable_disk(doctor, tmp_path):
    (tmp_path / "file").write_text("")
    code, out, _ = doctor(write_spec(tmp_path, launch={"mock": "ok"}), "--out", tmp_path / "file" / "runs")
    assert (code, "the spec cannot run here" in out) == (3, True)


def test_weights_in_the_cache_need_no_hub(doctor, tmp_path):
    facts_of = machine(HF_HOME=str(tmp_path / "hf"))
    (tmp_path / "hf" / "hub" / "models--Qwen--Qwen3-8B").mkdir(parents=True)
    code, _, _ = doctor(write_spec(tmp_path, model={"id": "Qwen/Qwen3-8B"}), facts_of=facts_of, hub="warn")
    assert code == 0


def test_weights_larger_than_the_disk_are_reported(doctor, tmp_path, monkeypatch):
    monkeypatch.setattr(host, "free_gb", lambda path: 10.0)
    spec = write_spec(tmp_path, model={"id": "Qwen/Qwen3-8B", "weights": "random"})
    code, out, _ = doctor(spec)
    assert code == 3
    assert "GiB, but only 10.0 GiB are free: set FTBENCH_CACHE" in " ".join(out.split())


def test_an_invalid_spec_is_an_error(doctor, tmp_path):
    code, out, err = doctor(write_spec(tmp_path, train={"batch_sise": 1}))
    assert (code, out) == (2, "")
    assert "did you mean batch_size?" in err


def test_set_changes_the_checked_spec(doctor, tmp_path):
    code, _, _ = doctor(write_spec(tmp_path), "--set", "optimizations.fp8=rowwise", facts_of=machine(gpu=None))
    assert code == 3


def test_json_is_one_document_of_findings(doctor):
    code, out, _ = doctor("--json")
    document = json.loads(out)
    assert (code, document["can_run"], document["schema"]) == (0, None, 1)
    assert {finding["verdict"] for finding in document["findings"]} <= {"ok", "warn", "fail", "n/a"}
    assert set(document["findings"][0]) == {"area", "name", "verdict", "text"}


def test_long_sentences_are_wrapped():
    lines = as_text([Finding("gpu", "power limit", "warn", "word " * 60)], 90).splitlines()
    assert lines[0] == "gpu"
    assert lines[1].startswith("  warn  power limit")
    assert len(lines) > 4
    assert all(len(line) <= 90 for line in lines)


def test_equal_findings_of_one_optimization_are_merged():
    refused = "needs a GPU of compute capability 8.9"
    findings = [Finding("optimizations", f"fp8 {value}", "n/a", refused) for value in ("rowwise", "te-mxfp8")]
    findings += [Finding("optimizations", "attention sdpa", "ok", "works"),
                 Finding("optimizations", "attention cudnn", "n/a", refused),
                 Finding("methods", "fp8", "ok", "works")]  # fmt: skip
    assert as_text(abilities.merged(findings)).splitlines() == [
        "optimizations", f"  n/a  fp8              {refused}", "  ok   attention sdpa   works",
        f"  n/a  attention cudnn  {refused}", "", "methods", "  ok  fp8  works",
    ]  # fmt: skip


@pytest.mark.parametrize("module", ["ftbench.doctor.diagnosis", "ftbench.probe.probing"])
def test_no_training_library_is_imported(module):
    code = f"import sys, {module}; print(sorted({{'torch', 'transformers', 'pandas'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_doctor_runs_on_this_machine(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "ftbench", "doctor", str(write_spec(tmp_path)), "--json", "--out", str(tmp_path)],
        capture_output=True, text=True, env={**copy.copy(facts.os.environ), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    document = json.loads(done.stdout)
    assert {finding["area"] for finding in document["findings"]} == {
        "stack", "gpu", "methods", "optimizations", "host", "spec",
    }  # fmt: skip
    assert done.returncode == (0 if document["can_run"] else 3)
    assert done.stderr == ""


# --- memory and time -------------------------------------------------------------------------------------------------


def test_a_spec_that_runs_out_of_memory_is_a_failure(doctor, tmp_path):
    large = {"model": {"id": "Qwen/Qwen3-8B", "weights": "random"}, "method": "full", "train": {"batch_size": 64}}
    code, out, _ = doctor(write_spec(tmp_path, **large), "--json")
    (found,) = [each for each in json.loads(out)["findings"] if each["name"] == "memory and time"]
    assert (code, found["verdict"]) == (3, "fail")
    assert "this will run out of memory" in found["text"]


def test_the_expected_memory_and_time_are_reported(doctor, tmp_path):
    small = {"model": {"id": "Qwen/Qwen3-0.6B", "weights": "random"}}
    code, out, _ = doctor(write_spec(tmp_path, **small), "--json")
    (found,) = [each for each in json.loads(out)["findings"] if each["name"] == "memory and time"]
    assert (code, found["verdict"]) == (0, "ok")
    assert found["text"].startswith("expected: ")

"""`ftbench doctor`: each check on machines of many kinds, made of the same facts that a real one gives."""

from __future__ import annotations

import copy
import dataclasses
import json
import subprocess
import sys
import threading
import tomllib
import types
import urllib.error
import urllib.request
from contextlib import nullcontext
from pathlib import Path

import pytest

from commands import write_spec
from ftbench import cli
from ftbench.doctor import abilities, bounds, examine, facts, gpu, host, stack
from ftbench.doctor.bounds import Requirement
from ftbench.doctor.facts import Facts
from ftbench.doctor.findings import Finding, as_text
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
DRIVER = {
    "gpus": 1, "persistence": True, "application_clock_mhz": 1980, "default_clock_mhz": 1980, "throttle": 0x1,
}  # fmt: skip
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
    """What a run asks for is there, as far as the parent can see; no compiler of this machine's decides."""
    monkeypatch.setattr(abilities.trl, "check_installed", lambda spec: None)
    monkeypatch.setattr(stack.shutil, "which", lambda name: f"/usr/bin/{name}")


def machine(
    gpu=(), torch=(), driver=(), versions=(), files=LIBRARIES, modules=MODULES, needs=NEEDS, kernel="6.8", **env
):
    """The facts of an H200 with these changes; `gpu=None` is a machine without one."""
    described = {
        "ftbench": {"version": "0.1.0", "commit": None},
        "os": {"python": "3.12.3"},
        "gpu": None if gpu is None else {**GPU, **dict(gpu)},
    }
    have = {**VERSIONS, **dict(versions)}
    return Facts(
        described, {} if gpu is None else {**DRIVER, **dict(driver)},
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
def test_versions_are_compared_as_pep_440_says(version, text, inside):
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
def test_a_requirement_is_taken_apart(text, parts):
    need = Requirement(text)
    assert (need.name, need.bounds, need.extra) == parts


def test_a_checkout_that_was_never_installed_reads_its_own_pyproject(monkeypatch):
    def missing(_):
        raise bounds.metadata.PackageNotFoundError

    monkeypatch.setattr(bounds.metadata, "requires", missing)
    found = {need.name: need for need in bounds.requirements()}
    assert found["torch"].extra == "train"
    assert found["torch"].bounds.startswith(">=")
    assert found["typer"].extra is None
    assert "pytest" not in found
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert len([need for need in found.values() if need.extra is None]) == len(project["dependencies"])
    assert {need.extra for need in found.values()} == {None, *project["optional-dependencies"]} - {"dev"}


# --- stack -----------------------------------------------------------------------------------------------------------


def test_a_package_inside_its_bounds_is_well_and_one_outside_is_told():
    findings = stack.check(machine(versions={"trl": "1.15.0"}))
    assert named(findings, "torch").verdict == "ok"
    told = named(findings, "trl")
    assert told.verdict == "warn"
    assert "1.15.0 is outside of >=1.12,<1.15" in told.text
    assert "pip install 'ftbench[train]'" in told.text


def test_a_missing_package_fails_only_where_training_needs_it():
    findings = stack.check(machine(versions={"torch": None}))
    assert named(findings, "torch").verdict == "fail"
    optional = named(findings, "liger-kernel")
    assert optional.verdict == "n/a"
    assert "pip install 'ftbench[liger]'" in optional.text


def test_unknown_bounds_are_no_verdict():
    assert named(stack.check(machine(needs=[])), "ftbench").verdict == "n/a"


@pytest.mark.parametrize(
    ("facts_of", "verdict", "told"),
    [
        (machine(), "ok", "a kernel ran"),
        (machine(torch=ON_CPU), "fail", "built for the CPU"),
        (machine(torch={"works": False, "error": "no kernel image is available"}), "fail", "no kernel image"),
        (machine(torch={"devices": [], "error": "The driver is too old"}, gpu={}), "ok", "a kernel ran"),
        (machine(torch={"devices": [], "works": None, "error": "The driver is too old"}), "fail", "too old"),
        (machine(gpu=None), "ok", "for the CPU"),
        (machine(gpu=None, torch={"cuda": "13.0"}), "ok", "the CPU trains"),
        (machine(gpu=None, torch={"torch": "2.11.0+rocm7.1", "rocm": True}), "fail", "of AMD's it only estimates"),
    ],
)
def test_torch_must_be_able_to_use_the_gpu(facts_of, verdict, told):
    found = named(stack.check(facts_of), "torch build")
    assert (found.verdict, told in found.text) == (verdict, True), found


def test_torch_that_does_not_answer_leaves_its_reason():
    silent = dataclasses.replace(machine(), torch={}, why_no_torch="ImportError: libcudart.so.13")
    found = named(stack.check(silent), "torch build")
    assert found.verdict == "n/a"
    assert "libcudart.so.13" in found.text
    assert named(gpu.check(silent), "kernels").verdict == "n/a"


@pytest.mark.parametrize(
    ("cuda", "verdict", "told"),
    [("13.0", "ok", "13.0"), ("13.2", "warn", "takes those for 13.0"), ("12.6", "warn", "takes those for 12.8"),
     ("14.0", "fail", "11.8, 12.8, 13.0")],
)  # fmt: skip
def test_bitsandbytes_takes_the_nearest_build_of_the_same_major_version(cuda, verdict, told):
    facts_of = machine(torch={"cuda": cuda})
    found = stack.bitsandbytes(facts_of)
    assert (found[0], told in found[1]) == (verdict, True), found
    assert abilities.method(facts_of, "qlora")[0] == ("fail" if verdict == "fail" else "ok")


def test_a_chosen_build_of_bitsandbytes_is_told():
    verdict, text = stack.bitsandbytes(machine(BNB_CUDA_VERSION="128"))
    assert verdict == "warn"
    assert "unset it" in text


@pytest.mark.parametrize(
    ("facts_of", "verdict"),
    [(machine(), "ok"), (blackwell(), "warn"), (machine(gpu={"compute_capability": [10, 0]}), "warn"),
     (blackwell(versions={"xformers": None}), "n/a"), (machine(gpu=None), "ok")],
)  # fmt: skip
def test_xformers_is_told_to_fall_back_on_blackwell(facts_of, verdict):
    found = named(stack.check(facts_of), "xformers")
    assert found.verdict == verdict
    assert ("TORCH_CUDA_ARCH_LIST" in found.text) == (verdict == "warn")


def test_missing_compilers_are_told(monkeypatch):
    monkeypatch.setattr(stack.shutil, "which", lambda name: None)
    findings = stack.check(machine(versions={"triton": None}, modules=("torch",)))
    assert "apt-get" in named(findings, "C compiler").text
    assert "pip install triton" in named(findings, "triton").text


# --- GPU -------------------------------------------------------------------------------------------------------------


def test_a_whole_free_gpu_at_its_own_limits_is_well():
    assert {finding.verdict for finding in gpu.check(machine())} == {"ok"}


@pytest.mark.parametrize(
    ("facts_of", "reason"),
    [(machine(gpu=None), "no NVIDIA driver"), (machine(gpu=None, CUDA_VISIBLE_DEVICES=""), "CUDA_VISIBLE_DEVICES=''"),
     (dataclasses.replace(machine(gpu=None), driver={"gpus": 0}), "the driver answers")],
)  # fmt: skip
def test_no_gpu_is_one_finding_with_its_reason(facts_of, reason):
    (found,) = gpu.check(facts_of)
    assert found.verdict == "n/a"
    assert reason in found.text


def test_a_gpu_that_only_torch_sees_has_no_counters():
    findings = gpu.check(machine(gpu=None, torch=TORCH))
    assert findings[0].verdict == "warn"
    assert "stay empty" in findings[0].text
    assert named(findings, "kernels").verdict == "ok"


@pytest.mark.parametrize(
    ("name", "facts_of", "verdict", "told"),
    [
        ("GPU", machine(gpu={"name": "NVIDIA X1"}), "warn", "not in ftbench's table"),
        ("GPUs", machine(driver={"gpus": 4}), "ok", "4 in this machine"),
        ("driver", machine(gpu={"cuda": 12080}), "fail", "up to CUDA 12.8, and torch is built for CUDA 13.0"),
        ("driver", machine(torch={"cuda": "13.2"}), "ok", "580"),
        ("memory", machine(torch={"devices": [{"name": "GB10", "capability": [12, 1], "integrated": True}]}), "warn",
         "share their memory"),
        ("memory", machine(gpu={"name": "NVIDIA GB10", "memory_gb": None}), "warn", "share their memory"),
        ("memory", machine(kernel="5.15-tegra"), "warn", "share their memory"),
        ("memory", machine(gpu={"memory_gb": None}), "n/a", "does not tell"),
        ("WSL", machine(kernel="5.15.167-microsoft-standard-WSL2"), "warn", "Prefer No Sysmem Fallback"),
        ("MIG", machine(gpu={"mig": True}), "warn", "CUDA_VISIBLE_DEVICES=MIG-"),
        ("other processes", machine(gpu={"foreign_processes": 2}), "warn", "2 use the GPU"),
        ("other processes", machine(gpu={"memory_used_before_gb": 8.0}), "warn", "8.00 GiB"),
        ("other processes", machine(gpu={"foreign_processes": None, "memory_used_before_gb": None}), "n/a", "not tell"),
        ("memory errors", machine(gpu={"ecc_uncorrected": 3}), "fail", "3 uncorrected"),
        ("memory errors", machine(gpu={"ecc_uncorrected": None}), "n/a", "does not count"),
        ("power limit", machine(gpu={"power_limit_w": 450.0}), "warn", "nvidia-smi -pl 700"),
        ("power limit", machine(gpu={"power_limit_w": None}), "n/a", "does not tell"),
        ("clocks", machine(driver={"application_clock_mhz": 1200}), "warn", "nvidia-smi -rac"),
        ("clocks", machine(driver={"throttle": 0x2}), "warn", "nvidia-smi -rgc"),
        ("clocks", machine(driver={"throttle": None}), "n/a", "does not tell"),
        ("persistence", machine(driver={"persistence": False}), "warn", "nvidia-smi -pm 1"),
        ("persistence", machine(driver={"persistence": None}), "n/a", "does not tell"),
    ],
)  # fmt: skip
def test_what_makes_a_gpu_other_than_it_should_be_is_told(name, facts_of, verdict, told):
    found = named(gpu.check(facts_of), name)
    assert (found.verdict, told in found.text) == (verdict, True), found


@pytest.mark.parametrize(
    ("capability", "built", "how"),
    [
        ((9, 0), ["sm_80", "sm_90"], "native"), ((8, 9), ["sm_86", "sm_90"], "native"), ((12, 1), ["sm_120"], "native"),
        ((12, 0), ["sm_80", "sm_90"], None), ((12, 0), ["sm_90", "compute_90"], "ptx"), ((9, 0), ["sm_90a"], "native"),
        ((10, 3), ["sm_100a"], None), ((10, 3), ["sm_100f"], "native"), ((8, 0), ["sm_86"], None),
        ((10, 0), ["sm_120", "compute_120"], None), ((12, 0), ["compute_90a"], None),
    ],
)  # fmt: skip
def test_kernels_run_on_the_same_major_version_or_are_compiled(capability, built, how):
    assert gpu.code_for(capability, built) == how


def test_a_blackwell_without_kernels_is_told_what_to_install():
    found = named(gpu.check(blackwell(torch={"arch_list": ["sm_80", "sm_90"]})), "kernels")
    assert found.verdict == "fail"
    assert "sm_120 (Blackwell)" in found.text
    assert "12.8" in found.text


# --- NVML ------------------------------------------------------------------------------------------------------------


class NotSupported(Exception):
    pass


def nvml(**missing):
    def refuse(*_):
        raise NotSupported

    calls = {
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetPersistenceMode": lambda _: 1,
        "nvmlDeviceGetApplicationsClock": lambda *_: 1755,
        "nvmlDeviceGetDefaultApplicationsClock": lambda *_: 1980,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda _: 0x1,
    }
    return types.SimpleNamespace(NVMLError=NotSupported, NVML_CLOCK_SM=1, **(calls | dict.fromkeys(missing, refuse)))


def test_the_driver_is_asked_for_what_machine_json_does_not_hold():
    assert facts.read_driver(nvml(), object()) == {
        "gpus": 2, "persistence": True, "application_clock_mhz": 1755, "default_clock_mhz": 1980, "throttle": 1,
    }  # fmt: skip


def test_what_a_driver_does_not_know_is_none():
    told = facts.read_driver(nvml(nvmlDeviceGetPersistenceMode=1, nvmlDeviceGetApplicationsClock=1), object())
    assert told["persistence"] is told["application_clock_mhz"] is None
    assert told["default_clock_mhz"] == 1980


def test_a_driver_without_a_gpu_still_counts():
    assert facts.read_driver(nvml(), None) == {"gpus": 2}


@pytest.mark.parametrize(("told", "version"), [("13.0", (13, 0)), (12080, (12, 8)), (None, None), ("", None)])
def test_cuda_versions_of_both_spellings(told, version):
    assert facts.cuda_version(told) == version


@pytest.mark.torch
def test_torch_is_asked_in_a_child():
    pytest.importorskip("torch", reason="training libraries are not installed")
    told, reason = facts.ask_torch({**facts.os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert reason is None
    assert set(told) == set(TORCH)


@pytest.mark.parametrize(
    ("torch", "within_s", "reason"),
    [
        ("import time; time.sleep(60)", 0.3, "torch did not answer within 0 s"),
        ("raise OSError('libtorch.so is gone')", 240, "torch ended with exit code 1: OSError: libtorch.so is gone"),
    ],
    ids=["hangs", "cannot be imported"],
)  # fmt: skip
def test_a_torch_that_does_not_answer_is_told_with_the_reason(monkeypatch, tmp_path, torch, within_s, reason):
    (tmp_path / "torch.py").write_text(torch)
    monkeypatch.setattr(facts, "has", lambda name: True)
    path = f"{tmp_path}:{Path(facts.__file__).parents[2]}"  # without what makes torch absent for other tests
    told, why = facts.ask_torch({**facts.os.environ, "PYTHONPATH": path}, within_s)
    assert told == {}
    assert why.startswith(reason)


# --- methods and optimizations ---------------------------------------------------------------------------------------


def test_every_method_and_every_choice_of_every_optimization_has_a_verdict():
    findings = abilities.check(machine())
    assert [finding.name for finding in findings if finding.area == "methods"] == list(METHODS)
    assert set(abilities.CHECKS) <= set(Optimizations.model_fields)
    assert {"gradient_checkpointing", "compile", "fp8 rowwise", "attention sdpa"} <= {
        finding.name for finding in findings
    }
    assert all(len(finding.text) > 4 for finding in findings)


@pytest.mark.parametrize(
    ("key", "value", "facts_of", "verdict", "told"),
    [
        ("fp8", "rowwise", machine(), "ok", "compile"),
        ("fp8", "rowwise", machine(gpu={"compute_capability": [8, 0]}), "n/a", "8.9"),
        ("fp8", "rowwise", machine(gpu=None), "n/a", "no GPU"),
        ("fp8", "tensorwise-delayed", machine(modules=("torch",)), "n/a", "pip install triton"),
        ("compile", True, machine(), "ok", "compile"),
        ("compile", True, machine(modules=("torch",)), "n/a", "pip install triton"),
        ("attention", "flash_attention_2", machine(), "n/a", "flash-attn is not installed"),
        ("attention", "flash_attention_2", machine(modules=(*MODULES, "flash_attn")), "ok", "works"),
        ("attention", "flash_attention_2", machine(modules=(*MODULES, "kernels")), "warn", "from the hub"),
        ("attention", "flash_attention_2", machine(gpu={"compute_capability": [7, 5]}), "n/a", "8.0"),
        ("attention", "flash_attention_3", machine(modules=(*MODULES, "flash_attn_interface")), "ok", "works"),
        ("attention", "flash_attention_3", blackwell(), "n/a", "Hopper"),
        ("attention", "flex_attention", machine(), "ok", "works"),
        ("attention", "flex_attention", machine(gpu=None), "n/a", "needs a GPU"),
        ("gradient_checkpointing", True, machine(gpu=None), "ok", "works"),
    ],
)
def test_an_optimization_works_falls_back_or_says_what_to_install(key, value, facts_of, verdict, told):
    found, text = abilities.optimization(facts_of, key, value)
    assert (found, told in text) == (verdict, True), text


def test_without_torch_the_methods_say_what_to_install_and_optimizations_do_not_repeat_it(monkeypatch):
    def missing(_):
        raise abilities.MissingError("pip install 'ftbench[train]'")

    monkeypatch.setattr(abilities.trl, "check_installed", missing)
    findings = abilities.check(machine(modules=(), torch={}))
    assert {finding.verdict for finding in findings if finding.name in METHODS} == {"fail"}
    optional = [finding for finding in findings if finding.area == "optimizations"]
    assert {finding.verdict for finding in optional} == {"n/a"}
    assert "pip" not in " ".join(finding.text for finding in optional)


def test_each_choice_of_attention_says_that_it_is_one():
    """A stranger who reads `eager` or `cudnn` in a list of optimizations does not know of what."""
    names = {finding.name for finding in abilities.check(machine()) if finding.area == "optimizations"}
    assert {"attention eager", "attention sdpa", "attention cudnn"} <= names
    assert {name.split()[0] for name in names} <= set(Optimizations.model_fields)


# --- host ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def groups(tmp_path):
    """Control groups in files: own limits by folder."""

    def make(entry="0::/a/b\n", **limits):
        (tmp_path / "entry").write_text(entry)
        for path, text in limits.items():
            file = tmp_path / "root" / path.replace("__", "/").replace("_max", ".max")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return tmp_path / "entry", tmp_path / "root"

    return make


def test_the_tightest_limit_of_all_groups_above_counts(groups):
    where = groups(a__memory_max="1000\n", a__b__memory_max="max\n", memory_max="5000\n")
    assert host.memory_limit(*where) == 1000


def test_a_container_sees_its_limit_at_the_root(groups):
    where = groups("0::/\n", memory_max="4096\n", cpu_max="150000 100000\n")
    assert host.memory_limit(*where) == 4096
    assert host.processor_limit(*where) == 1.5


def test_no_limit_and_no_control_groups_are_none(groups, tmp_path):
    where = groups(a__memory_max="max\n", a__cpu_max="max 100000\n")
    assert host.memory_limit(*where) is host.processor_limit(*where) is None
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
def test_debug_variables_are_told_each_with_a_way_out(environment, names):
    answers = host.debug_variables(environment)
    assert {verdict for verdict, _ in answers} == ({"warn"} if names else {"ok"})
    if names:
        assert [text.split("=")[0] for _, text in answers] == sorted(names, key=list(host.DEBUG).index)
        assert all("unset it" in text for _, text in answers)


def test_a_disk_that_is_full_or_cannot_be_written_fails(monkeypatch, tmp_path):
    assert host.disk(tmp_path / "not" / "yet", "move", 0.0)[0] == "ok"
    assert host.disk(tmp_path, "move", 1e9)[0] == "fail"
    assert host.disk(tmp_path, "move", 1e9, full="warn")[0] == "warn"
    (tmp_path / "file").write_text("")
    assert host.disk(tmp_path / "file" / "results", "move", 0.0)[0] == "fail"


@pytest.mark.parametrize("name", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_means_that_the_hub_is_not_asked(monkeypatch, name):
    monkeypatch.setattr(host, "_ask", lambda endpoint: pytest.fail("asked"))
    verdict, text = host.hub({name: "1"})
    assert verdict == "n/a"
    assert name in text


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (None, ""), (urllib.error.HTTPError("u", 404, "", {}, None), ""),
        (urllib.error.HTTPError("u", 403, "", {}, None), "HTTP 403"),
        (urllib.error.URLError("Name or service not known"), "Name or service not known"),
        (ValueError("unknown url type"), "unknown url type"),
    ],
)  # fmt: skip
def test_the_hub_answers_or_the_reason_is_told(monkeypatch, error, told):
    def urlopen(request, timeout):
        assert (request.full_url, request.method) == ("https://mirror.example/", "HEAD")
        assert timeout <= 3
        if error:
            raise error
        return nullcontext()

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    verdict, text = host.hub({"HF_ENDPOINT": "https://mirror.example/"})
    assert (verdict, told in text) == ("warn" if told else "ok", True)


def test_a_hub_that_does_not_answer_is_given_up(monkeypatch):
    monkeypatch.setattr(host, "HUB_S", 0.1)
    answer = threading.Event()
    monkeypatch.setattr(host, "_ask", lambda endpoint: str(answer.wait()))
    assert host.hub({})[0] == "warn"
    assert not answer.is_set()
    answer.set()


# --- the spec and the command ----------------------------------------------------------------------------------------


@pytest.fixture
def doctor(monkeypatch, capsys, tmp_path):
    """The command on a machine of these facts, with the hub as told."""

    def call(*arguments, facts_of=None, hub="ok"):
        monkeypatch.setattr(examine, "gather", lambda: facts_of or machine())
        monkeypatch.setattr(host, "hub", lambda environment: (hub, "not reached (no route): …"))
        monkeypatch.setattr(abilities.trl, "check_installed", lambda spec: None)
        monkeypatch.setenv("FTBENCH_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(sys, "argv", ["ftbench", "doctor", "--out", str(tmp_path / "out"), *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return call


def test_without_a_spec_the_exit_code_is_nought_whatever_is_found(doctor):
    code, out, _ = doctor(facts_of=machine(gpu={"ecc_uncorrected": 3}, torch=ON_CPU))
    assert code == 0
    assert "spec" not in out.splitlines()[-1]
    assert "2 fail" in out.splitlines()[-1]
    for area in ("stack", "gpu", "methods", "optimizations", "host"):
        assert area in out.splitlines()


def test_a_spec_that_can_run_is_told_so(doctor, tmp_path):
    code, out, _ = doctor(write_spec(tmp_path))
    assert code == 0
    assert out.splitlines()[-1].endswith("the spec can run here")


@pytest.mark.parametrize(
    ("parts", "facts_of", "hub", "told"),
    [
        ({"optimizations": {"fp8": "rowwise"}}, machine(gpu=None), "ok", "optimizations.fp8 needs a GPU"),
        ({"optimizations": {"attention": "flash_attention_2"}}, machine(), "ok", "flash-attn is not installed"),
        ({"method": "qlora"}, machine(files=()), "ok", "bitsandbytes holds kernels for no CUDA version"),
        ({}, machine(torch=ON_CPU), "ok", "built for the CPU"),
        ({}, machine(gpu={"cuda": 12080}), "ok", "update the driver"),
        ({"model": {"id": "Qwen/Qwen3-8B"}}, machine(), "warn", "Qwen/Qwen3-8B is not in the cache"),
        ({"dataset": {"name": "alpaca"}}, machine(), "n/a", "tatsu-lab/alpaca is not in the cache"),
        ({"dataset": {"name": "file", "path": "none.jsonl"}}, machine(), "ok", "no such file"),
    ],
)
def test_a_spec_that_cannot_run_here_ends_with_three_and_the_reason(doctor, tmp_path, parts, facts_of, hub, told):
    facts_of.environment["HF_HOME"] = str(tmp_path / "hf")
    code, out, _ = doctor(write_spec(tmp_path, **parts), "--json", facts_of=facts_of, hub=hub)
    document = json.loads(out)
    assert (code, document["can_run"]) == (3, False)
    about = [finding for finding in document["findings"] if finding["area"] == "spec"]
    assert [finding for finding in about if told in finding["text"]], about
    assert len({finding["text"] for finding in about}) == len(about)
    assert {finding["verdict"] for finding in about} == {"fail"}


def test_a_mock_needs_nothing(doctor, tmp_path):
    spec = write_spec(tmp_path, model={"id": "Qwen/Qwen3-8B"}, launch={"mock": "ok"})
    assert doctor(spec, facts_of=machine(torch=ON_CPU), hub="warn")[0] == 0


def test_a_mock_needs_room_for_its_files(doctor, tmp_path):
    (tmp_path / "file").write_text("")
    code, out, _ = doctor(write_spec(tmp_path, launch={"mock": "ok"}), "--out", tmp_path / "file" / "runs")
    assert (code, "the spec cannot run here" in out) == (3, True)


def test_weights_in_the_cache_need_no_hub(doctor, tmp_path):
    facts_of = machine(HF_HOME=str(tmp_path / "hf"))
    (tmp_path / "hf" / "hub" / "models--Qwen--Qwen3-8B").mkdir(parents=True)
    code, _, _ = doctor(write_spec(tmp_path, model={"id": "Qwen/Qwen3-8B"}), facts_of=facts_of, hub="warn")
    assert code == 0


def test_weights_that_the_disk_has_no_room_for(doctor, tmp_path, monkeypatch):
    monkeypatch.setattr(host, "free_gb", lambda path: 10.0)
    spec = write_spec(tmp_path, model={"id": "Qwen/Qwen3-8B", "weights": "random"})
    code, out, _ = doctor(spec)
    assert code == 3
    assert "GiB and 10.0 GiB are free: set FTBENCH_CACHE" in " ".join(out.split())


def test_a_wrong_spec_is_a_wrong_spec(doctor, tmp_path):
    code, out, err = doctor(write_spec(tmp_path, train={"batch_sise": 1}))
    assert (code, out) == (2, "")
    assert "did you mean batch_size?" in err


def test_set_changes_the_spec_that_is_looked_at(doctor, tmp_path):
    code, _, _ = doctor(write_spec(tmp_path), "--set", "optimizations.fp8=rowwise", facts_of=machine(gpu=None))
    assert code == 3


def test_json_is_one_document_of_findings(doctor):
    code, out, _ = doctor("--json")
    document = json.loads(out)
    assert (code, document["can_run"], document["schema"]) == (0, None, 1)
    assert {finding["verdict"] for finding in document["findings"]} <= {"ok", "warn", "fail", "n/a"}
    assert set(document["findings"][0]) == {"area", "name", "verdict", "text"}


def test_long_sentences_go_over_several_lines():
    lines = as_text([Finding("gpu", "power limit", "warn", "word " * 60)], 90).splitlines()
    assert lines[0] == "gpu"
    assert lines[1].startswith("  warn  power limit")
    assert len(lines) > 4
    assert all(len(line) <= 90 for line in lines)


def test_what_holds_of_every_value_of_a_setting_is_said_once():
    refused = "needs a GPU of compute capability 8.9"
    findings = [Finding("optimizations", f"fp8 {value}", "n/a", refused) for value in ("rowwise", "te-mxfp8")]
    findings += [Finding("optimizations", "attention sdpa", "ok", "works"),
                 Finding("optimizations", "attention cudnn", "n/a", refused),
                 Finding("methods", "fp8", "ok", "works")]  # fmt: skip
    assert as_text(abilities.said_once(findings)).splitlines() == [
        "optimizations", f"  n/a  fp8              {refused}", "  ok   attention sdpa   works",
        f"  n/a  attention cudnn  {refused}", "", "methods", "  ok  fp8  works",
    ]  # fmt: skip


@pytest.mark.parametrize("module", ["ftbench.doctor.examine", "ftbench.probe.command"])
def test_nothing_heavy_stands_behind_it(module):
    code = f"import sys, {module}; print(sorted({{'torch', 'transformers', 'pandas'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_it_looks_at_this_machine(tmp_path):
    """The real command, on whatever this is; a machine without GPU, NVML or hub still gets every area."""
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


def test_what_a_spec_takes_is_looked_at_as_run_does(doctor, tmp_path):
    large = {"model": {"id": "Qwen/Qwen3-8B", "weights": "random"}, "method": "full", "train": {"batch_size": 64}}
    code, out, _ = doctor(write_spec(tmp_path, **large), "--json")
    (found,) = [each for each in json.loads(out)["findings"] if each["name"] == "memory and time"]
    assert (code, found["verdict"]) == (3, "fail")
    assert "this will run out of memory" in found["text"]


def test_what_fits_is_said_with_what_it_takes(doctor, tmp_path):
    small = {"model": {"id": "Qwen/Qwen3-0.6B", "weights": "random"}}
    code, out, _ = doctor(write_spec(tmp_path, **small), "--json")
    (found,) = [each for each in json.loads(out)["findings"] if each["name"] == "memory and time"]
    assert (code, found["verdict"]) == (0, "ok")
    assert found["text"].startswith("expected: ")

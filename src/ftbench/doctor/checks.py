"""Check the installed packages, the build of torch, the GPU, the methods, and the host."""

import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement

from ftbench.core import units
from ftbench.core.hardware import find_gpu, rocm_refusal
from ftbench.core.units import GIB
from ftbench.errors import MissingError
from ftbench.launch import checks as launch_checks
from ftbench.launch import trl
from ftbench.launch.checks import MINIMUM_FREE_BYTES, capability
from ftbench.spec.experiment import Experiment
from ftbench.spec.methods import METHODS
from ftbench.store import machine
from ftbench.store.run_warnings import is_free, usage
from ftbench.store.rundir import first_gpu

Verdict = Literal["ok", "warn", "fail", "n/a"]
Answer = tuple[Verdict, str]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        verdict: `ok`: it works. `warn`: it works, but it is slow or the results are doubtful. `fail`: it prevents runs.
            `n/a`: it is not installed or could not be checked.
        text: A sentence about the result. If the verdict is not `ok`, the sentence explains how to fix the problem.
    """

    area: str
    name: str
    verdict: Verdict
    text: str


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts about this machine.

    Attributes:
        described: The content of machine.json.
        torch: The output of `worker.device`. It is empty if torch cannot be imported.
        why_no_torch: The reason why torch cannot be imported, or None.
        environment: The environment variables of this process.
        kernel: The release of the Linux kernel.
    """

    described: dict[str, Any]
    torch: dict[str, Any]
    why_no_torch: str | None
    environment: Mapping[str, str]
    kernel: str = field(default_factory=platform.release)

    @property
    def gpu(self) -> dict[str, Any]:
        """The first GPU in machine.json. The dictionary is empty without a GPU."""
        return first_gpu(self.described)

    @property
    def capability(self) -> tuple[int, int] | None:
        """The compute capability of the GPU, as in `ftbench run`."""
        return capability(self.described)


# --- packages --------------------------------------------------------------------------------------------------------

STACK = "stack"


def stack(facts: Facts) -> list[Finding]:
    """Return findings about installed software: ftbench, its optional packages, the build of torch, the C compiler."""
    about = facts.described["ftbench"]
    commit = f", commit {machine.short(about['commit'])}" if about["commit"] else ""
    title = f"{about['version']}{commit}, Python {facts.described['os']['python']}"
    needs = sorted((extra != "train", need.name, extra, need) for need, extra in requirements() if extra)
    return [
        Finding(STACK, "ftbench", "ok", title),
        *(Finding(STACK, name, *_package(need, extra)) for _, name, extra, need in needs),
        Finding(STACK, "torch build", *_torch_build(facts)),
        Finding(STACK, "compiler", *_compiler(facts)),
    ]


def requirements() -> list[tuple[Requirement, str]]:
    """Return (requirement, name of its extra) for the packages that ftbench needs. Leave out the extra `dev`."""
    try:
        texts = metadata.requires("ftbench") or ()
    except metadata.PackageNotFoundError:
        return []
    pairs = ((need, str(need.marker or "").partition("extra == ")[2].strip('"')) for need in map(Requirement, texts))
    return [(need, extra) for need, extra in pairs if extra != "dev"]


def _package(need: Requirement, extra: str) -> Answer:
    installed, install = machine.versions([need.name]).get(need.name), f"pip install 'ftbench[{extra}]'"
    if installed is None and extra == "train":
        return "fail", f"not installed, but training needs it: {install}"
    if installed is None:
        return "n/a", f"not installed; optional ({extra}): {install}"
    bounds = ",".join(sorted(map(str, need.specifier), reverse=True))
    if not need.specifier.contains(installed, prereleases=True):
        return "warn", f"{installed} is outside of the tested versions {bounds}: {install}"
    return "ok", f"{installed}, within {bounds}" if bounds else installed


def _torch_build(facts: Facts) -> Answer:
    torch = facts.torch
    if not torch:
        return "n/a", f"{facts.why_no_torch}: pip install 'ftbench[train]'"
    if torch["rocm"]:
        return "fail", rocm_refusal(torch["torch"])
    if torch["cuda"] is None and facts.gpu:
        return "fail", (
            f"{torch['torch']} is built for the CPU, but this machine has {facts.gpu['name']}: install a build "
            "of torch for CUDA, or set CUDA_VISIBLE_DEVICES= (empty) to measure the CPU"
        )
    if torch["cuda"] is None:
        return "ok", f"{torch['torch']}, for the CPU"
    if torch["works"]:
        return "ok", f"{torch['torch']}, CUDA {torch['cuda']}; a test kernel ran on the GPU"
    if facts.gpu or torch["devices"]:
        driver = facts.gpu.get("cuda")  # 13000 is 13.0
        supported = f", and the driver supports CUDA {driver // 1000}.{driver % 1000 // 10}" if driver else ""
        return "fail", (
            f"{torch['torch']} cannot use the GPU ({torch['error'] or 'wrong result'}); it is built for CUDA "
            f"{torch['cuda']}{supported}: update the driver, or install a build of torch for this driver and GPU"
        )
    return "ok", f"{torch['torch']}, CUDA {torch['cuda']}; there is no GPU, runs use the CPU"


def _compiler(facts: Facts) -> Answer:
    """Check that torch.compile finds a compiler: C for Triton's launchers, C++ for the CPU."""
    variable, names = ("CC", ("gcc", "clang", "cc")) if facts.capability else ("CXX", ("g++", "clang++", "c++"))
    chosen = facts.environment.get(variable)
    if path := next(filter(None, map(shutil.which, [chosen] if chosen else names)), None):
        return "ok", path
    return "n/a", "optimizations.compile needs a C compiler: apt-get install g++, or set CC and CXX"


# --- GPU -------------------------------------------------------------------------------------------------------------

GPU = "gpu"


def gpu(facts: Facts) -> list[Finding]:
    """Return findings about the GPU, its memory and other processes. Without a GPU, return one `n/a` finding."""
    if facts.gpu:
        answers = {"GPU": _card(facts), "memory": _moved_memory(facts), "other processes": _other_processes(facts)}
    elif devices := facts.torch.get("devices"):
        answers = {"memory": _moved_memory(facts), "GPU": (
            "warn", f"torch sees {devices[0]['name']}, but NVML does not: power, clocks, temperature and device memory "
            "stay empty in every run; install the driver's libnvidia-ml"
        )}  # fmt: skip
    else:
        hidden = facts.environment.get("CUDA_VISIBLE_DEVICES")
        reason = (
            f"CUDA_VISIBLE_DEVICES={hidden!r}" if hidden is not None
            else "no NVIDIA driver found: install it, reboot after an update, or start the container with --gpus all"
        )  # fmt: skip
        answers = {"GPU": ("n/a", f"no GPU, runs measure the CPU: {reason}")}
    return [Finding(GPU, name, *answer) for name, answer in answers.items() if answer]


def _card(facts: Facts) -> Answer:
    card, capability = facts.gpu, facts.capability
    size = f", {units.gibibytes(card['memory_gb'])} GiB" if card["memory_gb"] else ""
    title = f"{card['name']}{size}" + (f", compute capability {capability[0]}.{capability[1]}" if capability else "")
    if card["mig"] or "MIG" in (card["name"] or ""):
        return "warn", f"{title}; it is split into MIG instances: compare only runs with the same MIG profile"
    if find_gpu(card["name"] or "") is not None:
        return "ok", title
    return "warn", f"{title}; it is not in ftbench's table, so MFU stays empty: measure its limits with `ftbench probe`"


def _moved_memory(facts: Facts) -> Answer | None:
    if "microsoft" not in facts.kernel.lower():
        return None
    return "warn", (
        "if GPU memory is full, the Windows driver uses system memory, and a run becomes many times slower instead of "
        "failing: set CUDA - Sysmem Fallback Policy to Prefer No Sysmem Fallback in NVIDIA's control panel"
    )


def _other_processes(facts: Facts) -> Answer:
    if not is_free(facts.gpu):
        return "warn", f"{usage(facts.gpu)}: stop them (see nvidia-smi), otherwise measurements are not valid"
    if facts.gpu["foreign_processes"] is None and facts.gpu["memory_used_before_gb"] is None:
        return "n/a", "the driver does not report other processes; make sure that the GPU is free"
    return "ok", "none"


# --- methods ---------------------------------------------------------------------------------------------------------

METHOD = "methods"


def methods(facts: Facts) -> list[Finding]:
    """Return a finding for each training method: whether it works on this machine. `ftbench run` has the same rules."""
    return [Finding(METHOD, name, *_method(facts, name)) for name in METHODS]


def _method(facts: Facts, name: str) -> Answer:
    spec = Experiment.model_validate({"name": "doctor", "model": {"id": "doctor/none"}, "method": {"name": name}})
    if problems := trl.problems(spec, facts.capability):
        return "n/a", "; ".join(problems)
    try:
        trl.check_installed(spec)
    except MissingError as error:
        return "n/a" if facts.torch else "fail", str(error)
    return "ok", "works"


# --- host ------------------------------------------------------------------------------------------------------------

HOST = "host"
ROOM_GB = 20.0  # the 16-bit weights of an 8B model take 16 GB
# Variables that slow training down or change its behaviour.
DEBUG = (
    "CUDA_LAUNCH_BLOCKING", "TORCH_LOGS", "TORCH_DISTRIBUTED_DEBUG", "TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE",
    "PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS",
    "NCCL_P2P_DISABLE", "NVIDIA_TF32_OVERRIDE", "OMP_NUM_THREADS",
)  # fmt: skip


def host(out: Path, environment: Mapping[str, str]) -> list[Finding]:
    """Return findings about disks, environment variables and the Hub. Wait at most 3 s for an answer of the Hub."""
    weights, cache = machine.cache_dir(), launch_checks.cache(environment)
    on = [f"{name}={environment[name][:60]}" for name in DEBUG if environment.get(name, "0") not in ("", "0")]
    variables: Answer = "ok", "no variable changes measurements"
    if on:
        variables = "warn", f"{', '.join(on)}: it changes measurements: unset it, or set it in all runs"
    return [
        Finding(HOST, "disk for runs", *disk(out, "choose another disk with --out", MINIMUM_FREE_BYTES / GIB)),
        Finding(HOST, "disk for weights", *disk(weights, "set FTBENCH_CACHE to a larger disk", ROOM_GB, "warn")),
        Finding(HOST, "disk for the hub", *disk(cache, "set HF_HOME to a larger disk", ROOM_GB, "warn")),
        Finding(HOST, "environment", *variables),
        Finding(HOST, "hub", *launch_checks.reach(environment)),
    ]


def disk(path: Path, fix: str, needed_gb: float, full: Verdict = "fail") -> Answer:
    """Check that a folder is writable and has `needed_gb` GiB of free space. `full` is the verdict for less space."""
    folder = next(folder for folder in (path.absolute(), *path.absolute().parents) if os.path.exists(folder))
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return "fail", f"{path} is not writable: {fix}"
    free_gb = shutil.disk_usage(folder).free / GIB
    free = f"{units.gibibytes(free_gb)} GiB free at {path}"
    return ("ok", free) if free_gb >= needed_gb else (full, f"{free}: {fix}, or delete files")

"""Describe this machine: GPUs, driver, limits, clocks, CPU, versions, measured peak rates. GPU facts come from NVML,
not from torch.

Unknown values are None. Only environment variables of an allow-list are recorded, because others may be secret."""

import os
import platform
import re
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from ftbench import __version__
from ftbench.core.hardware import canonical_name
from ftbench.core.processes import run_program
from ftbench.core.units import GIB
from ftbench.errors import MissingError
from ftbench.store import rundir

SCHEMA = 1
PACKAGES = (
    "torch", "transformers", "trl", "peft", "accelerate", "datasets", "tokenizers", "safetensors", "bitsandbytes",
    "triton", "torchao", "unsloth", "unsloth_zoo", "liger-kernel", "flash-attn", "xformers", "deepspeed", "numpy",
    "nvidia-ml-py",
)  # fmt: skip
# Variables that change the speed of training. Their values contain neither paths nor secrets.
ENVIRONMENT = re.compile(
    r"CUDA_(VISIBLE_DEVICES|DEVICE_ORDER|LAUNCH_BLOCKING|MODULE_LOADING|DEVICE_MAX_CONNECTIONS)"
    r"|(NCCL|PYTORCH|TORCH|TORCHINDUCTOR|TRITON|UNSLOTH|BNB|OMP|MKL)_[A-Z0-9_]+"
    r"|HF_HUB_OFFLINE|TRANSFORMERS_OFFLINE|TOKENIZERS_PARALLELISM"
)
_SECRET = re.compile(r"(?i)(token|secret|password|credential|api_?key)")


def describe() -> dict[str, Any]:
    """Return the content of machine.json before a run."""
    return {**host(), "gpus": gpus()}


def cpu() -> dict[str, Any]:
    """Return the `cpu` section of machine.json."""
    import psutil  # imported late: most estimates do not need it

    model = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "model": model.group(1) if model else platform.processor() or None,
        "cores": psutil.cpu_count(logical=False),
        "threads": len(os.sched_getaffinity(0)),
        "memory_gb": psutil.virtual_memory().total / GIB,
    }


def host() -> dict[str, Any]:
    """Return machine.json without the GPUs: ftbench commit, CPU, operating system, library versions and environment."""
    return {
        "schema": SCHEMA,
        "ftbench": {"version": __version__, "commit": commit()},
        "cpu": cpu(),
        "os": {"kernel": platform.release(), "python": platform.python_version(), "machine": platform.machine()},
        "versions": versions(),
        "environment": {
            key: value for key, value in sorted(os.environ.items())
            if ENVIRONMENT.fullmatch(key) and not _SECRET.search(key) and "/" not in value
        },
    }  # fmt: skip


def gpu(visible: str | None = None) -> dict[str, Any] | None:
    """Return a description of the first GPU of `visible`. Return None without a GPU."""
    return next(iter(gpus(visible)), None)


def gpus(visible: str | None = None, count: int = 1) -> list[dict[str, Any]]:
    """Describe the first `count` GPUs of `visible` (PCI indices or UUIDs, by default CUDA_VISIBLE_DEVICES)."""
    if (nvml := nvml_module()) is None:
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") if visible is None else visible
    names = [str(index) for index in range(count)] if visible is None else visible.split(",")[:count]
    handles = (handle_of(nvml, name.strip()) for name in names)
    return [_gpu(nvml, handle) for handle in handles if handle is not None]


@cache
def nvml_module() -> Any | None:
    """Return the initialized module pynvml, or None without an NVIDIA driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def handle_of(nvml: Any, name: str) -> Any | None:
    """Return the NVML handle of a GPU, or None. `name` is a UUID or an index in PCI order, as ftbench sets it in
    CUDA_DEVICE_ORDER."""
    try:
        if name.startswith(("GPU-", "MIG-")):
            return nvml.nvmlDeviceGetHandleByUUID(name)
        return nvml.nvmlDeviceGetHandleByIndex(int(name))
    except (nvml.NVMLError, ValueError):
        return None


def _gpu(nvml: Any, handle: Any) -> dict[str, Any]:
    def ask(function: str, *arguments: Any) -> Any:
        try:
            value = getattr(nvml, f"nvml{function}")(*arguments)
        except (nvml.NVMLError, AttributeError):
            return None
        return value.decode() if isinstance(value, bytes) else value

    def device(function: str, *arguments: Any) -> Any:
        return ask(f"Device{function}", handle, *arguments)

    def watts(function: str, index: int | None = None) -> float | None:
        value = device(function)
        return None if value is None else (value if index is None else value[index]) / 1000

    memory, ecc, processes = device("GetMemoryInfo"), device("GetEccMode"), device("GetComputeRunningProcesses")
    others = None if processes is None else [p.pid for p in processes if p.pid != os.getpid()]
    clock, highest = (device(name, nvml.NVML_CLOCK_SM) for name in ("GetClockInfo", "GetMaxClockInfo"))
    # For some seconds after a run the clock stays high and the GPU draws more than when idle.
    idles = clock is not None and highest is not None and clock < highest / 2
    return {
        "name": device("GetName"),
        "uuid": device("GetUUID"),
        "driver": ask("SystemGetDriverVersion"),
        "cuda": ask("SystemGetCudaDriverVersion"),
        "compute_capability": device("GetCudaComputeCapability"),
        "memory_gb": memory.total / GIB if memory else None,
        "memory_used_before_gb": memory.used / GIB if memory else None,
        "foreign_processes": len(others) if others is not None else None,
        "process_ids": others,
        "power_limit_w": watts("GetEnforcedPowerLimit"),
        "power_limit_max_w": watts("GetPowerManagementLimitConstraints", 1),
        "idle_power_w": watts("GetPowerUsage") if idles else None,
        "temperature_c": device("GetTemperature", nvml.NVML_TEMPERATURE_GPU),
        "sm_clock_mhz": clock,
        "sm_clock_max_mhz": highest,
        "memory_clock_max_mhz": device("GetMaxClockInfo", nvml.NVML_CLOCK_MEM),
        "ecc": bool(ecc[0]) if ecc else None,
        "ecc_uncorrected": device("GetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, 0),
        "pcie_generation": device("GetCurrPcieLinkGeneration"),
        "pcie_width": device("GetCurrPcieLinkWidth"),
        "mig": bool((device("GetMigMode") or [0])[0]),
    }


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Return {package: version} of the installed packages among `packages`."""
    from importlib import metadata

    versions = {}
    for name in packages:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def cache_dir() -> Path:
    """Return the cache folder: FTBENCH_CACHE, or `ftbench` in the user's cache directory."""
    folder = os.environ.get("FTBENCH_CACHE")
    return Path(folder) if folder else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "ftbench"


def cache_error(folder: Path, error: Exception) -> MissingError:
    """Convert the error of a failed write to the cache folder to a MissingError. The message gives a solution."""
    return MissingError(f"{folder}: {error}; free some space, or set FTBENCH_CACHE to a writable folder")


def commit() -> str | None:
    """Return the git commit of ftbench's source, with `-dirty` for modified files. None for an installed package.

    The variable FTBENCH_COMMIT overrides the commit. Use it for copies of the source without the git history.
    """
    if name := os.environ.get("FTBENCH_COMMIT"):
        return name
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        described = run_program(command, limit_s=10)
    except OSError:
        return None
    return (described.stdout.strip() or None) if described.returncode == 0 else None


def short(commit: str | None) -> str:
    """Return 12 digits of a commit, with `-dirty` for modified files."""
    digits, dash, modified = (commit or "unknown").partition("-")
    return digits[:12] + dash + modified


# --- probed peak rates ------------------------------------------------------------------------------------------------

PROBES = "probe"  # folder of probes, next to the experiments


def ceilings(store: Path, gpu_name: str | None) -> dict[str, Any]:
    """Return the best rates that `ftbench probe` measured on GPUs of one kind.

    If several cards or probes measured a rate, the fastest counts, because a hot or busy card is slower.

    Args:
        gpu_name: Name of the GPU in the driver or in the GPU table; None without a GPU.

    Returns:
        A dict with some of these keys: `tflops` by precision; `memory_gbs`, `to_device_gbs` and `to_host_gbs` in GB/s;
        `launch_us` in µs; `usable_gb`, the GiB that CUDA gives to processes; `driver_total_gb`, the GiB of the card.
    """
    documents = _documents(store, gpu_name) if gpu_name else []
    products = [document.get("products", {}) for document in documents]
    memory, link, capacity = ([d.get(name) for d in documents] for name in ("memory", "host_link", "capacity"))
    rates = {kind: _best(max, [each.get(kind) for each in products], "best_tflops")
             for kind in sorted({kind for each in products for kind in each})}  # fmt: skip
    rates_by_name = {
        "tflops": {kind: rate for kind, rate in rates.items() if rate is not None},
        "memory_gbs": _best(max, memory, "copy_gbs"),
        "to_device_gbs": _best(max, link, "to_device_gbs"),
        "to_host_gbs": _best(max, link, "to_host_gbs"),
        "launch_us": _best(min, documents, "launch_us"),
        "usable_gb": _best(min, capacity, "total_gb"),
        "driver_total_gb": _best(min, capacity, "driver_total_gb"),
    }
    return {name: value for name, value in rates_by_name.items() if value not in (None, {})}


def _best(pick: Any, parts: Iterable[dict[str, Any] | None], name: str) -> float | None:
    figures = [float(figure) for part in parts if part and (figure := part.get(name)) and figure > 0]
    return pick(figures) if figures else None


def _documents(store: Path, gpu_name: str) -> list[dict[str, Any]]:
    return [
        document
        for document in map(rundir.read_json, sorted((store / PROBES).glob("*.json")))
        if (document.get("device") or {}).get("kind") == "cuda"
        and (name := rundir.first_gpu(document.get("machine", {})).get("name"))
        and canonical_name(name) == canonical_name(gpu_name)
    ]

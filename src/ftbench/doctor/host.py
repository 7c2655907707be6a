"""Check the host: disks, memory, processors, environment variables, and access to the Hub."""

import os
import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import psutil

from ftbench.core import units
from ftbench.core.units import GIB
from ftbench.doctor.facts import Answer, Finding, Verdict
from ftbench.launch.checks import MINIMUM_FREE_BYTES
from ftbench.store import machine

AREA = "host"
HUB_S = 3.0
ROOM_GB = 20.0  # the 16-bit weights of an 8B model take 16 GB
MEMORY_SHARE = 0.1
CGROUP = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
_TRUE = ("1", "ON", "YES", "TRUE")
# Variables that slow training down or change its behaviour.
DEBUG = {
    "CUDA_LAUNCH_BLOCKING": "the host waits for every kernel: unset it",
    "TORCH_LOGS": "torch logs its compilation: unset it",
    "TORCH_DISTRIBUTED_DEBUG": "collectives are checked: unset it",
    "TORCH_SHOW_CPP_STACKTRACES": "errors are slower: unset it",
    "TORCHDYNAMO_DISABLE": "optimizations.compile has no effect: unset it",
    "TORCH_COMPILE_DISABLE": "optimizations.compile has no effect: unset it",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every tensor is allocated by the driver: unset it",
    "PYTORCH_CUDA_ALLOC_CONF": "the allocator is not the default: unset it, or set it in all runs",
    "PYTORCH_ALLOC_CONF": "the allocator is not the default: unset it, or set it in all runs",
    "CUDA_DEVICE_MAX_CONNECTIONS": "kernel queues are not the default: unset it, or set it in all runs",
    "NCCL_DEBUG": "NCCL writes into the log: unset it",
    "NCCL_P2P_DISABLE": "GPUs do not use peer-to-peer: unset it unless `ftbench probe` recommends it",
    "NVIDIA_TF32_OVERRIDE": "the precision of float32 products is not that of the spec: unset it",
    "OMP_NUM_THREADS": "it limits CPU threads: unset it if the CPU trains or prepares data",
}
_HARMLESS = {"NCCL_DEBUG": ("VERSION", "WARN"), "TORCH_DISTRIBUTED_DEBUG": ("OFF",)}


def check(out: Path, environment: Mapping[str, str]) -> list[Finding]:
    """Return the findings. Contact the Hub for at most HUB_S seconds."""
    weights, cache = machine.cache_dir(), hub_cache(environment)
    return [
        Finding(AREA, "disk for runs", *disk(out, "choose another disk with --out", MINIMUM_FREE_BYTES / GIB)),
        Finding(AREA, "disk for weights", *disk(weights, "set FTBENCH_CACHE to a larger disk", ROOM_GB, "warn")),
        Finding(AREA, "disk for the hub", *disk(cache, "set HF_HOME to a larger disk", ROOM_GB, "warn")),
        Finding(AREA, "memory", *_memory()),
        *(Finding(AREA, "environment", *answer) for answer in debug_variables(environment)),
        Finding(AREA, "hub", *hub(environment)),
    ]


def free_gb(path: Path) -> float:
    """Return the free space in GiB on the disk of a path, which does not need to exist."""
    return shutil.disk_usage(_existing(path)).free / GIB


def _existing(path: Path) -> Path:
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


def disk(path: Path, fix: str, needed_gb: float, full: Verdict = "fail") -> Answer:
    """Check that a folder is writable and has `needed_gb` GiB; `full` is the verdict if it has less."""
    folder = _existing(path)
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return "fail", f"{path} is not writable: {fix}"
    free = f"{units.gibibytes(free_gb(path))} GiB free at {path}"
    return ("ok", free) if free_gb(path) >= needed_gb else (full, f"{free}: {fix}, or delete files")


def hub_cache(environment: Mapping[str, str]) -> Path:
    """Return the cache folder of the Hub's client."""
    if folder := environment.get("HF_HUB_CACHE"):
        return Path(folder)
    home = environment.get("HF_HOME") or Path(
        environment.get("XDG_CACHE_HOME") or Path.home() / ".cache", "huggingface"
    )
    return Path(home, "hub")


def _memory() -> Answer:
    memory, limit = psutil.virtual_memory(), memory_limit(*CGROUP)
    text = f"{units.gibibytes(memory.available / GIB)} GiB of {units.gibibytes(memory.total / GIB)} GiB are free"
    if limit is not None and limit < memory.total:
        return "warn", (
            f"{text}, but this container or service may use only {units.gibibytes(limit / GIB)} GiB: raise the limit "
            "(docker run --memory, MemoryMax=), or keep weights, data and pinned memory below it"
        )
    if memory.available < memory.total * MEMORY_SHARE:
        return "warn", f"{text}: stop other programs, otherwise loading a model may swap or be killed"
    return "ok", text


def memory_limit(entry: Path, root: Path) -> int | None:
    """Return the memory limit in bytes of this process's control group or a parent (cgroups v2 and v1), or None."""
    limits = [*(folder / "memory.max" for folder in _groups(entry, root)), root / "memory" / "memory.limit_in_bytes"]
    return min((int(text) for path in limits if (text := _read(path)).isdigit()), default=None)


def _groups(entry: Path, root: Path) -> list[Path]:
    """Return the folders of this process's control group and its parents."""
    line = next((line for line in _read(entry).splitlines() if line.startswith("0::/")), "0::/")
    own = root / line[4:]
    return [own, *(folder for folder in own.parents if folder == root or root in folder.parents)]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def debug_variables(environment: Mapping[str, str]) -> list[Answer]:
    """Return a warning for each variable that changes measurements, or a single `ok`."""
    values = {name: environment[name] for name in DEBUG if environment.get(name, "0") not in ("", "0")}
    answers: list[Answer] = [
        ("warn", f"{name}={value if '/' not in value and len(value) <= 60 else '…'}: {DEBUG[name]}")
        for name, value in values.items() if value.upper() not in _HARMLESS.get(name, ())
    ]  # fmt: skip
    return answers or [("ok", "no variable changes measurements")]


def hub(environment: Mapping[str, str]) -> Answer:
    """Check whether models and data sets can be downloaded, with one HEAD request of at most HUB_S seconds."""
    if variable := next((name for name in _OFFLINE if environment.get(name, "").upper() in _TRUE), None):
        return "n/a", f"not checked because {variable} is set: only cached models and data sets can be loaded"
    endpoint = environment.get("HF_ENDPOINT") or "https://huggingface.co"
    reasons: list[str] = []
    # The timeout of a socket does not cover the name lookup, so the request runs in a thread.
    thread = threading.Thread(target=lambda: reasons.append(_connect(endpoint)), daemon=True)
    thread.start()
    thread.join(HUB_S)
    reason = reasons[0] if reasons else f"no answer within {HUB_S:.0f} s"
    if not reason:
        return "ok", "reachable"
    return "warn", (
        f"not reachable ({reason}): set model.path or model.weights=random, set HF_ENDPOINT to a mirror, or fill the "
        "cache elsewhere and set HF_HUB_OFFLINE=1"
    )


def _connect(endpoint: str) -> str:
    """Return why the endpoint cannot be reached; empty if it answers."""
    try:
        with urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=HUB_S):
            return ""
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code}" if error.code in (401, 403, 407) or error.code >= 500 else ""
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error))

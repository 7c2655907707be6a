"""The machine around the GPU: disk, memory, processors, environment, and the way to the hub."""

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
from ftbench.doctor.findings import Answer, Finding, Verdict
from ftbench.launch.runner import MINIMUM_FREE_BYTES
from ftbench.store import machine

AREA = "host"
HUB_S = 3.0
ROOM_GB = 20.0  # the 16-bit weights of an 8B model take 16 GB
MEMORY_SHARE = 0.1
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
_TRUE = ("1", "ON", "YES", "TRUE")
# Variables that make training slower, or other than it would be elsewhere, and what to do; a run keeps their values.
DEBUG = {
    "CUDA_LAUNCH_BLOCKING": "every kernel is waited for: unset it",
    "TORCH_LOGS": "torch logs while it compiles: unset it",
    "TORCH_DISTRIBUTED_DEBUG": "collectives are checked: unset it",
    "TORCH_SHOW_CPP_STACKTRACES": "errors are slower: unset it",
    "TORCHDYNAMO_DISABLE": "optimizations.compile does nothing: unset it",
    "TORCH_COMPILE_DISABLE": "optimizations.compile does nothing: unset it",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every tensor is allocated anew: unset it",
    "PYTORCH_CUDA_ALLOC_CONF": "memory is allocated in another way than by default: unset it, or set it in all runs",
    "PYTORCH_ALLOC_CONF": "memory is allocated in another way than by default: unset it, or set it in all runs",
    "CUDA_DEVICE_MAX_CONNECTIONS": "kernels queue in another way than by default: unset it, or set it in all runs",
    "NCCL_DEBUG": "NCCL writes into the log: unset it",
    "NCCL_P2P_DISABLE": "GPUs do not reach each other directly: unset it unless `ftbench probe` asks for it",
    "NVIDIA_TF32_OVERRIDE": "float32 products are not what the spec says: unset it",
    "OMP_NUM_THREADS": "it limits the threads of the CPU: unset it where the CPU trains or prepares data",
}
_HARMLESS = {"NCCL_DEBUG": ("VERSION", "WARN"), "TORCH_DISTRIBUTED_DEBUG": ("OFF",)}


def check(out: Path, environment: Mapping[str, str]) -> list[Finding]:
    """Return the findings; ask the hub, for HUB_S seconds at the most."""
    weights, cache = machine.cache_dir(), hub_cache(environment)
    return [
        Finding(AREA, "disk for runs", *disk(out, "write elsewhere with --out", MINIMUM_FREE_BYTES / GIB)),
        Finding(AREA, "disk for weights", *disk(weights, "set FTBENCH_CACHE to a larger place", ROOM_GB, "warn")),
        Finding(AREA, "disk for the hub", *disk(cache, "set HF_HOME to a larger place", ROOM_GB, "warn")),
        Finding(AREA, "memory", *_memory()),
        Finding(AREA, "memory limit", *_memory_limit()),
        Finding(AREA, "processors", *_processors()),
        *(Finding(AREA, "environment", *answer) for answer in debug_variables(environment)),
        Finding(AREA, "hub", *hub(environment)),
    ]


def existing(path: Path) -> Path:
    """Return the path itself, or the nearest folder above it that is there."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


def free_gb(path: Path) -> float:
    """Return the GiB that can be written to the disk of a path that need not exist yet."""
    return shutil.disk_usage(existing(path)).free / GIB


def disk(path: Path, way_out: str, needed_gb: float, full: Verdict = "fail") -> Answer:
    """Judge whether a folder can be written and has room; `full` is the verdict where it has not."""
    folder = existing(path)
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return "fail", f"{path} cannot be written: {way_out}"
    free = f"{units.gibibytes(free_gb(path))} GiB free at {path}"
    return ("ok", free) if free_gb(path) >= needed_gb else (full, f"{free}: {way_out}, or free some")


def hub_cache(environment: Mapping[str, str]) -> Path:
    """Return where the hub's client keeps what it downloaded."""
    if folder := environment.get("HF_HUB_CACHE"):
        return Path(folder)
    home = environment.get("HF_HOME") or Path(
        environment.get("XDG_CACHE_HOME") or Path.home() / ".cache", "huggingface"
    )
    return Path(home, "hub")


def _memory() -> Answer:
    memory = psutil.virtual_memory()
    title = f"{units.gibibytes(memory.available / GIB)} GiB of {units.gibibytes(memory.total / GIB)} GiB are free"
    if memory.available >= memory.total * MEMORY_SHARE:
        return "ok", title
    return "warn", f"{title}: end other programs, or loading a model will swap or be killed"


def _memory_limit() -> Answer:
    limit = memory_limit(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    if limit is None or limit >= psutil.virtual_memory().total:
        return "ok", "none below the machine's own"
    return "warn", (
        f"this container or service may use {units.gibibytes(limit / GIB)} GiB and is killed above: give it more "
        "(docker run --memory, MemoryMax=), or keep weights, data and pinned memory below"
    )


def memory_limit(entry: Path, root: Path) -> int | None:
    """Return the bytes that this process's control group, or one above it, may use; None without a limit (cgroups v2
    and v1)."""
    limits = [*(folder / "memory.max" for folder in _groups(entry, root)), root / "memory" / "memory.limit_in_bytes"]
    return min((int(text) for path in limits if (text := _read(path)).isdigit()), default=None)


def processor_limit(entry: Path, root: Path) -> float | None:
    """Return the processors' worth of time that this process's control group, or one above it, may use; None without a
    limit."""
    limits = []
    for folder in _groups(entry, root):
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit():
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def _groups(entry: Path, root: Path) -> list[Path]:
    """Return the control group of this process and those above it, as folders."""
    line = next((line for line in _read(entry).splitlines() if line.startswith("0::/")), "0::/")
    own = root / line[4:]
    return [own, *(folder for folder in own.parents if folder == root or root in folder.parents)]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _processors() -> Answer:
    present, usable = os.cpu_count() or 1, len(os.sched_getaffinity(0))
    limit = processor_limit(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    if limit is not None and limit < usable:
        return "warn", (
            f"this container or service may use the time of {limit:g} of {present}: give it more (docker run --cpus, "
            "CPUQuota=), or launches and data may hold up the GPU"
        )
    if usable < present:
        return "warn", (
            f"this process may use {usable} of {present} (affinity): start it without taskset or numactl, or say so "
            "beside the figures"
        )
    return "ok", f"{present}, all of them usable"


def debug_variables(environment: Mapping[str, str]) -> list[Answer]:
    """Return an answer for each variable that changes what is measured; one that all is well without them."""
    values = {name: environment[name] for name in DEBUG if environment.get(name, "0") not in ("", "0")}
    answers: list[Answer] = [
        ("warn", f"{name}={value if '/' not in value and len(value) <= 60 else '…'}: {DEBUG[name]}")
        for name, value in values.items() if value.upper() not in _HARMLESS.get(name, ())
    ]  # fmt: skip
    return answers or [("ok", "no variable that slows training or changes what is measured")]


def offline(environment: Mapping[str, str]) -> str | None:
    """Return the variable that keeps the hub's client from asking, if one does."""
    return next((name for name in _OFFLINE if environment.get(name, "").upper() in _TRUE), None)


def hub(environment: Mapping[str, str]) -> Answer:
    """Judge whether models and data sets can be downloaded: one request for headers, given up after HUB_S seconds."""
    if variable := offline(environment):
        return "n/a", f"not asked, since {variable} is set: only the cache can be loaded from, unless you unset it"
    endpoint = environment.get("HF_ENDPOINT") or "https://huggingface.co"
    reasons: list[str] = []
    # A name that does not resolve holds longer than any timeout of a socket, so the request has a thread to hang in.
    thread = threading.Thread(target=lambda: reasons.append(_ask(endpoint)), daemon=True)
    thread.start()
    thread.join(HUB_S)
    reason = reasons[0] if reasons else f"no answer within {HUB_S:.0f} s"
    if not reason:
        return "ok", "it answers"
    return "warn", (
        f"not reached ({reason}): give model.path, set model.weights=random, point HF_ENDPOINT to a mirror, or fill "
        "the cache elsewhere and set HF_HUB_OFFLINE=1"
    )


def _ask(endpoint: str) -> str:
    """Return nothing where the endpoint answers, else why not."""
    try:
        with urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=HUB_S):
            return ""
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code}" if error.code in (401, 403, 407) or error.code >= 500 else ""
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error))

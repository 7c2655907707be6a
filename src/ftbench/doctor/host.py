"""The machine around the GPU: disk, memory, processors, environment, and the way to the hub."""

from __future__ import annotations

import os
import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from ftbench.core import units
from ftbench.core.units import GIB
from ftbench.doctor.findings import Finding, Verdict
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
    """The findings; asks the hub, for HUB_S seconds at the most."""
    return [
        _disk("disk for runs", out, "write elsewhere with --out", MINIMUM_FREE_BYTES / GIB),
        _disk("disk for weights", machine.cache_dir(), "set FTBENCH_CACHE to a larger place", ROOM_GB, full="warn"),
        _disk("disk for the hub", hub_cache(environment), "set HF_HOME to a larger place", ROOM_GB, full="warn"),
        *_memory(),
        _processors(),
        *debug_variables(environment),
        hub(environment),
    ]


def _finding(name: str, verdict: Verdict, text: str) -> Finding:
    return Finding(AREA, name, verdict, text)


def existing(path: Path) -> Path:
    """The path itself, or the nearest folder above it that is there."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


def free_gb(path: Path) -> float:
    """GiB that can be written to the disk of a path that need not exist yet."""
    return shutil.disk_usage(existing(path)).free / GIB


def _disk(name: str, path: Path, way_out: str, needed_gb: float, full: Verdict = "fail") -> Finding:
    folder = existing(path)
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return _finding(name, "fail", f"{path} cannot be written: {way_out}")
    free = free_gb(path)
    if free < needed_gb:
        return _finding(name, full, f"{units.gibibytes(free)} GiB free at {path}: {way_out}, or free some")
    return _finding(name, "ok", f"{units.gibibytes(free)} GiB free at {path}")


def hub_cache(environment: Mapping[str, str]) -> Path:
    """Where the hub's client keeps what it downloaded."""
    if told := environment.get("HF_HUB_CACHE"):
        return Path(told)
    home = environment.get("HF_HOME") or Path(
        environment.get("XDG_CACHE_HOME") or Path.home() / ".cache", "huggingface"
    )
    return Path(home, "hub")


def _memory() -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    title = f"{units.gibibytes(memory.available / GIB)} GiB of {units.gibibytes(memory.total / GIB)} GiB are free"
    if memory.available < memory.total * MEMORY_SHARE:
        yield _finding("memory", "warn", f"{title}: end other programs, or loading a model will swap or be killed")
    else:
        yield _finding("memory", "ok", title)
    limit = memory_limit(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    if limit is not None and limit < memory.total:
        yield _finding(
            "memory limit", "warn",
            f"this container or service may use {units.gibibytes(limit / GIB)} GiB and is killed above: give it more "
            "(docker run --memory, MemoryMax=), or keep weights, data and pinned memory below",
        )  # fmt: skip
    else:
        yield _finding("memory limit", "ok", "none below the machine's own")


def memory_limit(entry: Path, root: Path) -> int | None:
    """Bytes that this process's control group, or one above it, may use; None without a limit (cgroups v2 and v1)."""
    limits = [
        *(folder / "memory.max" for folder in _groups(entry, root)),
        root / "memory" / "memory.limit_in_bytes",
    ]
    found = [int(text) for path in limits if (text := _read(path)).isdigit()]
    return min(found, default=None)


def processor_limit(entry: Path, root: Path) -> float | None:
    """Processors' worth of time that this process's control group, or one above it, may use; None without a limit."""
    found = []
    for folder in _groups(entry, root):
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit():
            found.append(int(quota) / int(period))
    return min(found, default=None)


def _groups(entry: Path, root: Path) -> list[Path]:
    """The control group of this process and those above it, as folders."""
    line = next((line for line in _read(entry).splitlines() if line.startswith("0::/")), "0::/")
    own = root / line[4:]
    return [own, *(folder for folder in own.parents if folder == root or root in folder.parents)]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _processors() -> Finding:
    there, usable = os.cpu_count() or 1, len(os.sched_getaffinity(0))
    limit = processor_limit(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    if limit is not None and limit < usable:
        return _finding(
            "processors", "warn", f"this container or service may use the time of {limit:g} of {there}: give it more "
            "(docker run --cpus, CPUQuota=), or launches and data may hold up the GPU",
        )  # fmt: skip
    if usable < there:
        return _finding(
            "processors", "warn", f"this process may use {usable} of {there} (affinity): start it without taskset or "
            "numactl, or say so beside the figures",
        )  # fmt: skip
    return _finding("processors", "ok", f"{there}, all of them usable")


def debug_variables(environment: Mapping[str, str]) -> Iterator[Finding]:
    """One finding for each variable that changes what is measured; one that all is well without them."""
    set_ = {name: environment[name] for name in DEBUG if environment.get(name, "0") not in ("", "0")}
    found = False
    for name, value in set_.items():
        if value.upper() in _HARMLESS.get(name, ()):
            continue
        found = True
        shown = value if "/" not in value and len(value) <= 60 else "…"
        yield _finding("environment", "warn", f"{name}={shown}: {DEBUG[name]}")
    if not found:
        yield _finding("environment", "ok", "no variable that slows training or changes what is measured")


def offline(environment: Mapping[str, str]) -> str | None:
    """The variable that keeps the hub's client from asking, if one does."""
    return next((name for name in _OFFLINE if environment.get(name, "").upper() in _TRUE), None)


def hub(environment: Mapping[str, str]) -> Finding:
    """Whether models and data sets can be downloaded. One request for headers, given up after HUB_S seconds."""
    if variable := offline(environment):
        return _finding(
            "hub", "n/a", f"not asked, since {variable} is set: only the cache can be loaded from, unless you unset it"
        )
    endpoint = environment.get("HF_ENDPOINT") or "https://huggingface.co"
    told: list[str] = []
    # A name that does not resolve holds longer than any timeout of a socket, so the request has a thread to hang in.
    thread = threading.Thread(target=lambda: told.append(_ask(endpoint)), daemon=True)
    thread.start()
    thread.join(HUB_S)
    reason = told[0] if told else f"no answer within {HUB_S:.0f} s"
    if not reason:
        return _finding("hub", "ok", "it answers")
    return _finding(
        "hub", "warn",
        f"not reached ({reason}): give model.path, set model.weights=random, point HF_ENDPOINT to a mirror, or fill "
        "the cache elsewhere and set HF_HUB_OFFLINE=1",
    )  # fmt: skip


def _ask(endpoint: str) -> str:
    """Empty where the endpoint answers, else why not."""
    try:
        with urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=HUB_S):
            return ""
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code}" if error.code in (401, 403, 407) or error.code >= 500 else ""
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error))

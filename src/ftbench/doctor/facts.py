"""Everything that the doctor looks at, gathered once: the checks are functions of it and read nothing themselves."""

import importlib.util
import json
import os
import platform
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from ftbench.doctor.bounds import Requirement, requirements
from ftbench.launch import process
from ftbench.launch.runner import capability
from ftbench.store import machine
from ftbench.store.rundir import first_gpu

CHILD_S = 120.0  # importing torch takes 2 s, on a cold disk 20, on a busy machine longer


@dataclass(frozen=True, slots=True)
class Facts:
    """This machine. `described` is machine.json; `driver` what NVML says besides; `torch` what `worker.versions` says,
    empty without torch; `why_no_torch` the reason for that; `has` whether a module can be imported; `files` the names
    of the files of a package's folder."""

    described: dict[str, Any]
    driver: dict[str, Any]
    torch: dict[str, Any]
    why_no_torch: str | None
    environment: Mapping[str, str]
    requirements: list[Requirement]
    version: Callable[[str], str | None]
    has: Callable[[str], bool]
    files: Callable[[str], list[str]]
    kernel: str = field(default_factory=platform.release)

    @property
    def gpu(self) -> dict[str, Any]:
        """Return the GPU of machine.json; empty without one."""
        return first_gpu(self.described)

    @property
    def capability(self) -> tuple[int, int] | None:
        """Return the compute capability as NVML tells it, or torch where NVML does not answer."""
        if (known := capability(self.described)) is not None or not self.torch.get("devices"):
            return known
        major, minor = self.torch["devices"][0]["capability"]
        return major, minor


def ask_torch(environment: Mapping[str, str], within_s: float = CHILD_S) -> tuple[dict[str, Any], str | None]:
    """Return what a short child that imports torch says, or nothing and the reason."""
    if not has("torch"):
        return {}, "torch is not installed"
    with tempfile.TemporaryDirectory() as folder:
        _, why = process.run_module(
            "ftbench.worker.versions", (), {**environment, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
            log := Path(folder, "log.txt"), within_s, f"did not answer within {within_s:.0f} s",
        )  # fmt: skip
        lines = log.read_text(errors="replace").splitlines()
    said = next((line for line in reversed(lines) if line.startswith("{")), "")
    try:
        return json.loads(said), None
    except ValueError:
        return {}, f"torch {why or 'said nothing'}"


def gather() -> Facts:
    """Return the facts of this machine. The GPU is read before torch touches it."""
    environment = dict(os.environ)
    described = machine.describe()
    nvml = machine.nvml_module()
    handle = machine.handle_of(nvml, environment.get("CUDA_VISIBLE_DEVICES")) if nvml else None
    driver = read_driver(nvml, handle) if nvml else {}
    torch, why = ask_torch(environment)
    return Facts(described, driver, torch, why, environment, requirements(), version, has, files)


def read_driver(nvml: Any, handle: Any | None) -> dict[str, Any]:
    """Return what machine.json does not hold, from NVML; a value that this driver or GPU does not have is None. Without
    a handle, how many GPUs there are."""

    def ask(function: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, function)(*arguments)
        except (nvml.NVMLError, AttributeError):
            return None

    if handle is None:
        return {"gpus": ask("nvmlDeviceGetCount")}
    clock = nvml.NVML_CLOCK_SM
    persistence = ask("nvmlDeviceGetPersistenceMode", handle)
    return {
        "gpus": ask("nvmlDeviceGetCount"),
        "persistence": None if persistence is None else bool(persistence),
        "application_clock_mhz": ask("nvmlDeviceGetApplicationsClock", handle, clock),
        "default_clock_mhz": ask("nvmlDeviceGetDefaultApplicationsClock", handle, clock),
        "throttle": ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle),
    }


def version(package: str) -> str | None:
    """Return the installed version of a package; None if it is not there."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def has(module: str) -> bool:
    """Return whether a top-level module can be imported; import nothing."""
    return importlib.util.find_spec(module) is not None


def files(package: str) -> list[str]:
    """Return the names of the files in the folder of a top-level package; import nothing."""
    spec = importlib.util.find_spec(package)
    folders = (spec.submodule_search_locations if spec else None) or ()
    return sorted(path.name for folder in folders for path in Path(folder).iterdir())


def cuda_version(text: str | int | None) -> tuple[int, int] | None:
    """Return `13.0`, or NVML's 13000, as (13, 0)."""
    if isinstance(text, int):
        return text // 1000, text % 1000 // 10
    parts = re.match(r"(\d+)\.(\d+)", text or "")
    return (int(parts[1]), int(parts[2])) if parts else None

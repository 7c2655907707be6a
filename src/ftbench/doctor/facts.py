"""The facts about this machine that all checks use, and the result of a check."""

import importlib.util
import json
import os
import platform
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from packaging import requirements as pep508
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion

from ftbench.core.table import text_table
from ftbench.launch import process
from ftbench.launch.checks import capability
from ftbench.store import machine
from ftbench.store.rundir import first_gpu

CHILD_S = 120.0  # importing torch takes 2 s, or 20 s from a cold disk
_EXTRA = re.compile(r"extra == \"([\w-]+)\"")

Verdict = Literal["ok", "warn", "fail", "n/a"]
Answer = tuple[Verdict, str]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        verdict: `ok`; `warn`: it works, but slower or with doubtful results; `fail`: it prevents a run; `n/a`: it is
            not installed or could not be checked.
        text: A sentence. It says how to fix the problem, unless the verdict is `ok`.
    """

    area: str
    name: str
    verdict: Verdict
    text: str


def as_text(findings: Iterable[Finding], width: int | None = None) -> str:
    """Return findings grouped by area, wrapped at `width` characters (by default the terminal's width)."""
    areas: dict[str, list[tuple[str, str, str]]] = {}
    for finding in findings:
        areas.setdefault(finding.area, []).append((f"  {finding.verdict}", finding.name, finding.text))
    return "\n\n".join(f"{area}\n{text_table(['', '', ''], rows, width)}" for area, rows in areas.items())


class Requirement(pep508.Requirement):
    """A required package. `extra` is the extra of ftbench that needs it, None for ftbench itself."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.name, extra = canonicalize_name(self.name), _EXTRA.search(str(self.marker or ""))
        self.extra = extra[1] if extra else None

    @property
    def bounds(self) -> str:
        """Return `>=2.8,<2.14`, the lower bound first."""
        return ",".join(sorted(map(str, self.specifier), key=lambda bound: (bound[0] != ">", bound)))

    def met_by(self, version: str) -> bool:
        """Return whether a version is within the bounds (PEP 440)."""
        try:
            return self.specifier.contains(version, prereleases=True)
        except InvalidVersion:
            return False


def requirements() -> list[Requirement]:
    """Return the requirements of the installed ftbench without the development tools; empty if it is not installed."""
    try:
        texts = metadata.requires("ftbench") or ()
    except metadata.PackageNotFoundError:
        return []
    return [need for need in map(Requirement, texts) if need.extra != "dev"]


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts about this machine.

    Attributes:
        described: The contents of machine.json.
        clocks: SM clocks and throttle reasons from NVML. Empty without a GPU.
        torch: The output of `worker.versions`. Empty if torch cannot be imported.
        why_no_torch: Why torch cannot be imported.
        version: Maps a package to its installed version.
        has: Whether a module can be imported.
        files: Maps a package to the names of its files.
    """

    described: dict[str, Any]
    clocks: dict[str, Any]
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
        """The GPU of machine.json; empty without one."""
        return first_gpu(self.described)

    @property
    def capability(self) -> tuple[int, int] | None:
        """The compute capability according to NVML, otherwise according to torch."""
        if (known := capability(self.described)) is not None or not self.torch.get("devices"):
            return known
        major, minor = self.torch["devices"][0]["capability"]
        return major, minor


def gather() -> Facts:
    """Return the facts about this machine. Read the GPU before torch uses it."""
    environment = dict(os.environ)
    described = machine.describe()
    nvml = machine.nvml_module()
    handle = machine.handle_of(nvml, environment.get("CUDA_VISIBLE_DEVICES")) if nvml else None
    clocks = read_clocks(nvml, handle) if handle is not None else {}
    torch, why = inspect_torch(environment)
    return Facts(described, clocks, torch, why, environment, requirements(), version, has, files)


def inspect_torch(environment: Mapping[str, str], limit_s: float = CHILD_S) -> tuple[dict[str, Any], str | None]:
    """Import torch in a child process and return what `worker.versions` prints, or nothing and the reason."""
    if not has("torch"):
        return {}, "torch is not installed"
    with tempfile.TemporaryDirectory() as folder:
        _, why = process.run_module(
            "ftbench.worker.versions", (), {**environment, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
            log := Path(folder, "log.txt"), limit_s, f"did not answer within {limit_s:.0f} s",
        )  # fmt: skip
        lines = log.read_text(errors="replace").splitlines()
    document = next((line for line in reversed(lines) if line.startswith("{")), "")
    try:
        return json.loads(document), None
    except ValueError:
        return {}, f"torch {why or 'printed nothing'}"


def read_clocks(nvml: Any, handle: Any) -> dict[str, Any]:
    """Return application and default SM clock in MHz and the throttle reasons; None if the driver does not support a
    query."""

    def query(function: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, function)(handle, *arguments)
        except (nvml.NVMLError, AttributeError):
            return None

    return {
        "application_clock_mhz": query("nvmlDeviceGetApplicationsClock", nvml.NVML_CLOCK_SM),
        "default_clock_mhz": query("nvmlDeviceGetDefaultApplicationsClock", nvml.NVML_CLOCK_SM),
        "throttle": query("nvmlDeviceGetCurrentClocksThrottleReasons"),
    }


def version(package: str) -> str | None:
    """Return the installed version of a package, None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def has(module: str) -> bool:
    """Return whether a top-level module can be imported, without importing it."""
    return importlib.util.find_spec(module) is not None


def files(package: str) -> list[str]:
    """Return the names of the files in a top-level package's folder, without importing it."""
    spec = importlib.util.find_spec(package)
    folders = (spec.submodule_search_locations if spec else None) or ()
    return sorted(path.name for folder in folders for path in Path(folder).iterdir())


def cuda_version(text: str | int | None) -> tuple[int, int] | None:
    """Return `13.0`, or NVML's 13000, as (13, 0)."""
    if isinstance(text, int):
        return text // 1000, text % 1000 // 10
    parts = re.match(r"(\d+)\.(\d+)", text or "")
    return (int(parts[1]), int(parts[2])) if parts else None

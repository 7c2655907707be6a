"""The facts about this machine that all checks use, and the result of a check."""

import importlib.util
import json
import os
import platform
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from ftbench.core.table import text_table
from ftbench.launch import process
from ftbench.launch.checks import capability
from ftbench.store import machine
from ftbench.store.rundir import first_gpu

CHILD_S = 120.0  # importing torch takes 2 s, or 20 s from a cold disk

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


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts about this machine.

    Attributes:
        described: The contents of machine.json.
        torch: The output of `worker.versions`. Empty if torch cannot be imported.
        why_no_torch: Why torch cannot be imported.
        environment: The variables of this process.
        kernel: The name of the kernel's release.
    """

    described: dict[str, Any]
    torch: dict[str, Any]
    why_no_torch: str | None
    environment: Mapping[str, str]
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
    torch, why = inspect_torch(environment)
    return Facts(described, torch, why, environment)


def inspect_torch(environment: Mapping[str, str], limit_s: float = CHILD_S) -> tuple[dict[str, Any], str | None]:
    """Import torch in a child process and return what `worker.versions` prints, or nothing and the reason."""
    if importlib.util.find_spec("torch") is None:
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


def version(package: str) -> str | None:
    """Return the installed version of a package, None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

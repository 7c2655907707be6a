"""All findings about this machine, and whether a spec can run on it."""

import dataclasses
import importlib.util
import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftbench.core.table import text_table
from ftbench.doctor import checks
from ftbench.doctor.checks import Facts, Finding
from ftbench.errors import FtbenchError
from ftbench.launch import checks as launch_checks
from ftbench.launch import process
from ftbench.spec.experiment import Experiment, resolve
from ftbench.spec.load import load
from ftbench.store import machine, rundir
from ftbench.store.rundir import first_gpu

SCHEMA = 1
AREA = "spec"
CHILD_S = 120.0  # importing torch takes 2 s, or 20 s from a cold disk


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The findings. `can_run` is None without a spec."""

    findings: list[Finding]
    can_run: bool | None
    described: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Return one JSON document."""
        return {
            "schema": SCHEMA,
            "date": rundir.now(),
            "can_run": self.can_run,
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "machine": self.described,
        }

    def as_text(self) -> str:
        """Return the findings by area, then a summary."""
        count = {verdict: sum(finding.verdict == verdict for finding in self.findings) for verdict in ("warn", "fail")}
        ends = [f"{count['fail']} fail, {count['warn']} warn"]
        if self.can_run is not None:
            ends.append(f"the spec {'can' if self.can_run else 'cannot'} run here")
        return f"{as_text(self.findings)}\n\n{'; '.join(ends)}"


def examine(spec_path: Path | None, sets: Sequence[str], out: Path) -> Diagnosis:
    """Check this machine, and whether the spec can run on it. Raise SpecError for an invalid spec."""
    spec = load(spec_path, sets) if spec_path else None
    facts = gather()
    findings = [
        *checks.stack(facts), *checks.gpu(facts), *checks.methods(facts), *checks.host(out, facts.environment)
    ]  # fmt: skip
    if spec is None:
        return Diagnosis(findings, None, facts.described)
    failures = [Finding(AREA, name, "fail", text) for name, text in obstacles(spec, facts, findings)]
    predicted, problem = _prediction(resolve(spec, facts.capability), facts.described, out)
    if problem:
        failures.append(Finding(AREA, "memory and time", "fail", problem))
    works = [Finding(AREA, spec.name, "ok", f"{spec.method.name} of {spec.model.id} can run on this machine")]
    if predicted:
        works.append(Finding(AREA, "memory and time", "ok", predicted))
    return Diagnosis([*findings, *(failures or works)], not failures, facts.described)


def _prediction(spec: Experiment, described: dict[str, Any], out: Path) -> tuple[str | None, str | None]:
    """Return the prediction for a run here, and the reason why it would fail."""
    try:
        from ftbench.estimate import api
    except ImportError:
        return None, None
    return api.expectation(spec, first_gpu(described) or None, out), api.problem(spec, described, out)


def obstacles(spec: Experiment, facts: Facts, findings: Sequence[Finding]) -> list[tuple[str, str]]:
    """Return (name, sentence) for everything that prevents a run: what `run` refuses, failed checks of things that the
    spec needs, and weights or data that cannot be loaded."""
    pairs = [(spec.name, sentence) for sentence in _refused(spec, facts)]
    needed = {"disk for runs": ("fail",)}
    if spec.launch.mock == "off":
        needed |= {"torch build": ("fail",)}
        needed |= {"compiler": ("n/a",)} if spec.optimizations.compile else {}
        if next(each for each in findings if each.name == "hub").verdict != "ok":
            pairs += launch_checks.missing(spec, facts.environment)
    pairs += [(each.name, each.text) for each in findings if each.verdict in needed.get(each.name, ())]
    names: dict[str, str] = {}
    for name, sentence in pairs:
        names.setdefault(sentence, name)
    return [(name, sentence) for sentence, name in names.items()]


def _refused(spec: Experiment, facts: Facts) -> list[str]:
    try:
        launch_checks.check(resolve(spec, facts.capability), facts.described)
    except FtbenchError as error:
        return str(error).splitlines()
    return []


def as_text(findings: Iterable[Finding], width: int | None = None) -> str:
    """Return findings grouped by area, wrapped at `width` characters (by default the terminal's width)."""
    areas: dict[str, list[tuple[str, str, str]]] = {}
    for finding in findings:
        areas.setdefault(finding.area, []).append((f"  {finding.verdict}", finding.name, finding.text))
    return "\n\n".join(f"{area}\n{text_table(['', '', ''], rows, width)}" for area, rows in areas.items())


def gather() -> Facts:
    """Return the facts about this machine. Read the GPU before torch uses it."""
    environment = dict(os.environ)
    described = machine.describe()
    torch, why = inspect_torch(environment)
    return Facts(described, torch, why, environment)


def inspect_torch(environment: Mapping[str, str], limit_s: float = CHILD_S) -> tuple[dict[str, Any], str | None]:
    """Import torch in a child process and return what `worker.device` prints, or nothing and the reason."""
    if importlib.util.find_spec("torch") is None:
        return {}, "torch is not installed"
    with tempfile.TemporaryDirectory() as folder:
        _, why = process.run_module(
            "ftbench.worker.device", (), {**environment, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
            log := Path(folder, "log.txt"), limit_s, f"did not answer within {limit_s:.0f} s",
        )  # fmt: skip
        lines = log.read_text(errors="replace").splitlines()
    document = next((line for line in reversed(lines) if line.startswith("{")), "")
    try:
        return json.loads(document), None
    except ValueError:
        return {}, f"torch {why or 'printed nothing'}"

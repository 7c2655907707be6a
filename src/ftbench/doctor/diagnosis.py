"""Collect all findings about this machine, and decide whether a spec can run on it."""

import dataclasses
import importlib.util
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftbench.core.stats import grouped_by
from ftbench.core.table import text_table
from ftbench.doctor import checks
from ftbench.doctor.checks import Facts, Finding
from ftbench.errors import FtbenchError
from ftbench.estimate import api
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
    """The result of `ftbench doctor`. `can_run` is True if the given spec can run here. It is None without a spec."""

    findings: list[Finding]
    can_run: bool | None
    described: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Return the diagnosis as a JSON document."""
        return {
            "schema": SCHEMA,
            "date": rundir.now(),
            "can_run": self.can_run,
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "machine": self.described,
        }

    def as_text(self) -> str:
        """Return the findings as text, grouped by area, followed by a summary."""
        areas = grouped_by(self.findings, lambda finding: finding.area)
        tables = (text_table(["", "", ""], [(f"  {each.verdict}", each.name, each.text) for each in part])
                  for part in areas.values())  # fmt: skip
        fail, warn = (sum(finding.verdict == verdict for finding in self.findings) for verdict in ("fail", "warn"))
        can = "" if self.can_run is None else f"; the spec {'can' if self.can_run else 'cannot'} run here"
        parts = (f"{area}\n{table}" for area, table in zip(areas, tables, strict=True))
        return "\n\n".join([*parts, f"{fail} fail, {warn} warn{can}"])


def examine(spec_path: Path | None, sets: Sequence[str], out: Path) -> Diagnosis:
    """Check this machine. If a spec is given, check whether it can run here. Raise SpecError for an invalid spec."""
    spec = load(spec_path, sets) if spec_path else None
    facts = gather()
    findings = [
        *checks.stack(facts), *checks.gpu(facts), *checks.methods(facts), *checks.host(out, facts.environment)
    ]  # fmt: skip
    if spec is None:
        return Diagnosis(findings, None, facts.described)
    findings += _of_spec(resolve(spec, facts.capability), facts.described, out)
    return Diagnosis(findings, not any(finding.verdict == "fail" for finding in findings), facts.described)


def _of_spec(spec: Experiment, described: dict[str, Any], out: Path) -> list[Finding]:
    """Run the checks of `ftbench run` on a spec. Return one finding per problem, or one with the expected cost."""
    problems = list[str]()
    try:
        launch_checks.check(spec, described)
        launch_checks.check_hub(spec)
    except FtbenchError as error:
        problems += str(error).splitlines()
    problems += filter(None, [api.problem(spec, described, out)])
    if problems:
        return [Finding(AREA, spec.name, "fail", problem) for problem in problems]
    expected = api.expectation(spec, first_gpu(described) or None, out)
    works = f"{spec.method.name} of {spec.model.id} can run on this machine"
    return [Finding(AREA, spec.name, "ok", "; ".join(filter(None, [works, expected])))]


def gather() -> Facts:
    """Collect the facts about this machine. Query the GPU before torch uses it."""
    described, environment = machine.describe(), dict(os.environ)
    return Facts(described, *inspect_torch(environment), environment)


def inspect_torch(environment: Mapping[str, str], limit_s: float = CHILD_S) -> tuple[dict[str, Any], str | None]:
    """Import torch in a child process. Return (output of `worker.device`, None). If this fails, return ({}, reason)."""
    if importlib.util.find_spec("torch") is None:
        return {}, "torch is not installed"
    with tempfile.TemporaryDirectory() as folder:
        why = process.run_module(
            "ftbench.worker.device", (), {**environment, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
            log := Path(folder, "log.txt"), limit_s, f"did not answer within {limit_s:.0f} s",
        )  # fmt: skip
        lines = log.read_text(errors="replace").splitlines()
    document = next((line for line in reversed(lines) if line.startswith("{")), "")
    try:
        return json.loads(document), None
    except ValueError:
        return {}, f"torch {why or 'printed nothing'}"

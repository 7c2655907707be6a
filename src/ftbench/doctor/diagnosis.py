"""All findings about this machine, and whether a spec can run on it."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftbench.doctor import checks
from ftbench.doctor.facts import Facts, Finding, as_text, gather
from ftbench.errors import FtbenchError
from ftbench.launch import checks as launch_checks
from ftbench.launch import hub
from ftbench.spec.experiment import Experiment, resolve
from ftbench.spec.load import load
from ftbench.store import rundir
from ftbench.store.rundir import first_gpu

SCHEMA = 1
AREA = "spec"


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
            pairs += hub.missing(spec, facts.environment)
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

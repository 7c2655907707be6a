"""Check which methods and optimizations work on this machine, with the same rules as `run`."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ftbench.doctor import stack
from ftbench.doctor.facts import Answer, Facts, Finding
from ftbench.errors import MissingError
from ftbench.launch import trl
from ftbench.spec.ablation import with_changes
from ftbench.spec.experiment import Experiment
from ftbench.spec.incompatibilities import machine_incompatibilities
from ftbench.spec.methods import METHODS
from ftbench.spec.optimizations import Optimizations, choices, switched_on

METHOD, OPTIMIZATION = "methods", "optimizations"
SMALLEST = {"name": "doctor", "model": {"id": "doctor/none"}}
_TRITON = ("compile", "liger")


def check(facts: Facts) -> list[Finding]:
    """Return one finding per method and per choice of each optimization, named `key` or `key value`."""
    return [
        *(Finding(METHOD, name, *method(facts, name)) for name in METHODS),
        *(
            Finding(OPTIMIZATION, label(key, value), *optimization(facts, key, value))
            for key in Optimizations.model_fields
            for value in choices(key)
        ),
    ]


def label(key: str, value: Any) -> str:
    """Return `compile`, `fp8 rowwise`, `attention sdpa`."""
    return key if value is True else f"{key} {value}"


def merged(findings: Sequence[Finding]) -> list[Finding]:
    """Replace the findings of one optimization by a single one if they all agree."""
    answers: dict[str, set[Answer]] = {}
    for each in findings:
        if each.area == OPTIMIZATION:
            answers.setdefault(each.name.split()[0], set()).add((each.verdict, each.text))
    return list(dict.fromkeys(
        replace(each, name=each.name.split()[0])
        if each.area == OPTIMIZATION and len(answers[each.name.split()[0]]) == 1 else each
        for each in findings
    ))  # fmt: skip


def used_by(spec: Experiment) -> list[tuple[str, str]]:
    """Return area and name of the findings that a spec depends on."""
    on = [
        label(key, value if value in choices(key) else True) for key, value in switched_on(spec.optimizations).items()
    ]
    return [(METHOD, spec.method.name), *((OPTIMIZATION, name) for name in on)]


def method(facts: Facts, name: str) -> Answer:
    """Return whether a method can train on this machine."""
    if answer := _refused(facts, Experiment.model_validate(SMALLEST | {"method": {"name": name}})):
        return answer
    if METHODS[name]().quantised and (build := stack.bitsandbytes(facts)) and build[0] == "fail":
        return "fail", f"bitsandbytes {build[1]}"
    return "ok", "works"


def optimization(facts: Facts, key: str, value: Any) -> Answer:
    """Return whether an optimization can be switched on on this machine."""
    if not facts.has("torch"):
        return "n/a", "training is not installed: see methods"
    spec = with_changes(Experiment.model_validate(SMALLEST), {f"optimizations.{key}": value})
    if answer := _refused(facts, spec):
        return answer
    if key in _TRITON and facts.capability is not None and not facts.has("triton"):
        return "n/a", "needs triton: pip install triton"
    if key == "compile" and not _has_compiler(facts):
        return "n/a", "needs a C compiler: apt-get install g++, or set CC and CXX"
    return "ok", "works"


def _refused(facts: Facts, spec: Experiment) -> Answer | None:
    """Return why `ftbench run` would refuse a spec on this machine."""
    problems = [*machine_incompatibilities(spec, facts.capability)]
    if not problems and (kernels := trl.lacks_kernels(spec.optimizations.attention)):
        problems.append(f"{kernels}, or use sdpa")
    if problems:
        return "n/a", "; ".join(problems)
    try:
        trl.check_installed(spec)
    except MissingError as error:
        return ("n/a" if facts.has("torch") else "fail"), str(error)
    return None


def _has_compiler(facts: Facts) -> bool:
    """Return whether torch.compile finds a compiler: C for Triton's launchers, C++ for the CPU."""
    variable, names = ("CC", ("gcc", "clang", "cc")) if facts.capability else ("CXX", ("g++", "clang++", "c++"))
    chosen = facts.environment.get(variable)
    return any(shutil.which(name) for name in ([chosen] if chosen else names))

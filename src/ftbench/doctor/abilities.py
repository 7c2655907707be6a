"""Each method and each optimization: works here, falls back, or what to install.

The functions that refuse a run say what a compute capability and an installation cannot do; what those leave to the
libraries (kernels of attention, compilers, CUDA builds) is known here.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ftbench.doctor import stack
from ftbench.doctor.facts import Facts
from ftbench.doctor.findings import Answer, Finding
from ftbench.errors import MissingError
from ftbench.launch import trl
from ftbench.spec.ablation import with_changes
from ftbench.spec.experiment import Experiment
from ftbench.spec.incompatibilities import machine_incompatibilities
from ftbench.spec.methods import METHODS
from ftbench.spec.optimizations import Optimizations, choices, switched_on
from ftbench.spec.optimizations.fp8 import DELAYED

METHOD, OPTIMIZATION = "methods", "optimizations"
HOPPER = (9, 0)
SMALLEST = {"name": "doctor", "model": {"id": "doctor/none"}}  # a spec
_NO_TRITON = "needs triton, which is not installed: pip install triton"


def check(facts: Facts) -> list[Finding]:
    """Return one finding for each method and for each choice of each optimization, named `key` or `key value`."""
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


def said_once(findings: Sequence[Finding]) -> list[Finding]:
    """Return findings for a person: what holds of every value of an optimization is said of the optimization."""
    answers: dict[str, set[Answer]] = {}
    for each in findings:
        if each.area == OPTIMIZATION:
            answers.setdefault(each.name.split()[0], set()).add((each.verdict, each.text))
    agreed = {name for name, different in answers.items() if len(different) == 1}
    return list(dict.fromkeys(
        replace(each, name=name) if each.area == OPTIMIZATION and name in agreed else each
        for each in findings for name in each.name.split()[:1]
    ))  # fmt: skip


def used_by(spec: Experiment) -> list[tuple[str, str]]:
    """Return area and name of the findings that a spec depends on."""
    switched = switched_on(spec.optimizations).items()
    on = [label(key, value if value in choices(key) else True) for key, value in switched]
    return [(METHOD, spec.method.name), *((OPTIMIZATION, name) for name in on)]


def method(facts: Facts, name: str) -> Answer:
    """Judge whether a method can train on this machine."""
    spec = Experiment.model_validate(SMALLEST | {"method": {"name": name}})
    if (refused := _refused(facts, spec)) is not None:
        return refused
    if METHODS[name]().quantised:
        if (build := stack.bitsandbytes(facts)) and build[0] == "fail":
            return "fail", f"bitsandbytes {build[1]}"
        if facts.capability is None:
            return "ok", "works, with bitsandbytes' kernels for the CPU"
    return "ok", "works"


def optimization(facts: Facts, key: str, value: Any) -> Answer:
    """Judge whether an optimization can be switched on on this machine."""
    if not facts.has("torch"):
        return "n/a", "nothing can be trained here yet: see methods"
    smallest = Experiment.model_validate(SMALLEST)
    if (refused := _refused(facts, with_changes(smallest, {f"optimizations.{key}": value}))) is not None:
        return refused
    return CHECKS[key](facts, str(value)) if key in CHECKS else ("ok", "works")


def _refused(facts: Facts, spec: Experiment) -> Answer | None:
    """Return what `ftbench run` would say of this machine to a spec before it starts; None if nothing."""
    if problems := machine_incompatibilities(spec, facts.capability):
        return "n/a", "; ".join(problems)
    try:
        trl.check_installed(spec)
    except MissingError as error:
        return ("n/a" if facts.has("torch") else "fail"), str(error)
    return None


def _attention(facts: Facts, value: str) -> Answer:
    if value in trl.FLASH:
        return _flash(facts, value)
    if value == "cudnn" and (facts.capability or (0, 0)) < (8, 0):
        return "n/a", "needs compute capability 8.0 or higher: use sdpa"
    if value == "flex_attention" and not facts.has("triton"):
        return "n/a", f"{_NO_TRITON}, or use sdpa"
    return "ok", "works, with the largest memory: it keeps every score" if value == "eager" else "works"


def _flash(facts: Facts, value: str) -> Answer:
    module, package = trl.FLASH[value]
    capability = facts.capability or (0, 0)
    this = f"this GPU has {capability[0]}.{capability[1]}"
    if capability < (8, 0):
        return "n/a", f"needs compute capability 8.0 or higher and {this}: use sdpa"
    if value == "flash_attention_3" and capability != HOPPER:
        return "n/a", f"its kernels are for Hopper (9.0) and {this}: use sdpa or flash_attention_2"
    if facts.has(module):
        return "ok", "works"
    if facts.has("kernels"):
        return "warn", (
            f"{package} is not installed; transformers takes the kernel from the hub: be online at the first run"
        )
    return "n/a", f"{package} is not installed: pip install it, or pip install kernels, or use sdpa"


def _compile(facts: Facts, value: str) -> Answer:
    if facts.capability is not None and not facts.has("triton"):
        return "n/a", _NO_TRITON
    if stack.compiler(facts) is None:
        return "n/a", "needs a C compiler: apt-get install g++, or set CC and CXX to one"
    return "ok", "works; the first steps compile, for seconds to minutes"


def _by_triton(facts: Facts, value: str) -> Answer:
    return ("ok", "works") if facts.has("triton") else ("n/a", _NO_TRITON)


def _fp8(facts: Facts, value: str) -> Answer:
    if value == DELAYED and not facts.has("triton"):
        return "n/a", _NO_TRITON
    return "ok", "works; faster than bf16 with optimizations.compile only"


# Of optimizations that need more of a machine than their incompatibilities say.
CHECKS: dict[str, Callable[[Facts, str], Answer]] = {
    "attention": _attention,
    "liger": _by_triton,
    "triton_kernels": _by_triton,
    "compile": _compile,
    "fp8": _fp8,
}

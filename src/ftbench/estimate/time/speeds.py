"""Work → seconds: each term at its ceiling times a coefficient that was learned from runs (facts/durations.yaml)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from ftbench.estimate.time.ceilings import Ceilings
from ftbench.estimate.time.work import StepWork, Work
from ftbench.facts import read_facts

HOST_OPERATION_S = 10e-6  # one operation of Python and its launch; its coefficient says what it really is


@dataclass(frozen=True, slots=True)
class Term:
    """A coefficient: ideal seconds times `value` are seconds. `prior` is what it is taken for where no run tells, `why`
    the reason; `runs` how many runs told."""

    value: float
    prior: float
    runs: int
    why: str


@dataclass(frozen=True, slots=True)
class Ideal:
    """A step in seconds at the ceilings: of each group of micro-batches its weight, the device's terms and the host's
    seconds; `passes` micro-batches a step; the optimizer's terms once."""

    groups: tuple[tuple[float, Mapping[str, float], float], ...]
    passes: int
    update: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Step:
    """Seconds of one optimizer step. `device` and `host` are what each would take alone; `parts` by term, on the
    device, add up to `device`."""

    seconds: float
    device: float
    host: float
    parts: Mapping[str, float]

    @property
    def host_bound(self) -> bool:
        """The GPU waits for Python for most of the step."""
        return self.host > self.device


@cache
def shipped() -> dict[str, Term]:
    """Return the coefficients that come with ftbench."""
    return {name: Term(**values) for name, values in document()["coefficients"].items()}


@cache
def document() -> dict[str, Any]:
    """Return facts/durations.yaml."""
    document: dict[str, Any] = read_facts("durations.yaml")
    return document


def values(terms: Mapping[str, Term]) -> dict[str, float]:
    return {name: term.value for name, term in terms.items()}


def ideal(work: StepWork, limits: Ceilings) -> Ideal:
    """Return every term at its ceiling."""
    groups = tuple((weight, _seconds(each, limits), each.operations * HOST_OPERATION_S) for weight, each in work.groups)
    return Ideal(groups, work.passes, _seconds(work.update, limits))


def _seconds(work: Work, limits: Ceilings) -> dict[str, float]:
    seconds = {name: amount / limits.memory for name, amount in work.bytes.items()}
    seconds |= {name: amount / limits.link for name, amount in work.link.items()}
    for name, amount in work.flops.items():
        rate = limits.products_fp8 if name == "products.fp8" else limits.products
        assert rate is not None
        seconds[name] = amount / rate
    return seconds


def step(ideal_step: Ideal, coefficients: Mapping[str, float]) -> Step:
    """Return how long a step takes: of each micro-batch the slower of device and host, and the update."""
    parts: dict[str, float] = defaultdict(float)
    device = host = seconds = 0.0
    for weight, terms, operations in ideal_step.groups:
        alone = 0.0
        for name, value in terms.items():
            spent = coefficients[name] * value * weight * ideal_step.passes
            parts[name] += spent
            alone += spent
        started = coefficients["host"] * operations * weight * ideal_step.passes
        device, host, seconds = device + alone, host + started, seconds + max(alone, started)
    for name, value in ideal_step.update.items():
        spent = coefficients[name] * value
        parts[name] += spent
        device, seconds = device + spent, seconds + spent
    return Step(seconds, device, host, dict(parts))

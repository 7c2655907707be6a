"""Work → seconds: each term at its ceiling times a coefficient that was learned from runs (facts/durations.yaml)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from ftbench.estimate.time.ceilings import Ceilings
from ftbench.estimate.time.work import StepWork
from ftbench.facts import read_facts

HOST_OPERATIONS_S = (
    1e5  # operations of Python and their launches in a second; the coefficient says what they really are
)


@dataclass(frozen=True, slots=True)
class Term:
    """A coefficient: ideal seconds times `value` are seconds. `prior` is what it is taken for where no run tells, `why`
    the reason; `runs` how many runs told."""

    value: float
    prior: float
    runs: int
    why: str


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


def ideal(work: StepWork, limits: Ceilings) -> StepWork:
    """Return the step in seconds, every term at its ceiling."""
    groups = tuple((weight, _seconds(terms, limits)) for weight, terms in work.groups)
    return StepWork(groups, work.passes, _seconds(work.update, limits))


def _seconds(terms: Mapping[str, float], limits: Ceilings) -> dict[str, float]:
    return {name: amount / _rate(name, limits) for name, amount in terms.items()}


def _rate(term: str, limits: Ceilings) -> float:
    """Return the most that a second can do of a term: FLOPs, operations of the host, bytes over the link or in the
    GPU's memory."""
    if term.startswith(("products", "attention")):
        rate = limits.products_fp8 if term == "products.fp8" else limits.products
        assert rate is not None
        return rate
    return HOST_OPERATIONS_S if term == "host" else limits.link if term.startswith("offload") else limits.memory


def step(ideal_step: StepWork, coefficients: Mapping[str, float]) -> Step:
    """Return how long a step takes: of each micro-batch the slower of device and host, and the update."""
    parts: dict[str, float] = defaultdict(float)
    device = host = seconds = 0.0
    for weight, terms in ideal_step.groups:
        spent = {name: coefficients[name] * value * weight * ideal_step.passes for name, value in terms.items()}
        started = spent.pop("host")
        alone = sum(spent.values())
        for name, value in spent.items():
            parts[name] += value
        device, host, seconds = device + alone, host + started, seconds + max(alone, started)
    for name, value in ideal_step.update.items():
        parts[name] += (spent_once := coefficients[name] * value)
        device, seconds = device + spent_once, seconds + spent_once
    return Step(seconds, device, host, dict(parts))

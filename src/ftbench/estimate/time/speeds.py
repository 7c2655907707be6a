"""Work → seconds: each term at its ceiling times a coefficient that was learned from runs (facts/durations.yaml)."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from ftbench.estimate.time.ceilings import Ceilings
from ftbench.estimate.time.work import StepWork
from ftbench.facts import read_facts

# Numbers that an image processor makes of images in a second: with Pillow the plain script of an H200 took 0.25 s for
# 20 tiles of 336 x 336 (batch 4 of 500 x 500 pixels, 1.65 s a step without and 1.40 s with processes beside it).
PIXEL_VALUES_S = 2.7e7
# Share of a step's work on the device that is forward: checkpointed layers compute again what they computed, and about
# as much for the gradients of their inputs.
_FORWARD = 0.3
# What is copied while layers compute, and the shares of their work beside which it is: weights in each of the two
# passes, states in the backward pass. What comes later than that is waited for.
WEIGHTS, STATES = "offload.weights", "offload.states"
BESIDE = {WEIGHTS: (_FORWARD, 1 - _FORWARD), STATES: (1 - _FORWARD,)}
GENERATION = "generation"  # all that is done before the first forward pass, and its own term: weights that are read
HOST_OPERATIONS_S = 1e5  # of Python, with their launches; the coefficient says how many they really are


@dataclass(frozen=True, slots=True)
class Term:
    """A coefficient: ideal seconds times `value` are seconds. `prior` is what it is taken for where no run tells, `why`
    the reason; `runs` how many runs told; `word` what it is called in a sentence."""

    value: float
    prior: float
    runs: int
    why: str
    word: str


@dataclass(frozen=True, slots=True)
class Step:
    """Seconds of one optimizer step, `generation` of them before its first forward pass. `device` and `host` are what
    each would take alone; `parts` by term, on the device, add up to `device`; `host_bound` says that the GPU waits for
    Python for most of the step, and `by_images` that Python makes pixels of images then."""

    seconds: float
    device: float
    host: float
    parts: Mapping[str, float]
    host_bound: bool
    by_images: bool = False
    generation: float = 0.0


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
    rates = _rates(limits)
    groups, generation = (
        tuple((weight, {name: amount / rates[name] for name, amount in terms.items()}) for weight, terms in weighed)
        for weighed in (work.groups, work.generation)
    )
    update = {name: amount / rates[name] for name, amount in work.update.items()}
    return StepWork(groups, work.passes, update, generation)


@lru_cache(maxsize=256)
def _rates(limits: Ceilings) -> dict[str, float]:
    """Return the most that a second can do of each term whose rate is known."""
    rates: dict[str, float | None] = dict.fromkeys(shipped(), limits.memory)
    for name in rates:
        if name.startswith(("products", "attention")):  # FLOPs
            rates[name] = limits.products_fp8 if name == "products.fp8" else limits.products
        elif name.startswith("offload"):
            rates[name] = limits.from_host if name in (WEIGHTS, STATES, "offload.head") else limits.link
    return {name: rate for name, rate in rates.items() if rate is not None} | {
        "host": HOST_OPERATIONS_S, "images": PIXEL_VALUES_S,
    }  # fmt: skip


def step(ideal_step: StepWork, coefficients: Mapping[str, float]) -> Step:
    """Return how long a step takes: of each micro-batch, and of generation, the slower of device and host, and the
    update."""
    parts: dict[str, float] = defaultdict(float)
    device = host = images = seconds = 0.0
    for weight, terms in ideal_step.groups:
        spent = {name: coefficients[name] * value * weight * ideal_step.passes for name, value in terms.items()}
        read = spent.pop("images", 0.0)
        started = spent.pop("host") + read
        computed = sum(value for name, value in spent.items() if name not in BESIDE)
        for name in BESIDE.keys() & spent.keys():
            spent[name] = sum(max(0.0, spent[name] - share * computed) for share in BESIDE[name])
        alone = sum(spent.values())
        for name, value in spent.items():
            parts[name] += value
        device, host, seconds = device + alone, host + started, seconds + max(alone, started)
        images += read
    made = 0.0
    for times, terms in ideal_step.generation:
        spent = {name: coefficients[name] * value * times for name, value in terms.items()}
        started = spent.pop("host")
        alone = sum(spent.values())
        parts[GENERATION] += alone
        device, host, made = device + alone, host + started, made + max(alone, started)
    seconds += made
    for name, value in ideal_step.update.items():
        parts[name] += (spent_once := coefficients[name] * value)
        device, seconds = device + spent_once, seconds + spent_once
    return Step(seconds, device, host, dict(parts), host > device, images > host / 2, made)

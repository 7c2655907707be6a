"""What runs near a spec say about the model's error there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ftbench.estimate.fitting import Observation
from ftbench.estimate.speeds import Step, step
from ftbench.spec.experiment import Experiment
from ftbench.summary import optimizations_on

# How far apart two specs are: the log of the ratio of their steps, and this much for each thing they differ in. The
# weight of a run is exp(-distance).
_SWITCH, _METHOD, _MODEL, _SIDE = 1.0, 1.5, 0.7, 2.0
_MODELS_OWN = 0.3  # the weight of the model itself, whose error is 1
_FARTHEST = 5.0


@dataclass(frozen=True, slots=True)
class Correction:
    """Measured over modelled, as `runs` runs near the spec have it; `alike` of them have its method and
    optimizations."""

    factor: float
    runs: int
    alike: int


def correction(spec: Experiment, modelled: Step, seen: Sequence[Observation],
               coefficients: Mapping[str, float]) -> Correction | None:  # fmt: skip
    """From the runs of `seen`, which are on the same GPU; None where none is near enough."""
    total, weights, near, alike = 0.0, _MODELS_OWN, 0, 0
    times: dict[str, int] = {}
    for each in seen:
        times[each.key] = times.get(each.key, 0) + 1
    for each in seen:
        theirs = step(each.ideal, coefficients)
        if (far := _distance(spec, modelled, each.run.spec, theirs)) > _FARTHEST:
            continue
        weight = math.exp(-far) / times[each.key]
        total += weight * math.log(each.seconds / theirs.seconds)
        weights += weight
        near += 1
        alike += same_settings(spec, each.run.spec) and theirs.host_bound == modelled.host_bound
    return Correction(math.exp(total / weights), near, alike) if near else None


def same_settings(one: Experiment, other: Experiment) -> bool:
    return _method(one) == _method(other) and not _switches(one) ^ _switches(other)


def _distance(spec: Experiment, modelled: Step, other: Experiment, theirs: Step) -> float:
    far = abs(math.log(modelled.seconds / theirs.seconds)) / 2
    far += _SWITCH * len(_switches(spec) ^ _switches(other))
    far += _METHOD * (_method(spec) != _method(other)) + _MODEL * (spec.model.id != other.model.id)
    return far + _SIDE * (modelled.host_bound != theirs.host_bound)


def _method(spec: Experiment) -> tuple[str, bool, str]:
    return spec.method.name, spec.method.quantised, getattr(spec.method, "use_gradient_checkpointing", "off")


def _switches(spec: Experiment) -> set[str]:
    return set(optimizations_on(spec.optimizations.model_dump()))

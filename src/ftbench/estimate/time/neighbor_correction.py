"""What runs near a spec say about the model's error there."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ftbench.estimate.time.history import TimedRun, settings_of
from ftbench.estimate.time.speeds import Step, step
from ftbench.estimate.time.work import StepWork
from ftbench.spec.experiment import Experiment

# How far apart two specs are: the log of the ratio of their steps, and this much for each thing they differ in. The
# weight of a run is exp(-distance).
_SWITCH, _METHOD, _MODEL, _SIDE = 1.0, 1.5, 0.7, 2.0
_MODELS_OWN = 0.3  # the weight of the model itself, whose error is 1
_FARTHEST = 5.0


@dataclass(frozen=True, slots=True)
class Correction:
    """Measured over modelled in `runs` runs near the spec, of which `alike` have its method and optimizations."""

    factor: float
    runs: int
    alike: int


@dataclass(frozen=True, slots=True)
class Observation:
    """A run's mean step, and its ideal work in seconds; runs of one `key` took the same step and count as one."""

    run: TimedRun
    ideal: StepWork

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.run.gpu, *self.run.key)


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A run with the model's step for it, the log of its seconds (`size`), how far the model was off (log of measured
    over modelled), and its share of the runs of the same step."""

    run: TimedRun
    modelled: Step
    size: float
    miss: float
    share: float


def neighbours(seen: Sequence[Observation], coefficients: Mapping[str, float]) -> list[Neighbour]:
    times = Counter(each.key for each in seen)
    result = []
    for each in seen:
        modelled = step(each.ideal, coefficients)
        size = math.log(modelled.seconds)
        result.append(Neighbour(each.run, modelled, size, math.log(each.run.step_s) - size, 1 / times[each.key]))
    return result


def correction(spec: Experiment, modelled: Step, others: Sequence[Neighbour]) -> Correction | None:
    """Return the correction from runs on the same GPU; None where none is near enough."""
    if not others:
        return None
    total, weights, near, alike = 0.0, _MODELS_OWN, 0, 0
    own, host_bound, size = settings_of(spec), modelled.host_bound, math.log(modelled.seconds)
    for other in others:
        if other.run.spec.objective.prompts != spec.objective.prompts:  # generation has nothing in common with the rest
            continue
        like = other.modelled.host_bound == host_bound
        far = abs(size - other.size) / 2
        far += _MODEL * (spec.model.id != other.run.spec.model.id) + _SIDE * (not like)
        theirs = other.run.settings
        if own != theirs:  # here, since it is asked of each run for each way that recommend weighs
            far += _SWITCH * len(own.switches ^ theirs.switches) + _METHOD * (own.method != theirs.method)
        if far > _FARTHEST:
            continue
        weight = math.exp(-far) * other.share
        total, weights, near = total + weight * other.miss, weights + weight, near + 1
        alike += like and own == theirs
    return Correction(math.exp(total / weights), near, alike) if near else None

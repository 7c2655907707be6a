"""Coefficients from runs, and what is wrong with them: every run predicted by fits that never saw its like."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ftbench.estimate.time.observations import Observation
from ftbench.estimate.time.speeds import Ideal, step

_NOISE = 0.05  # spread of the log of a run's step time around a perfect model
_DOUBT = 0.35  # spread of the log of a coefficient around its prior
_ROUNDS = 12


def fit(observations: Sequence[Observation], priors: Mapping[str, float]) -> dict[str, float]:
    """The coefficients that lie closest to both the runs and the priors, in logarithms (ridge regression around the
    priors by Gauss-Newton). What no run tells stays at its prior."""
    names = list(priors)
    counts: dict[Any, int] = defaultdict(int)
    for each in observations:
        counts[each.key] += 1
    weights = np.array([1 / math.sqrt(counts[each.key]) / _NOISE for each in observations])
    measured = np.array([each.run.step_s for each in observations])
    sums = [_Sum.of(each.ideal, names) for each in observations]
    start, found = np.array([priors[name] for name in names]), np.zeros(len(names))
    for _ in range(_ROUNDS if observations else 0):
        parts = np.array([each.parts(start * np.exp(found)) for each in sums])
        seconds = parts.sum(axis=1)
        missed = np.log(seconds / measured) * weights
        slopes = parts / seconds[:, None] * weights[:, None]  # of a sum's logarithm by those of its factors
        normal = slopes.T @ slopes + np.eye(len(names)) / _DOUBT**2
        change = np.linalg.solve(normal, slopes.T @ missed + found / _DOUBT**2)
        found = found - np.clip(change, -0.5, 0.5)
    return dict(zip(names, (start * np.exp(found)).tolist(), strict=True))


@dataclass(frozen=True)
class _Sum:
    """`speeds.step` as arrays: seconds at the ceilings by group and name, of the device and of the host, and of the
    update by name."""

    device: np.ndarray
    host: np.ndarray
    update: np.ndarray

    @classmethod
    def of(cls, ideal: Ideal, names: Sequence[str]) -> _Sum:
        places = {name: place for place, name in enumerate(names)}
        device, host = (np.zeros((len(ideal.groups), len(names))) for _ in range(2))
        for row, (weight, terms, operations) in enumerate(ideal.groups):
            host[row, places["host"]] = operations * weight * ideal.passes
            for name, value in terms.items():
                device[row, places[name]] = value * weight * ideal.passes
        update = np.zeros(len(names))
        for name, value in ideal.update.items():
            update[places[name]] = value
        return cls(device, host, update)

    def parts(self, coefficients: np.ndarray) -> np.ndarray:
        """What each coefficient adds to the step: of a group the slower side counts."""
        device, host = self.device * coefficients, self.host * coefficients
        slower = np.where((host.sum(axis=1) > device.sum(axis=1))[:, None], host, device)
        total: np.ndarray = slower.sum(axis=0) + self.update * coefficients
        return total


def told_by(observations: Sequence[Observation], coefficients: Mapping[str, float]) -> dict[str, int]:
    """How many runs each term is a twentieth of the step of, or for `host` the slower side."""
    counts = dict.fromkeys(coefficients, 0)
    for each in observations:
        found = step(each.ideal, coefficients)
        if found.host_bound:
            counts["host"] += 1
        for name, seconds in found.parts.items():
            counts[name] += not found.host_bound and seconds > found.device / 20
    return counts

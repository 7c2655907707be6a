"""Coefficients from runs, and what is wrong with them: every run predicted by fits that never saw its like."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ftbench.estimate.observations import Observation
from ftbench.estimate.speeds import step

_NOISE = 0.05  # spread of the log of a run's step time around a perfect model
_DOUBT = 0.35  # spread of the log of a coefficient around its prior
_ROUNDS = 12
_NUDGE = 1e-4


def fit(observations: Sequence[Observation], priors: Mapping[str, float]) -> dict[str, float]:
    """The coefficients that lie closest to both the runs and the priors, in logarithms (ridge regression around the
    priors by Gauss-Newton). What no run tells stays at its prior."""
    names = list(priors)
    counts: dict[Any, int] = defaultdict(int)
    for each in observations:
        counts[each.key] += 1
    weights = np.array([1 / math.sqrt(counts[each.key]) / _NOISE for each in observations])
    found = np.zeros(len(names))

    def misses(at: np.ndarray) -> np.ndarray:
        now = {name: priors[name] * math.exp(log) for name, log in zip(names, at, strict=True)}
        logs = [math.log(step(each.ideal, now).seconds / each.seconds) for each in observations]
        missed: np.ndarray = np.array(logs) * weights
        return missed

    for _ in range(_ROUNDS if observations else 0):
        here = misses(found)
        slopes: np.ndarray = np.empty((len(observations), len(names)))
        for place in range(len(names)):
            moved = found.copy()
            moved[place] += _NUDGE
            slopes[:, place] = (misses(moved) - here) / _NUDGE
        normal = slopes.T @ slopes + np.eye(len(names)) / _DOUBT**2
        change = np.linalg.solve(normal, slopes.T @ here + found / _DOUBT**2)
        found = found - np.clip(change, -0.5, 0.5)
    return {name: priors[name] * math.exp(log) for name, log in zip(names, found, strict=True)}


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

"""The coefficients of the time estimate from runs, and every run estimated by fits that never saw its like."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import yaml

from ftbench.estimate.time import accuracy, speeds
from ftbench.estimate.time.accuracy import LeftOut
from ftbench.estimate.time.neighbor_correction import Observation
from ftbench.estimate.time.run_index import Store
from ftbench.estimate.time.speeds import Term, step
from ftbench.estimate.time.work import StepWork

_NOISE = 0.05  # spread of the log of a run's step time around a perfect model
_DOUBT = 0.35  # spread of the log of a coefficient around its prior
_ROUNDS = 12


def fit(observations: Sequence[Observation]) -> dict[str, float]:
    """Return the coefficients that lie closest to both the runs and the priors, in logarithms (ridge regression around
    the priors by Gauss-Newton). What no run tells stays at its prior."""
    priors = {name: term.prior for name, term in speeds.shipped().items()}
    names = list(priors)
    counts: dict[Any, int] = defaultdict(int)
    for each in observations:
        counts[each.key] += 1
    weights = np.array([1 / math.sqrt(counts[each.key]) / _NOISE for each in observations])
    measured = np.array([each.run.step_s for each in observations])
    sums = [StepSum.of(each.ideal, names) for each in observations]
    start, change = np.array([priors[name] for name in names]), np.zeros(len(names))
    for _ in range(_ROUNDS if observations else 0):
        parts = np.array([each.parts(start * np.exp(change)) for each in sums])
        seconds = parts.sum(axis=1)
        missed = np.log(seconds / measured) * weights
        slopes = parts / seconds[:, None] * weights[:, None]  # of a sum's logarithm by those of its factors
        normal = slopes.T @ slopes + np.eye(len(names)) / _DOUBT**2
        change -= np.clip(np.linalg.solve(normal, slopes.T @ missed + change / _DOUBT**2), -0.5, 0.5)
    return dict(zip(names, (start * np.exp(change)).tolist(), strict=True))


@dataclass(frozen=True)
class StepSum:
    """`speeds.step` as arrays: seconds at the ceilings by group and name, of the device and of the host, and of the
    update by name; `beside` are the columns of what is copied beside the work, and the shares of it that hide them."""

    device: np.ndarray
    host: np.ndarray
    update: np.ndarray
    beside: tuple[tuple[int, tuple[float, ...]], ...]

    @classmethod
    def of(cls, ideal: StepWork, names: Sequence[str]) -> StepSum:
        columns = {name: column for column, name in enumerate(names)}
        groups = [*((weight * ideal.passes, terms) for weight, terms in ideal.groups), *ideal.generation]
        device, host = (np.zeros((len(groups), len(names))) for _ in range(2))
        for row, (times, terms) in enumerate(groups):
            for name, value in terms.items():
                (host if name == "host" else device)[row, columns[name]] = value * times
        update = np.zeros(len(names))
        for name, value in ideal.update.items():
            update[columns[name]] = value
        return cls(device, host, update, tuple((columns[name], shares) for name, shares in speeds.BESIDE.items()))

    def parts(self, coefficients: np.ndarray) -> np.ndarray:
        """Return what each coefficient adds to the step: of a group the slower side counts."""
        device, host = self.device * coefficients, self.host * coefficients
        copied = {column: device[:, column].copy() for column, _ in self.beside}
        computed = device.sum(axis=1) - sum(copied.values())
        for column, shares in self.beside:
            device[:, column] = sum(np.maximum(0.0, copied[column] - share * computed) for share in shares)
        slower = np.where((host.sum(axis=1) > device.sum(axis=1))[:, None], host, device)
        total: np.ndarray = slower.sum(axis=0) + self.update * coefficients
        return total


def fitted(store: Store) -> dict[str, Term]:
    """Return the coefficients with in how many runs each is a twentieth of the step, or for `host` the slower side."""
    seen = accuracy.observations(store)
    coefficients = fit(seen)
    runs = dict.fromkeys(coefficients, 0)
    for each in seen:
        modelled = step(each.ideal, coefficients)
        runs["host"] += modelled.host_bound
        for name, seconds in modelled.parts.items():
            runs[name] += not modelled.host_bound and seconds > modelled.device / 20
    return {
        name: replace(term, value=round(coefficients[name], 4), runs=runs[name]) if runs[name] else
        replace(term, value=term.prior, runs=0)
        for name, term in speeds.shipped().items()
    }  # fmt: skip


def settings(each: Observation) -> str:
    """Return what runs are kin by: method and optimizations, so that nobody has measured the like."""
    return f"{each.run.gpu} {each.run.spec.method.name} {each.run.spec.optimizations}"


def coefficient_table(terms: Mapping[str, Term]) -> str:
    """Return the coefficients in Markdown."""
    lines = ["| coefficient | value | without runs | runs | why |", "|---|--:|--:|--:|---|"]
    lines += [
        f"| {name} | {term.value:.3g} | {term.prior:.3g} | {term.runs} | {term.why} |" for name, term in terms.items()
    ]
    return "\n".join(lines) + "\n"


def facts(rows: Sequence[LeftOut], terms: Mapping[str, Term]) -> str:
    """Return facts/durations.yaml: the coefficients with the runs that they come from."""
    mean, worst = accuracy.errors_of(rows)
    document = {
        "gpus": sorted({row.run.gpu for row in rows}),
        "error": {"mean": round(mean, 4), "worst": round(worst, 4)},
        "coefficients": {name: asdict(term) for name, term in terms.items()},
        "runs": [row.run.run_id for row in rows],
    }
    return _HEAD + yaml.safe_dump(document, sort_keys=False, width=1000, allow_unicode=True)


_HEAD = """\
# Coefficients of the time estimate: seconds = value x the seconds a term would take at the GPU's ceilings
# (estimate/time/work.py, estimate/time/speeds.py). Written by `scripts/duration-table --write`; `prior` and `why` are
# by hand, and some priors were set with these runs in sight. `runs` of a coefficient: in how many it is a twentieth or
# more. `error`: each step estimated without its own runs.
"""

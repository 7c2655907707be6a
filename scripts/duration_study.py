"""Compare the time estimate with committed runs, and fit its coefficients to them.

Every run is estimated by fits that never saw a run of its step.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np
import yaml
from estimate_study import quantile

from ftbench.core import units
from ftbench.core.hardware import gpus
from ftbench.core.stats import grouped_by
from ftbench.core.units import change, percent
from ftbench.estimate.time.duration import DurationEstimate, estimate_duration
from ftbench.estimate.time.history import Observation, RunHistory
from ftbench.estimate.time.rates import OVERLAPS, Term, shipped_coefficients, shipped_terms, step
from ftbench.estimate.time.timed_runs import TimedRun
from ftbench.estimate.time.work import StepWork
from ftbench.estimate.workload.model import is_rough
from ftbench.store.summary import optimizations_on

_NOISE = 0.05  # spread of the log of a run's step time around a perfect model
_DOUBT = 0.35  # spread of the log of a coefficient around its prior
_ROUNDS = 12


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A run with its estimate from the other runs, and from coefficients without any run (`bare`)."""

    run: TimedRun
    estimate: DurationEstimate
    bare: DurationEstimate

    @property
    def error(self) -> float:
        return self.estimate.step_s.expected / self.run.step_s - 1

    @property
    def bare_error(self) -> float:
        return self.bare.step_s.expected / self.run.step_s - 1

    @property
    def is_inside(self) -> bool:
        return self.estimate.step_s.low <= self.run.step_s <= self.estimate.step_s.high


def same_step(each: Observation) -> tuple[Any, ...]:
    return (each.run.gpu, *each.run.key)


def same_settings(each: Observation) -> str:
    """Return a key of the method and optimizations."""
    return f"{each.run.gpu} {each.run.spec.method.name} {each.run.spec.optimizations}"


def same_model(each: Observation) -> str:
    return str(each.run.spec.model.id)


def observations(history: RunHistory) -> list[Observation]:
    """Return the runs on all GPUs of the table, with their work."""
    return [each for gpu in gpus() for each in history.observations(gpu)]


def left_out(
    history: RunHistory,
    group_of: Callable[[Observation], Any] = same_step,
    coefficients_of: Callable[[Sequence[Observation]], Mapping[str, float]] = lambda _: shipped_coefficients(),
) -> list[LeftOut]:
    """Return a row for each run, estimated without the runs of its group.

    `coefficients_of` returns the coefficients to use, given the other observations.
    """
    seen = observations(history)
    rows = []
    for group in dict.fromkeys(map(group_of, seen)):
        others = [each for each in seen if group_of(each) != group]
        rest = RunHistory(history.path, [each.run for each in others], coefficients_of(others))
        rows += [_row(each.run, rest) for each in seen if group_of(each) == group]
    return rows


def several_gpus(history: RunHistory, coefficients: Mapping[str, float]) -> list[LeftOut]:
    """Return a row for each run on several GPUs. Nothing is fitted to these runs."""
    rows = []
    for run in history.runs:
        if run.spec.launch.gpus > 1 and not is_rough(run.spec):
            others = [other for other in history.runs if other.key != run.key]
            rows.append(_row(run, RunHistory(history.path, others, coefficients)))
    return rows


def spreads(rows: Sequence[LeftOut]) -> dict[str, float]:
    """Return by bound the factor around the estimate that holds 90 % of the runs."""
    missed = grouped_by(rows, lambda row: "host" if row.estimate.bound == "host" else "GPU")
    return {bound: math.exp(quantile([abs(math.log1p(row.error)) for row in each])) for bound, each in missed.items()}


def coverage(rows: Sequence[LeftOut]) -> float:
    """Return the share of runs in a range that comes from the runs of other models only."""
    inside = 0
    for model in {row.run.spec.model.id for row in rows}:
        known = spreads([row for row in rows if row.run.spec.model.id != model])
        inside += sum(abs(math.log1p(row.error)) <= math.log(known["host" if row.estimate.bound == "host" else "GPU"])
                      for row in rows if row.run.spec.model.id == model)  # fmt: skip
    return inside / len(rows)


def _row(run: TimedRun, rest: RunHistory) -> LeftOut:
    gpu = next(gpu for gpu in gpus() if gpu.name == run.gpu)
    bare = RunHistory(rest.path, (), rest.coefficients)
    return LeftOut(run, estimate_duration(run.spec, gpu, rest), estimate_duration(run.spec, gpu, bare))


def as_text(rows: Sequence[LeftOut]) -> str:
    """Return the rows as a Markdown table, followed by their errors in sentences."""
    lines = ["| run | with | measured step | estimated | error | in its band | without any run | basis |"]
    lines += ["|---|---|--:|--:|--:|---|--:|---|"]
    for row in rows:
        on = ", ".join(optimizations_on(row.run.spec.optimizations.model_dump())) or "none"
        measured, estimated = (units.seconds(step) for step in (row.run.step_s, row.estimate.step_s.expected))
        lines.append(
            f"| {row.run.run_id} | {on} | {measured} | {estimated} | {change(row.error)} | "
            f"{'yes' if row.is_inside else 'no'} | {change(row.bare_error)} | {row.estimate.basis} |"
        )
    return "\n".join([*lines, "", *_summary(rows)]) + "\n"


def _summary(rows: Sequence[LeftOut]) -> list[str]:
    if not rows:
        return ["no run whose model and GPU are known"]
    (mean, worst), (bare_mean, bare_worst) = errors_of(rows), errors_of(rows, "bare_error")
    inside, steps = sum(row.is_inside for row in rows), len(_by_step(rows, "error"))
    return [
        f"{units.some(len(rows), 'run')} of {units.some(steps, 'different step')}, each estimated without the runs of "
        f"its step: mean error {percent(mean)}, worst {percent(worst)}; {inside} of {len(rows)} within their band",
        f"by the coefficients only, without similar runs: mean {percent(bare_mean)}, worst {percent(bare_worst)}",
    ]


def errors_of(rows: Sequence[LeftOut], name: str = "error") -> tuple[float, float]:
    """Return the mean and the largest relative error of the step time. Runs of one step count as one."""
    errors = _by_step(rows, name)
    return fmean(errors), max(errors)


def _by_step(rows: Sequence[LeftOut], name: str) -> list[float]:
    by_step = grouped_by(rows, lambda row: (row.run.gpu, *row.run.key))
    return [fmean(abs(getattr(row, name)) for row in alike) for alike in by_step.values()]


def fit(observations: Sequence[Observation]) -> dict[str, float]:
    """Return the coefficients that are closest to both the runs and the priors, in logarithms.

    This is ridge regression around the priors by Gauss-Newton. A coefficient that no run shows stays at its prior.
    """
    priors = {name: term.prior for name, term in shipped_terms().items()}
    names = list(priors)
    counts: dict[Any, int] = defaultdict(int)
    for each in observations:
        counts[same_step(each)] += 1
    weights = np.array([1 / math.sqrt(counts[same_step(each)]) / _NOISE for each in observations])
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
    """`rates.step` as arrays of seconds at the ceilings: by group and name for device and host, by name for the update.

    `overlaps` holds the columns of copies that overlap with the work, and the shares of the work that hide them.
    """

    device: np.ndarray
    host: np.ndarray
    update: np.ndarray
    overlaps: tuple[tuple[int, tuple[float, ...]], ...]

    @classmethod
    def of(cls, ideal: StepWork, names: Sequence[str]) -> StepSum:
        columns = {name: column for column, name in enumerate(names)}
        groups = [(weight * ideal.passes, terms) for weight, terms in ideal.groups]
        device, host = (np.zeros((len(groups), len(names))) for _ in range(2))
        for row, (times, terms) in enumerate(groups):
            for name, value in terms.items():
                (host if name == "host" else device)[row, columns[name]] = value * times
        update = np.zeros(len(names))
        for name, value in ideal.update.items():
            update[columns[name]] = value
        return cls(device, host, update, tuple((columns[name], shares) for name, shares in OVERLAPS.items()))

    def parts(self, coefficients: np.ndarray) -> np.ndarray:
        """Return what each coefficient adds to the step: of a group the slower side counts."""
        device, host = self.device * coefficients, self.host * coefficients
        copied = {column: device[:, column].copy() for column, _ in self.overlaps}
        computed = device.sum(axis=1) - sum(copied.values())
        for column, shares in self.overlaps:
            device[:, column] = sum(np.maximum(0.0, copied[column] - share * computed) for share in shares)
        slower = np.where((host.sum(axis=1) > device.sum(axis=1))[:, None], host, device)
        total: np.ndarray = slower.sum(axis=0) + self.update * coefficients
        return total


def fitted(history: RunHistory) -> dict[str, Term]:
    """Return the coefficients with in how many runs each is a twentieth of the step, or for `host` the slower side."""
    seen = observations(history)
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
        for name, term in shipped_terms().items()
    }  # fmt: skip


def coefficient_table(terms: Mapping[str, Term]) -> str:
    """Return the coefficients in Markdown."""
    lines = ["| coefficient | value | without runs | runs | why |", "|---|--:|--:|--:|---|"]
    lines += [
        f"| {name} | {term.value:.3g} | {term.prior:.3g} | {term.runs} | {term.why} |" for name, term in terms.items()
    ]
    return "\n".join(lines) + "\n"


def facts(rows: Sequence[LeftOut], models: Sequence[LeftOut], terms: Mapping[str, Term]) -> str:
    """Return facts/durations.yaml: the coefficients with the runs that they come from.

    The range comes from `models`, the rows without any run of their model.
    """
    mean, worst = errors_of(rows)
    document = {
        "gpus": sorted({row.run.gpu for row in rows}),
        "error": {"mean": round(mean, 4), "worst": round(worst, 4)},
        "spread": {bound: round(value, 3) for bound, value in spreads(models).items()},
        "coefficients": {name: asdict(term) for name, term in terms.items()},
        "runs": [row.run.run_id for row in rows],
    }
    return _HEAD + yaml.safe_dump(document, sort_keys=False, width=1000, allow_unicode=True)


_HEAD = """\
# Coefficients of the time estimate: seconds = value x seconds of the term at the GPU's ceilings (estimate/time/work.py,
# estimate/time/rates.py). Written by `scripts/duration-table --write`. `prior` and `why` are by hand, and some priors
# were set with these runs in mind. `runs` of a coefficient: the runs in which it is at least a twentieth of the step.
# `error`: each step estimated without its own runs. `spread`: the factor around an estimate that holds 90 % of the runs
# of unseen models, if the GPU or the host sets the pace.
"""

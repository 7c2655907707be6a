#!/usr/bin/env python3
"""Compare the time estimate with committed runs: scripts/time_estimates.py [--write]

Each run is estimated with coefficients that were fitted without the runs of its step. --write keeps the coefficients of
all runs in facts/durations.yaml and writes docs/evidence/time-estimates.md.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from operator import attrgetter, sub
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from memory_estimates import RUNS, quantile  # noqa: E402

from ftbench.core import units  # noqa: E402
from ftbench.core.hardware import gpus  # noqa: E402
from ftbench.core.stats import grouped_by  # noqa: E402
from ftbench.core.units import change, optimizations_on, percent  # noqa: E402
from ftbench.errors import SpecError  # noqa: E402
from ftbench.estimate.time.duration import DurationEstimate, estimate_duration  # noqa: E402
from ftbench.estimate.time.history import RunHistory, TimedRun, timed_runs  # noqa: E402
from ftbench.estimate.time.rates import ideal, limits_of, shipped_coefficients, step  # noqa: E402
from ftbench.estimate.time.work import StepWork, step_work  # noqa: E402
from ftbench.estimate.workload.model import is_rough, trainable_shape  # noqa: E402
from ftbench.facts import read_facts  # noqa: E402

TEXT_STUDY, STORES = sorted(ROOT.glob("results/*/founding-text*")), [*RUNS, ROOT / "results/h100/records"]
PAGE, FACTS = ROOT / "docs/evidence/time-estimates.md", ROOT / "src/ftbench/facts/durations.yaml"
NOISE = 0.05  # spread of the log of a run's step time around a perfect model
HUBER = 2.0  # errors above this multiple of NOISE count less
DOUBT = 0.35  # spread of the log of a coefficient around its prior
ROUNDS = 12
LEAST_MODELS = 3
GPUS = {gpu.name: gpu for gpu in gpus()}
same_settings, same_model = attrgetter("gpu", "spec.method.name", "spec.optimizations"), attrgetter("spec.model.id")
HEAD = """# Errors of time estimates

`scripts/time_estimates.py --write` writes this page from the committed runs in `results/h200` and
`results/h100/records`. The page includes runs with at least five steady steps. Runs with fewer steps are included if
their step times agree within 5 % (coefficient of variation). For the estimate of a run, the coefficients are fitted to
other runs, without any run of the same step. Runs on several GPUs have a separate table and do not change the
coefficients. The fit excludes the runs of the [text study](founding-text.md) and of the [image
study](founding-images.md). The text study shows how accurate estimates are on other hosts. But two values were chosen
with this study: the exponent 3 (see below) and the coefficient `attention.masked`. This page excludes runs of other
frameworks and runs on shared GPUs. Estimates of ZeRO have a wider range, because their formulas come from two runs.

While the GPU computes, Python code on the CPU (the *host*) starts the next kernels. The time of a step is
`(GPU time^3 + host time^3)^(1/3)`, so the slower of the two mainly determines it. The time of the GPU is a sum of
terms. Each term is `coefficient * FLOPs / rate of large matrix products`, or `coefficient * bytes / memory bandwidth`.
In the table, "value" is the coefficient after the fit, and "without runs" is the coefficient before the fit. "runs"
counts the runs in which the term takes at least 5 % of the step. The rates of a GPU come from `ftbench probe`. Without
a probe, the rates come from publications or from the data sheet. A range includes faster and slower hosts.

"""
FACTS_HEAD = """\
# Coefficients of the time estimate: seconds = value * (seconds of the term at the GPU's highest rate). See
# estimate/time/work.py and rates.py. Written by `scripts/time_estimates.py --write`. `prior` and `why` are written by
# hand. Some priors were chosen after looking at these runs. `gpus` are the GPUs with runs of at least three models:
# estimates for other GPUs have a wider range. `runs` counts the runs in which the term takes at least 5 % of a step.
# `error` is the error if each step is estimated without its own runs. `spread` is the factor around an estimate that
# contains 90 % of the steps of unseen models, if the GPU or the host limits the speed. `start` is such a factor of the
# time to import, load and compile, and `measured start` that with runs of the same step.
"""


@dataclass(frozen=True, slots=True)
class Term:
    """A coefficient of a term. If no run contains the term, it is `prior`, for the reason `why`. `runs` is the number
    of runs that contain it."""

    value: float
    prior: float
    runs: int
    why: str


def shipped_terms() -> dict[str, Term]:
    """Return the terms of facts/durations.yaml by name."""
    return {name: Term(**values) for name, values in read_facts("durations.yaml")["coefficients"].items()}


@dataclass(frozen=True, slots=True)
class Observation:
    """A run, with the seconds that each kind of its work takes at the GPU's peak rates."""

    run: TimedRun
    ideal: StepWork


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A run with its estimate from the other runs."""

    run: TimedRun
    estimate: DurationEstimate

    @property
    def error(self) -> float:
        return self.estimate.step_s.expected / self.run.step_s - 1

    @property
    def is_inside(self) -> bool:
        return self.estimate.step_s.low <= self.run.step_s <= self.estimate.step_s.high

    @property
    def bound(self) -> str:
        return "GPU" if self.estimate.bound != "host" else "known host" if self.estimate.host_runs else "host"


def same_step(run: TimedRun) -> tuple[Any, ...]:
    return (run.gpu, *run.key)


def observations(history: RunHistory) -> list[Observation]:
    """Return the runs on a single GPU whose model and rates are known."""
    seen = []
    for run in history.runs:
        if run.gpu in GPUS and run.spec.launch.gpus == 1 and not is_rough(run.spec):
            with suppress(SpecError):
                fp8 = run.spec.optimizations.fp8 != "off"
                limits = limits_of(GPUS[run.gpu], run.spec.train.precision, fp8, history.path)
                work = step_work(run.spec, trainable_shape(run.spec), [run.batch])
                seen.append(Observation(run, ideal(work, limits)))
    return seen


def left_out(
    history: RunHistory,
    group_of: Callable[[TimedRun], Any] = same_step,
    coefficients_of: Callable[[Sequence[Observation]], Mapping[str, float]] = lambda _: shipped_coefficients(),
) -> list[LeftOut]:
    """Return a row for each run. Its estimate uses coefficients that were fitted without the runs of its group.

    `coefficients_of` returns the coefficients to use, given the other observations."""
    rows, seen = [], observations(history)
    for group, members in grouped_by(seen, lambda each: group_of(each.run)).items():
        others = [each for each in seen if group_of(each.run) != group]
        rest = RunHistory(history.path, [each.run for each in others], coefficients_of(others))
        rest.hosts = dict.fromkeys(GPUS, (1.0, 0, "host"))  # these runs have several hosts
        rows += [LeftOut(each.run, estimate_duration(each.run.spec, GPUS[each.run.gpu], rest)) for each in members]
    return rows


def several_gpus(history: RunHistory, coefficients: Mapping[str, float]) -> list[LeftOut]:
    """Return a row for each run on several GPUs. Nothing is fitted to these runs."""
    runs = [run for run in history.runs if run.spec.launch.gpus > 1 and not is_rough(run.spec)]
    others = ([other for other in history.runs if other.key != run.key] for run in runs)
    pairs = zip(runs, (RunHistory(history.path, rest, coefficients) for rest in others), strict=True)
    return [LeftOut(run, estimate_duration(run.spec, GPUS[run.gpu], rest)) for run, rest in pairs]


def text_study(coefficients: Mapping[str, float]) -> tuple[list[LeftOut], list[LeftOut]]:
    """Return the rows of the text study, estimated without and with the runs of other steps on the same host."""
    rows: tuple[list[LeftOut], list[LeftOut]] = [], []
    studies = [RunHistory(None, timed_runs([store])).runs for store in TEXT_STUDY]
    for run, alike in ((each, runs) for runs in studies for each in runs):
        for part, rest in zip(rows, ([], [other for other in alike if other.key != run.key]), strict=True):
            part.append(LeftOut(run, estimate_duration(run.spec, GPUS[run.gpu], RunHistory(None, rest, coefficients))))
    return rows


def spreads(rows: Sequence[LeftOut]) -> dict[str, float]:
    """Return bound → factor. The range from estimate / factor to estimate x factor contains 90 % of the steps."""
    missed = grouped_by(rows, lambda row: (row.bound, same_step(row.run))).items()
    by_bound = grouped_by(missed, lambda item: item[0][0])
    return {bound: math.exp(quantile([fmean(abs(math.log1p(row.error)) for row in rows) for _, rows in each]))
            for bound, each in by_bound.items()}  # fmt: skip


def start_spreads(rows: Sequence[LeftOut]) -> dict[str, float]:
    """Return the factors that contain 90 % of the starts: of the estimate, and of other runs of the same step."""
    own, alike = [], []
    for group in grouped_by((row for row in rows if row.run.start_s), lambda row: same_step(row.run)).values():
        starts = [math.log(row.run.start_s) for row in group]
        own.append(fmean(abs(each - math.log(group[0].estimate.start_s.expected)) for each in starts))
        others = [starts[:at] + starts[at + 1 :] for at in range(len(starts))]
        alike += [fmean(map(abs, map(sub, starts, map(median, others))))] if others[0] else []
    return {"start": math.exp(quantile(own)), "measured start": math.exp(quantile(alike))}


def factors(ranges: Mapping[str, float]) -> dict[str, float]:
    """Return bound → factor of the range of an estimate. The errors of GPU and host are independent (`_spread`)."""
    return {bound: math.exp(math.hypot(*(math.log(ranges[each]) for each in {"GPU", bound}))) for bound in ranges}


def coverage(rows: Sequence[LeftOut]) -> float:
    """Return the share of runs that are inside their range. The ranges come from the runs of other models only."""
    inside = 0
    for model, own in grouped_by(rows, lambda row: same_model(row.run)).items():
        known = factors(spreads([row for row in rows if same_model(row.run) != model]))
        inside += sum(abs(math.log1p(row.error)) <= math.log(known[row.bound]) for row in own)
    return inside / len(rows)


def errors_of(rows: Sequence[LeftOut]) -> tuple[float, float]:
    """Return the mean and the largest relative error of the step time. Runs of one step count as one."""
    by_step = grouped_by(rows, lambda row: same_step(row.run)).values()
    errors = [fmean(abs(row.error) for row in alike) for alike in by_step]
    return fmean(errors), max(errors)


def fit(seen: Sequence[Observation]) -> dict[str, float]:
    """Return the coefficients that are closest to both the runs and the priors, in logarithms.

    This is ridge regression around the priors by Gauss-Newton, with Huber's weights: runs on slower hosts have large
    errors. A coefficient that no run shows stays at its prior."""
    names, counts = list(shipped_terms()), Counter(same_step(each.run) for each in seen)
    priors = np.array([term.prior for term in shipped_terms().values()])
    weights = np.array([1 / math.sqrt(counts[same_step(each.run)]) / NOISE for each in seen])
    measured, moved = np.array([each.run.step_s for each in seen]), np.zeros(len(names))
    for _ in range(ROUNDS if seen else 0):
        coefficients = dict(zip(names, (priors * np.exp(moved)).tolist(), strict=True))
        steps = [step(each.ideal, coefficients) for each in seen]
        seconds = np.array([each.seconds for each in steps])
        parts = np.array([[each.parts.get(name, 0.0) for name in names] for each in steps])
        errors = np.log(seconds / measured)
        robust = weights * np.sqrt(np.minimum(1.0, HUBER * NOISE / np.maximum(np.abs(errors), 1e-9)))
        missed = errors * robust
        slopes = parts / seconds[:, None] * robust[:, None]  # derivatives in logarithms
        normal = slopes.T @ slopes + np.eye(len(names)) / DOUBT**2
        moved -= np.clip(np.linalg.solve(normal, slopes.T @ missed + moved / DOUBT**2), -0.5, 0.5)
    return dict(zip(names, (priors * np.exp(moved)).tolist(), strict=True))


def fitted(history: RunHistory) -> dict[str, Term]:
    """Return the coefficients. Each has the number of runs in which its term takes at least a twentieth of the step."""
    seen, runs = observations(history), Counter[str]()
    coefficients = fit(seen)
    for each in seen:
        modelled = step(each.ideal, coefficients)
        runs.update(name for name, seconds in modelled.parts.items() if seconds > modelled.seconds / 20)
    return {name: replace(term, value=round(coefficients[name], 4) if runs[name] else term.prior, runs=runs[name])
            for name, term in shipped_terms().items()}  # fmt: skip


def coefficient_table(terms: Mapping[str, Term]) -> str:
    lines = ["| coefficient | value | without runs | runs | why |", "|---|--:|--:|--:|---|"]
    for name, term in terms.items():
        lines.append(f"| {name} | {term.value:.3g} | {term.prior:.3g} | {term.runs} | {term.why} |")
    return "\n".join(lines) + "\n"


def as_text(rows: Sequence[LeftOut]) -> str:
    """Return the rows as a Markdown table, followed by their errors in a sentence."""
    lines = ["| run | optimizations | measured step | estimated | error | in its range |", "|---|---|--:|--:|--:|---|"]
    for row in rows:
        on = ", ".join(optimizations_on(row.run.spec.optimizations.model_dump())) or "none"
        times = [units.seconds(step) for step in (row.run.step_s, row.estimate.step_s.expected)]
        cells = [row.run.run_id, on, *times, change(row.error), "yes" if row.is_inside else "no"]
        lines.append(f"| {' | '.join(cells)} |")
    mean, worst = errors_of(rows)
    steps, inside = len({same_step(row.run) for row in rows}), sum(row.is_inside for row in rows)
    return "\n".join([*lines, "", (
        f"The table has {units.some(len(rows), 'run')} and {units.some(steps, 'different step')} (combinations of "
        f"settings and GPU). Each estimate excludes runs of the same step. The mean error of the steps is "
        f"{percent(mean)}, and the largest error is {percent(worst)}. "
        f"{inside} of {len(rows)} runs are inside the range of their estimate."
    )]) + "\n"  # fmt: skip


def facts(rows: Sequence[LeftOut], ranges: Mapping[str, float], terms: Mapping[str, Term]) -> str:
    """Return facts/durations.yaml with these coefficients and ranges."""
    (mean, worst), by_gpu = errors_of(rows), grouped_by(rows, lambda row: row.run.gpu)
    document = {
        "gpus": sorted(gpu for gpu, own in by_gpu.items() if len({same_model(row.run) for row in own}) >= LEAST_MODELS),
        "error": {"mean": round(mean, 4), "worst": round(worst, 4)},
        "spread": {bound: round(value, 3) for bound, value in ranges.items()},
        "coefficients": {name: asdict(term) for name, term in terms.items()},
        "runs": [row.run.run_id for row in rows],
    }
    return FACTS_HEAD + yaml.safe_dump(document, sort_keys=False, width=1000, allow_unicode=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    write, history = parser.parse_args().write, RunHistory(None, timed_runs(STORES))
    rows, unseen, models = (left_out(history, group, fit) for group in (same_step, same_settings, same_model))
    terms = fitted(history)
    coefficients = {name: term.value for name, term in terms.items()}
    several, text_rows = several_gpus(history, coefficients), text_study(coefficients)
    unknown, known = ([row for row in part if row.bound != "GPU"] for part in text_rows)
    every = [*models, *unknown, *known]
    (mean, worst), ranges, starts = errors_of(unseen), spreads(every), start_spreads([*rows, *text_rows[0]])
    ratios = [1 / (1 + row.error) for row in unknown]
    missed = [percent(median(abs(row.error) for row in part)) for part in (unknown, known, text_rows[1])]
    limits = ", ".join(f"{value:.2f} if a {bound} limits the speed" for bound, value in factors(ranges).items())
    text = (
        f"{coefficient_table(terms)}\n{as_text(rows)}If the fit excludes all runs with the same method and "
        f"optimizations, the mean error is {percent(mean)} and the largest error is {percent(worst)}.\nIf the fit "
        f"excludes all runs of the same model, the mean error is {percent(errors_of(models)[0])}. Ranges that were "
        f"fitted without a model contain {percent(coverage(every))} of the runs of this model.\nThe ranges include "
        f"{len(unknown)} launch-bound runs of the [text study](founding-text.md) on several hosts. Their steps "
        f"took {min(ratios):.2f} to {max(ratios):.2f} times the time that was estimated without a run on these hosts "
        f"(median error {missed[0]}). If runs of other steps give the speed of the host (*known host*), the median "
        f"error of {len(known)} launch-bound estimates is {missed[1]}, and that of all {len(text_rows[1])} estimates "
        f"is {missed[2]}.\nThe range of an estimate is from `expected time / factor` to `expected time * factor`. "
        f"The factor is {limits}.\nFor the time to import, load and compile, the factor is {starts['start']:.2f}, or "
        f"{starts['measured start']:.2f} with runs of the same step.\n\n## Several GPUs\n\n{as_text(several)}"
    )
    print(text, end="")
    if write:
        FACTS.write_text(facts(rows, ranges | starts, terms), "utf-8")
        PAGE.write_text(HEAD + text, "utf-8")


if __name__ == "__main__":
    main()

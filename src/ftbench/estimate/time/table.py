"""`ftbench estimate --calibrate`, time: the coefficients that runs tell, and each run predicted without its like."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import yaml

from ftbench.core import units
from ftbench.core.hardware import Gpu, gpus
from ftbench.estimate.time import speeds
from ftbench.estimate.time.duration import estimate_duration
from ftbench.estimate.time.fitting import fit, told_by
from ftbench.estimate.time.history import Known
from ftbench.estimate.time.observations import Observation
from ftbench.estimate.time.run_index import Store
from ftbench.store.summary import optimizations_on


@dataclass(frozen=True, slots=True)
class Row:
    """A run: seconds of its mean step, and what was estimated from the other runs alone (`left_out`), from the
    coefficients of the other runs without any run near it (`bare`)."""

    run: Known
    measured: float
    left_out: float
    low: float
    high: float
    bare: float
    basis: str

    @property
    def error(self) -> float:
        return self.left_out / self.measured - 1

    @property
    def inside(self) -> bool:
        return self.low <= self.measured <= self.high


def fitted(store: Store) -> dict[str, speeds.Term]:
    """The coefficients with how many runs told each."""
    seen = _seen(store)
    terms = speeds.shipped()
    found = fit(seen, _priors())
    counts = told_by(seen, found)
    return {
        name: replace(term, value=round(found[name], 4), runs=counts[name]) if counts[name] else
        replace(term, value=term.prior, runs=0)
        for name, term in terms.items()
    }  # fmt: skip


def left_out(store: Store, kin: Callable[[Observation], Any] = lambda each: each.key) -> list[Row]:
    """A row for each run whose model and GPU are known; runs that are `kin`, by default those of the same step, are
    left out together."""
    rows = []
    seen = _seen(store)
    for group in dict.fromkeys(map(kin, seen)):
        others = [each for each in seen if kin(each) != group]
        coefficients = fit(others, _priors())
        rest = Store(store.path, tuple(each.run for each in others))
        rows += [_row(each, rest, coefficients) for each in seen if kin(each) == group]
    return rows


def settings(each: Observation) -> str:
    """Kin by method and optimizations: nobody has measured the like."""
    return f"{each.run.gpu} {each.run.spec.method.name} {each.run.spec.optimizations}"


def _row(each: Observation, rest: Store, coefficients: dict[str, float]) -> Row:
    gpu = _gpu(each.run)
    alone = estimate_duration(each.run.spec, gpu, rest, coefficients=coefficients)
    bare = estimate_duration(each.run.spec, gpu, Store(rest.path), coefficients=coefficients)
    step = alone.step_s
    return Row(each.run, each.run.step_s, step.expected, step.low, step.high, bare.step_s.expected, alone.basis)


def _seen(store: Store) -> list[Observation]:
    known = {gpu.name: gpu for gpu in gpus()}
    return [each for gpu in known.values() for each in store.observations(gpu)]


def _priors() -> dict[str, float]:
    return {name: term.prior for name, term in speeds.shipped().items()}


def _gpu(run: Known) -> Gpu:
    return next(gpu for gpu in gpus() if gpu.name == run.gpu)


def text(rows: Sequence[Row], terms: Mapping[str, speeds.Term]) -> str:
    """The coefficients, if any are given, and the table, in Markdown."""
    lines = ["| coefficient | value | without runs | runs | why |", "|---|--:|--:|--:|---|"] if terms else []
    lines += [
        f"| {name} | {term.value:.3g} | {term.prior:.3g} | {term.runs} | {term.why} |" for name, term in terms.items()
    ]
    lines += [""] if terms else []
    lines += ["| run | with | measured step | estimated | error | in its band | without any run | basis |"]
    lines += ["|---|---|--:|--:|--:|---|--:|---|"]
    for row in rows:
        on = ", ".join(optimizations_on(row.run.spec.optimizations.model_dump())) or "none"
        lines.append(
            f"| {row.run.run_id} | {on} | {units.seconds(row.measured)} | {units.seconds(row.left_out)} | "
            f"{row.error:+.1%} | {'yes' if row.inside else 'no'} | {row.bare / row.measured - 1:+.1%} | {row.basis} |"
        )
    return "\n".join([*lines, "", *summary(rows)]) + "\n"


def summary(rows: Sequence[Row]) -> list[str]:
    """The errors in sentences; runs of one step count as one."""
    if not rows:
        return ["no run whose model and GPU are known"]
    errors, bare = (_by_step(rows, name) for name in ("left_out", "bare"))
    inside = sum(row.inside for row in rows)
    return [
        f"{len(rows)} runs of {len(errors)} different steps, each estimated without the runs of its step: mean error "
        f"{_mean(errors):.1%}, worst {max(errors):.1%}; {inside} of {len(rows)} within their band",
        f"by the coefficients alone, with no run near: mean {_mean(bare):.1%}, worst {max(bare):.1%}",
    ]


def errors_of(rows: Sequence[Row]) -> tuple[float, float]:
    """Mean and worst relative error of the step time; runs of one step count as one."""
    errors = _by_step(rows, "left_out")
    return _mean(errors), max(errors)


def _by_step(rows: Sequence[Row], name: str) -> list[float]:
    found: dict[Any, list[float]] = {}
    for row in rows:
        found.setdefault((row.run.gpu, *row.run.key), []).append(abs(getattr(row, name) / row.measured - 1))
    return [_mean(errors) for errors in found.values()]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def facts(store: Store, rows: Sequence[Row], terms: Mapping[str, speeds.Term]) -> str:
    """facts/durations.yaml: the coefficients with the runs that they come from."""
    mean, worst = errors_of(rows)
    document = {
        "gpus": sorted({row.run.gpu for row in rows}),
        "error": {"mean": round(mean, 4), "worst": round(worst, 4)},
        "coefficients": {name: asdict(term) for name, term in terms.items()},
        "runs": [row.run.run_id for row in rows],
    }
    return _HEAD + yaml.safe_dump(document, sort_keys=False, width=1000, allow_unicode=True)


_HEAD = """\
# Coefficients of the time estimate: seconds = value x the seconds a term would take at the GPU's ceilings
# (estimate/work.py, estimate/speeds.py). Written by `scripts/duration-table --write`; `prior` and `why` are by hand,
# and some priors were set with these runs in sight. `runs` of a coefficient: in how many it is a twentieth or more.
# `error`: each step estimated without its own runs.
"""

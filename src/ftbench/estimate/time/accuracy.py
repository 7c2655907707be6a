"""How far the time estimate is off: each run of a store beside what is estimated without the runs of its step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ftbench.core import units
from ftbench.core.grouping import grouped_by
from ftbench.core.hardware import Gpu, gpus
from ftbench.core.units import change, percent
from ftbench.estimate.time import speeds
from ftbench.estimate.time.duration import DurationEstimate, estimate_duration
from ftbench.estimate.time.history import TimedRun
from ftbench.estimate.time.neighbor_correction import Observation
from ftbench.estimate.time.run_index import Store
from ftbench.estimate.workload.model import is_rough
from ftbench.store.summary import optimizations_on


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A run with what is estimated of it from the others alone, and from coefficients without any run near (`bare`)."""

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


def left_out(
    store: Store,
    kin: Callable[[Observation], Any] = lambda each: each.key,
    coefficients_of: Callable[[Sequence[Observation]], Mapping[str, float]] = lambda _: speeds.values(speeds.shipped()),
) -> list[LeftOut]:
    """Return a row for each run whose model and GPU are known; runs that are `kin`, by default those of the same step,
    are left out together. `coefficients_of` the others are the shipped ones unless they are fitted again."""
    seen = observations(store)
    rows = []
    for group in dict.fromkeys(map(kin, seen)):
        others = [each for each in seen if kin(each) != group]
        coefficients = coefficients_of(others)
        rest = Store(store.path, tuple(each.run for each in others))
        rows += [_row(each.run, rest, dict(coefficients)) for each in seen if kin(each) == group]
    return rows


def several_gpus(store: Store, coefficients: Mapping[str, float]) -> list[LeftOut]:
    """Return a row for each run on several GPUs, which nothing is fitted to."""
    runs = [run for run in store.runs if run.spec.launch.gpus > 1 and not is_rough(run.spec)]
    return [_row(run, store.without(run.key), dict(coefficients)) for run in runs]


def observations(store: Store) -> list[Observation]:
    """Return the runs of a store on all GPUs of the table, with their work."""
    return [each for gpu in gpus() for each in store.observations(gpu)]


def _row(run: TimedRun, rest: Store, coefficients: dict[str, float]) -> LeftOut:
    gpu: Gpu = next(gpu for gpu in gpus() if gpu.name == run.gpu)
    alone = estimate_duration(run.spec, gpu, rest, coefficients=coefficients)
    return LeftOut(run, alone, estimate_duration(run.spec, gpu, Store(rest.path), coefficients=coefficients))


def text(rows: Sequence[LeftOut]) -> str:
    """Return the rows as a table in Markdown, and their errors in sentences."""
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
        f"by the coefficients alone, with no run near: mean {percent(bare_mean)}, worst {percent(bare_worst)}",
    ]


def errors_of(rows: Sequence[LeftOut], name: str = "error") -> tuple[float, float]:
    """Return the mean and the worst relative error of the step time; runs of one step count as one."""
    errors = _by_step(rows, name)
    return fmean(errors), max(errors)


def _by_step(rows: Sequence[LeftOut], name: str) -> list[float]:
    by_step = grouped_by(rows, lambda row: (row.run.gpu, *row.run.key))
    return [fmean(abs(getattr(row, name)) for row in alike) for alike in by_step.values()]

"""Fits the few constants to measured runs, and says how wrong the estimator is about runs it was not fitted to."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from ftbench.core.hardware import find_gpu
from ftbench.errors import SpecError
from ftbench.estimate.memory.constants import Constants, shipped
from ftbench.estimate.memory.estimate import ALLOCATED_SPREAD, MemoryEstimate, SlackBasis, slack_basis_of
from ftbench.estimate.memory.measured import TIERS, Measured

# The constants of the slack, and what runs may not have that tell them.
_BESIDE = {"logits_share": ("compiled_gib", "varying_share", "optimizer_share"), "compiled_gib": ("varying_share",),
           "varying_share": ("compiled_gib",), "optimizer_share": ("varying_share",)}  # fmt: skip
FEWEST = 3  # runs below which a constant keeps its shipped value


@dataclass(frozen=True, slots=True)
class Error:
    """Relative errors of one tier over runs: mean and worst of their sizes, and the mean with its sign."""

    count: int
    mean: float
    worst: float
    bias: float


@dataclass(frozen=True, slots=True)
class RunErrors:
    """A run with its estimate; `errors` are estimated / measured - 1 by tier."""

    run: Measured
    estimate: MemoryEstimate
    errors: dict[str, float]


def fit(runs: Sequence[Measured]) -> Constants:
    """Return constants for runs on one GPU that ended well; what they say nothing of keeps its shipped value.
    Medians, so that one odd run does not move them. The slack is taken apart in turn: what the logits leave, then
    compiled graphs, then batches of many shapes, then the optimizer's step."""
    ended = [run for run in runs if run.fits and run.allocated is not None and run.spec.launch.gpus == 1]
    if len(ended) < FEWEST:
        raise SpecError(f"runs that say how much memory they took: {len(ended)}; calibrating needs {FEWEST} or more")
    plain = replace(shipped(), allocated_factor=1.0)
    factors = [run.allocated / run.estimate(plain).allocated.expected for run in ended if run.allocated]
    context = [run.device - run.reserved for run in ended if run.device is not None and run.reserved is not None]
    held = [(slack_basis_of(run.spec, find_gpu(run.gpu) or run.total, run.batch), run.reserved - run.allocated)
            for run in ended if run.reserved is not None and run.allocated is not None
            and not run.spec.optimizations.weight_offload]  # fmt: skip
    values: dict[str, Any] = {"allocated_factor": median(factors), **_slack(held)}
    if len(context) >= FEWEST:
        values["context_gib"] = median(context)
    fitted = replace(shipped(), runs=tuple(sorted({run.name for run in ended})), **values)
    return replace(fitted, strategies=_confirmed(runs, fitted))


def _confirmed(runs: Sequence[Measured], fitted: Constants) -> tuple[str, ...]:
    """Return the strategies all of whose runs on several GPUs took what is estimated, within ALLOCATED_SPREAD."""
    several = [row for row in rows(runs, fitted) if row.run.spec.launch.gpus > 1 and not row.run.outdated]
    strategies = {row.run.spec.launch.strategy for row in several}
    missed = {row.run.spec.launch.strategy for row in several if abs(row.errors["allocated"]) > ALLOCATED_SPREAD}
    return tuple(sorted(strategies - missed))


def _slack(held: Sequence[tuple[SlackBasis, float]]) -> dict[str, float]:
    """Return the constants of the slack, each from runs whose slack has nothing but what the ones before it tell."""
    fitted: dict[str, float] = {}
    for name, others in _BESIDE.items():
        ratios = [max(0.0, slack - fitted.get("logits_share", 0.0) * basis["logits_share"]) / basis[name]
                  for basis, slack in held if basis[name] and not any(basis[other] for other in others)]  # fmt: skip
        fitted[name] = sum(ratios) / len(ratios) if len(ratios) >= FEWEST else getattr(shipped(), name)
    return fitted


def rows(runs: Sequence[Measured], known: Constants) -> list[RunErrors]:
    """Return runs that ended well, each with its estimate under these constants."""
    return [_row(run, run.estimate(known)) for run in runs if run.fits and run.allocated is not None]


def left_out(runs: Sequence[Measured]) -> list[RunErrors]:
    """Return each run estimated with constants fitted to the others. Repeats of a run (the same spec on the same
    GPU) are left out together, since they would tell its answer."""
    ended = [run for run in runs if run.fits and run.allocated is not None]
    result = []
    for run in ended:
        others = [other for other in ended if (other.spec, other.gpu) != (run.spec, run.gpu)]
        known = fit(others) if len(others) >= FEWEST else shipped()
        result.append(_row(run, run.estimate(known)))
    return result


def _row(run: Measured, estimate: MemoryEstimate) -> RunErrors:
    pairs = {tier: (getattr(run, tier), getattr(estimate, tier).expected) for tier in TIERS}
    return RunErrors(run, estimate, {tier: said / real - 1 for tier, (real, said) in pairs.items() if real})


def is_inside(row: RunErrors, tier: str) -> bool:
    """Return whether what a run measured lies in the band of a tier that it tells of."""
    band = getattr(row.estimate, tier)
    return bool(band.low <= getattr(row.run, tier) <= band.high)


def error(estimated: Sequence[RunErrors], tier: str) -> Error | None:
    """Return the error of one tier; None where no run has it."""
    errors = [row.errors[tier] for row in estimated if tier in row.errors]
    if not errors:
        return None
    sizes = [abs(value) for value in errors]
    return Error(len(errors), sum(sizes) / len(sizes), max(sizes), sum(errors) / len(errors))


def false_fits(runs: Sequence[Measured], known: Constants) -> list[str]:
    """Return runs that ran out of memory and that the estimator says fit their GPU."""
    return [run.name for run in runs if not run.fits and run.estimate(known).verdict == "fits"]

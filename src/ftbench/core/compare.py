"""Two sides of a comparison: what differs, the ratio with its 95 % interval, when a slow start has paid for itself, and
whether both learn the same. Plain numbers in, plain records out; what the data cannot tell is None, never a guess.

An interval comes from the best evidence there is:

`runs`   several runs a side, each a fresh process: Welch's unequal-variances t interval (B. L. Welch, Biometrika 34,
         1947) of the difference of the mean logarithms, turned back into a ratio. The ratio is that of the geometric
         means. Where only one side was repeated, the other is taken to spread alike (J. R. Crawford and D. C. Howell,
         The Clinical Neuropsychologist 12, 1998: one value against a sample).
`steps`  one run a side: within-run only. The order-statistic interval of each run's median step gives the standard
         error of its logarithm (R. M. Price and D. G. Bonett, J. Stat. Comput. Simul. 72, 2002: ratios of medians).
         Where both ran the same tokens in the same order the steps are taken in pairs. A run that was started again
         may differ by more than its steps do.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ftbench.core.stats import median_interval

CONFIDENCE = 0.95
UNPROVEN = ("dataset.hash", "dataset.order_hash")  # a recipe is called the same only where both sides name these


@dataclass(frozen=True, slots=True)
class Ratio:
    """`value` is candidate over baseline; `low` and `high` bound it with 95 % confidence, None where the data cannot
    tell. `basis` is `runs`, `steps`, or empty without an interval; `runs` counts those of baseline and candidate."""

    value: float
    low: float | None = None
    high: float | None = None
    basis: str = ""
    runs: tuple[int, int] = (1, 1)

    @property
    def verdict(self) -> str:
        """`higher`, `lower`, `not distinguishable`, or `unknown` without an interval."""
        if self.low is None or self.high is None:
            return "unknown"
        return "higher" if self.low > 1 else "lower" if self.high < 1 else "not distinguishable"


@dataclass(frozen=True, slots=True)
class Difference:
    """One fact on which two runs do not agree; None is unknown."""

    key: str
    baseline: str | None
    candidate: str | None

    def __str__(self) -> str:
        return f"{self.key}: {self.baseline or 'unknown'} → {self.candidate or 'unknown'}"


def differences(
    baseline: Mapping[str, str], candidate: Mapping[str, str], implied: Callable[[str], bool] = lambda key: False
) -> list[Difference]:
    """What keeps two runs from being the same recipe, but for the facts that are `implied` by the thing compared:
    facts that both know and do not agree on, facts that one of them lacks, and, unknown on both sides, those without
    which nothing is proven (`UNPROVEN`). An empty list is an iso pair."""
    keys = dict.fromkeys([*baseline, *candidate, *UNPROVEN])
    found = (Difference(key, baseline.get(key), candidate.get(key)) for key in keys if not implied(key))
    return [one for one in found if one.baseline != one.candidate or one.baseline is None]


# --- ratios ----------------------------------------------------------------------------------------------------------


def geometric_mean(values: Sequence[float]) -> float | None:
    """Of positive values; None for none, or where one is not positive."""
    return math.exp(statistics.fmean(map(math.log, values))) if values and min(values) > 0 else None


def ratio_of_runs(baseline: Sequence[float], candidate: Sequence[float]) -> Ratio | None:
    """The ratio of a positive figure, one value a run, by the rule `runs`; without an interval where neither side was
    repeated, None where a side has no value."""
    above, below = geometric_mean(candidate), geometric_mean(baseline)
    if above is None or below is None:
        return None
    value, counts = above / below, (len(baseline), len(candidate))
    if max(counts) < 2:
        return Ratio(value, runs=counts)
    error, freedom = _standard_error([[math.log(x) for x in side] for side in (baseline, candidate)])
    return _around(value, t_quantile((1 + CONFIDENCE) / 2, freedom) * error if error else 0.0, "runs", counts)


def _standard_error(sides: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Of the difference of two means, with Welch's degrees of freedom."""
    repeated = [side for side in sides if len(side) > 1]
    variances = [statistics.variance(side) if len(side) > 1 else statistics.variance(repeated[0]) for side in sides]
    parts = [variance / len(side) for variance, side in zip(variances, sides, strict=True)]
    if len(repeated) == 1 or not sum(parts):
        return math.sqrt(sum(parts)), float(len(repeated[0]) - 1)
    freedom = sum(parts) ** 2 / sum(part**2 / (len(side) - 1) for part, side in zip(parts, sides, strict=True))
    return math.sqrt(sum(parts)), freedom


def _around(value: float, half_width: float, basis: str, runs: tuple[int, int]) -> Ratio:
    return Ratio(value, value * math.exp(-half_width), value * math.exp(half_width), basis, runs)


def ratio_of_steps(value: float, baseline: Sequence[float], candidate: Sequence[float], *, paired: bool) -> Ratio:
    """`value`, the ratio of two runs' figures, with an interval by the rule `steps` from the positive figures of their
    steady steps. `paired` says that step i of one ran the tokens of step i of the other. The interval holds both
    `value` and the ratio of the medians, each with the medians' uncertainty, and so grows where a few long steps pull
    the two apart. No interval with fewer than six steps a side."""
    if not baseline or not candidate or min(*baseline, *candidate) <= 0:
        return Ratio(value)
    if paired:
        logs = [math.log(c / b) for b, c in zip(baseline, candidate, strict=True)]
        middle, error = statistics.median(logs), median_error(logs)
    else:
        sides = [[math.log(x) for x in side] for side in (baseline, candidate)]
        middle = statistics.median(sides[1]) - statistics.median(sides[0])
        errors = [median_error(side) for side in sides]
        error = None if None in errors else math.hypot(*(e for e in errors if e is not None))
    if error is None:
        return Ratio(value)
    half = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * error
    ends = (math.log(value), middle)
    return Ratio(value, math.exp(min(ends) - half), math.exp(max(ends) + half), "steps")


def median_error(values: Sequence[float]) -> float | None:
    """The standard error of a median: the width of its order-statistic interval over twice the normal quantile of the
    coverage that this interval really has (Price and Bonett, 2002). None with fewer than six values."""
    interval = median_interval(values, CONFIDENCE)
    if interval is None:
        return None
    coverage = _coverage(len(values))
    return (interval[1] - interval[0]) / 2 / statistics.NormalDist().inv_cdf((1 + coverage) / 2)


def _coverage(n: int) -> float:
    """What the order-statistic interval of the median of n values really covers: at least `CONFIDENCE`."""
    if n > 1000:  # by the normal approximation that core.stats takes there
        return CONFIDENCE
    tail, k = 0.0, 0
    while 1 - 2 * (tail + math.comb(n, k) / 2**n) >= CONFIDENCE:
        tail += math.comb(n, k) / 2**n
        k += 1
    return 1 - 2 * tail


def t_quantile(p: float, freedom: float) -> float:
    """The p-quantile (0.5 < p < 1) of Student's t, by bisection of its distribution function, which is one minus half
    the regularised incomplete beta function at ν / (ν + t²) (Abramowitz and Stegun 26.7.1)."""
    low, high = 0.0, 1.0
    while _t_below(high, freedom) < p:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_below(middle, freedom) < p else (low, middle)
    return (low + high) / 2


def _t_below(t: float, freedom: float) -> float:
    return 1 - 0.5 * _incomplete_beta(freedom / (freedom + t * t), freedom / 2, 0.5)


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """Regularised, by the continued fraction of Press et al., Numerical Recipes, 6.4."""
    if x <= 0 or x >= 1:
        return min(max(x, 0.0), 1.0)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(1 - x, b, a)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    tiny, c, d = 1e-300, 1.0, 1 - (a + b) * x / (a + 1)
    d = 1 / (d or tiny)
    h = d
    for m in range(1, 300):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for part in (even, odd):
            d = 1 / ((1 + part * d) or tiny)
            c = (1 + part / c) or tiny
            h *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return front * h


# --- a slow start ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pace:
    """How a run goes: what its start takes beyond as many steady steps, in seconds; samples a second once steady; and
    samples a step."""

    start_s: float
    samples_per_s: float
    samples_per_step: float


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Which side is ahead when: `at once` (the candidate, by the end of its first step), `after` or `until` the
    candidate's step `steps`, which is more than one, or `never`."""

    when: str
    steps: float | None = None


def break_even(baseline: Pace, candidate: Pace) -> BreakEven:
    """Where the times of both for the same samples cross: start + samples / rate on either side. A crossing within the
    candidate's first step is none that a run can show: nothing is trained before a step ends."""
    later = candidate.start_s - baseline.start_s
    gain = 1 / baseline.samples_per_s - 1 / candidate.samples_per_s
    if later <= 0 <= gain:
        return BreakEven("at once")
    if later >= 0 >= gain:
        return BreakEven("never")
    steps = later / gain / candidate.samples_per_step
    if steps <= 1:
        return BreakEven("at once" if gain > 0 else "never")
    return BreakEven("after" if gain > 0 else "until", steps)


# --- the same learning -----------------------------------------------------------------------------------------------

_OUTSIDE = 0.05  # share of the steps that may lie outside


@dataclass(frozen=True, slots=True)
class Parity:
    """Whether the candidate learns what the baseline does: `within`, `outside` or `unchecked` with the `reason`.
    `worst` is the largest share by which a step's loss differs, in step `step`; of samples in another order (`step` is
    None) the share by which the mean loss does. `tolerance` is the share allowed, `change` that of the mean loss of
    what was compared, with its sign."""

    verdict: str
    reason: str = ""
    worst: float | None = None
    step: int | None = None
    tolerance: float | None = None
    change: float | None = None


def loss_parity(baseline: Mapping[int, float], candidate: Mapping[int, float], tolerance: float) -> Parity:
    """Finite losses of the steps that both took, by step, on the same tokens in the same order. Within, if at most one
    step in twenty differs by more than the tolerance."""
    common = sorted(step for step in baseline.keys() & candidate.keys() if baseline[step])
    if not common:
        return Parity("unchecked", "no step of both has a loss")
    shares = {step: abs(candidate[step] / baseline[step] - 1) for step in common}
    step, worst = max(shares.items(), key=lambda pair: (pair[1], -pair[0]))
    outside = sum(share > tolerance for share in shares.values()) > _OUTSIDE * len(shares)
    change = sum(candidate[s] for s in common) / sum(baseline[s] for s in common) - 1
    return Parity("outside" if outside else "within", "", worst, step, tolerance, change)


Weighted = tuple[float, float, float]  # samples of a step, its label tokens, its loss a label token


def mean_parity(baseline: Sequence[Weighted], candidate: Sequence[Weighted], tolerance: float) -> Parity:
    """For the same samples in another order: the mean loss a label token over as many samples as both have seen, in
    whole steps."""
    seen = min(sum(samples for samples, _, _ in side) for side in (baseline, candidate))
    counts = [_whole_steps(side, seen) for side in (baseline, candidate)]
    counts = [_whole_steps(side, min(found for _, found in counts)) for side in (baseline, candidate)]
    means = []
    for side, (steps, _) in zip((baseline, candidate), counts, strict=True):
        labels = sum(count for _, count, _ in side[:steps])
        means.append(sum(count * loss for _, count, loss in side[:steps]) / labels if labels else 0.0)
    if not all(means):
        return Parity("unchecked", "no whole step of both has a loss")
    change = means[1] / means[0] - 1
    verdict = "outside" if abs(change) > tolerance else "within"
    return Parity(verdict, "", abs(change), None, tolerance, change)


def _whole_steps(side: Sequence[Weighted], limit: float) -> tuple[int, float]:
    """How many steps, from the first, have seen at most `limit` samples, and how many those saw."""
    seen = 0.0
    for step, (samples, _, _) in enumerate(side):
        if seen + samples > limit:
            return step, seen
        seen += samples
    return len(side), seen

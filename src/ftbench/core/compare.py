"""Compare two groups of runs: settings that differ, ratios with 95 % intervals, break-even points.

Unknown values are None. An interval has one of two bases:

`runs`: At least one side has several runs, each in a separate process. The ratio divides the geometric means of the two
sides. The interval is the t interval of the difference between the mean logarithms. A known spread between repeated
runs adds one degree of freedom (moderated variance: G. K. Smyth, Stat. Appl. Genet. Mol. Biol. 3, 2004). This spread
never reduces the observed variance. The side with fewer runs gives the degrees of freedom. Without a known spread, the
interval is Welch's (B. L. Welch, Biometrika 34, 1947). If only one side was repeated, both sides are assumed to have
the same variance (J. R. Crawford and D. C. Howell, The Clinical Neuropsychologist 12, 1998: one value and a sample).
The verdict is then at most `likely`.

`steps`: Each side has one run. The confidence interval of each run's median step gives a standard error of the
logarithm (R. M. Price and D. G. Bonett, J. Stat. Comput. Simul. 72, 2002: ratios of medians). Steps are paired if both
runs trained on the same tokens in the same order. Repeated runs differ more than the steps of one run. Therefore the
spread between runs is added, and the verdict is at most `likely`.

A sitting is a group of runs on one card within 12 hours. Speeds also differ between sittings. If both sides were
repeated in one sitting, the interval does not need this spread. All other intervals include this spread (`sitting`).

If several comparisons are shown together, each interval has the confidence `1 - 0.05 / comparisons` (Bonferroni).
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ftbench.core.stats import CONFIDENCE, median_error, t_quantile

UNPROVEN = ("dataset.hash", "dataset.order_hash")  # settings that count as different if both runs lack them
# Standard deviation of log(rate) between runs of one spec on one GPU, used if no spec was repeated. It was fitted to
# the repeated specs in results/ (tests/core/test_compare.py).
TYPICAL_SPREAD = 0.0015
# Weight of a known spread in degrees of freedom. Spreads of specs range from 0.004 to 13 %. Chance explains
# a similar range for the variances of two runs (tests/core/test_compare.py).
TYPICAL_FREEDOM = 1
# Standard deviation of log(rate) between sittings (cards or days) of one spec; the second value is for launch-bound
# specs. In results/h200, seven specs have two to four sittings: median 1.7 %, launch-bound 6.2 %.
SITTING_SPREAD, LAUNCH_BOUND_SPREAD = 0.02, 0.06


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio with its 95 % interval.

    Attributes:
        value: Figure of the candidate divided by the figure of the baseline.
        low: Lower bound, None if unknown.
        high: Upper bound, None if unknown.
        basis: Evidence for the interval: `runs` or `steps`. Empty if there is no interval.
        runs: Number of baseline runs and number of candidate runs.
    """

    value: float
    low: float | None = None
    high: float | None = None
    basis: str = ""
    runs: tuple[int, int] = (1, 1)

    @property
    def direction(self) -> str:
        """`higher` or `lower` if the interval excludes 1, otherwise an empty string."""
        if self.low is None or self.high is None:
            return ""
        return "higher" if self.low > 1 else "lower" if self.high < 1 else ""

    @property
    def verdict(self) -> str:
        """`higher`, `lower`, `not distinguishable` (the interval contains 1) or `unknown` (no interval). If a side has
        a single run, `higher` and `lower` become `likely higher` and `likely lower`."""
        if self.low is None:
            return "unknown"
        likely = "likely " if min(self.runs) == 1 else ""
        return f"{likely}{self.direction}" if self.direction else "not distinguishable"


@dataclass(frozen=True, slots=True)
class Difference:
    """One setting that differs between two runs. None means that the value is unknown."""

    key: str
    baseline: str | None
    candidate: str | None

    def __str__(self) -> str:
        return f"{self.key}: {self.baseline or 'unknown'} → {self.candidate or 'unknown'}"


def differences(
    baseline: Mapping[str, str], candidate: Mapping[str, str], implied: Callable[[str], bool] = lambda key: False
) -> list[Difference]:
    """Return the settings that differ between two runs, without the settings that are compared on purpose.

    A setting differs if the two values are unequal or if one run lacks a value. The hashes in `UNPROVEN` also differ if
    both runs lack them.

    Args:
        baseline: Settings of one run.
        candidate: Settings of the other run.
        implied: Function that returns True for a setting that is compared on purpose.
    """
    keys = dict.fromkeys([*baseline, *candidate, *UNPROVEN])
    every = ((key, baseline.get(key), candidate.get(key)) for key in keys)
    return [Difference(key, a, b) for key, a, b in every if (a != b or a is None) and not implied(key)]


def geometric_mean(values: Sequence[float]) -> float | None:
    """Return the geometric mean. Return None for an empty sequence or for a value that is not positive."""
    return math.exp(statistics.fmean(map(math.log, values))) if values and min(values) > 0 else None


def ratio_of_runs(
    baseline: Sequence[float], candidate: Sequence[float], *, spread: float | None = None, comparisons: int = 1,
    sitting: float = 0.0,
) -> Ratio | None:  # fmt: skip
    """Return the ratio candidate / baseline with an interval from repeated runs (`runs` in the module docstring).

    Args:
        baseline: One positive value per run, as in `candidate`.
        spread: Standard deviation of log(value) between repeated runs, None if unknown.
        comparisons: Number of comparisons that are shown together.
        sitting: Standard deviation of log(ratio) between sittings (cards or days), 0 within one sitting.

    Returns:
        The ratio, without an interval if neither side was repeated. None if a side is empty.
    """
    above, below = geometric_mean(candidate), geometric_mean(baseline)
    if above is None or below is None:
        return None
    value, counts = above / below, (len(baseline), len(candidate))
    if max(counts) < 2:
        return Ratio(value, runs=counts)
    error, freedom = _standard_error([[math.log(x) for x in side] for side in (baseline, candidate)], spread)
    half = t_quantile(_two_sided(comparisons), freedom) * error if error else 0.0
    half = min(math.hypot(half, _normal(comparisons) * sitting), 500.0)  # avoids an overflow of exp
    return Ratio(value, value * math.exp(-half), value * math.exp(half), "runs", counts)


def _two_sided(comparisons: int) -> float:
    """Return the quantile level of the upper end of a two-sided interval: `1 - 0.05 / comparisons / 2`."""
    return 1 - (1 - CONFIDENCE) / comparisons / 2


def _normal(comparisons: int = 1) -> float:
    return statistics.NormalDist().inv_cdf(_two_sided(comparisons))


def interval(values: Sequence[float], sitting: float) -> tuple[float, float] | None:
    """Return the 95 % interval (low, high) of the geometric mean of runs. Return None if there is no mean.

    `sitting` is the standard deviation of log(value) between sittings (cards or days). For a single run,
    `TYPICAL_SPREAD` replaces the spread between repeated runs.
    """
    if (mean := geometric_mean(values)) is None:
        return None
    half = _normal() * TYPICAL_SPREAD
    if len(values) > 1:
        variance, freedom = variance_of(list(map(math.log, values)), TYPICAL_SPREAD)
        half = t_quantile(_two_sided(1), freedom) * math.sqrt(variance / len(values))
    half = min(math.hypot(half, _normal() * sitting), 500.0)
    return mean * math.exp(-half), mean * math.exp(half)


def _standard_error(sides: Sequence[Sequence[float]], spread: float | None) -> tuple[float, float]:
    """Return the standard error of the difference between the means of two sides, and its degrees of freedom."""
    repeated = [variance_of(side, spread) for side in sides if len(side) > 1]
    known = repeated if len(repeated) == len(sides) else repeated * 2
    parts = [variance / len(side) for (variance, _), side in zip(known, sides, strict=True)]
    if spread is not None or len(repeated) == 1 or not sum(parts):
        return math.sqrt(sum(parts)), min(freedom for _, freedom in known)
    welch = sum(parts) ** 2 / sum(part**2 / freedom for part, (_, freedom) in zip(parts, known, strict=True))
    return math.sqrt(sum(parts)), welch


def variance_of(logs: Sequence[float], spread: float | None) -> tuple[float, float]:
    """Return the variance of the logarithms of two or more runs, and its degrees of freedom.

    A known `spread` between runs adds one degree of freedom. This spread never reduces the variance."""
    own, freedom = statistics.variance(logs), len(logs) - 1
    if spread is None:
        return own, float(freedom)
    both = (TYPICAL_FREEDOM * spread**2 + freedom * own) / (TYPICAL_FREEDOM + freedom)
    return max(own, both), float(TYPICAL_FREEDOM + freedom)


def ratio_of_steps(
    value: float,
    baseline: Sequence[float],
    candidate: Sequence[float],
    *,
    paired: bool,
    spread: float = TYPICAL_SPREAD,
    comparisons: int = 1,
    sitting: float = 0.0,
) -> Ratio:
    """Return `value`, the ratio of two runs, with an interval from their steps (`steps` in the module docstring).

    The interval contains `value` and the ratio of the median steps. If a few long steps make these two ratios differ,
    the interval is wide. With fewer than six steps on a side, there is no interval.

    Args:
        value: Figure of the candidate divided by the figure of the baseline.
        baseline: One positive value per step after warm-up, as in `candidate`.
        paired: Whether step i of both runs trained on the same tokens.
        spread: Standard deviation of log(value) between repeated runs.
        comparisons: Number of comparisons that are shown together.
        sitting: Standard deviation of log(ratio) between sittings (cards or days).
    """
    if not baseline or not candidate or min(*baseline, *candidate) <= 0:
        return Ratio(value)
    if paired:
        logs = [math.log(c / b) for b, c in zip(baseline, candidate, strict=True)]
        middle, errors = statistics.median(logs), [median_error(logs)]
    else:
        sides = [[math.log(x) for x in side] for side in (baseline, candidate)]
        middle = statistics.median(sides[1]) - statistics.median(sides[0])
        errors = [median_error(side) for side in sides]
    if None in errors:
        return Ratio(value)
    error = math.hypot(*(each for each in errors if each is not None), math.sqrt(2) * spread, sitting)
    half = _normal(comparisons) * error
    ends = (math.log(value), middle)
    return Ratio(value, math.exp(min(ends) - half), math.exp(max(ends) + half), "steps")


def spread_between(groups: Iterable[Sequence[float]]) -> float:
    """Return the standard deviation of log(value) between repeated runs. Without repeats, return `TYPICAL_SPREAD`.

    The result is the median over all groups, so one stalled run has little influence. Standard deviations of small
    groups tend to be too small. Each deviation is divided by a correction for the group size (median of χ²: Wilson and
    Hilferty, Proc. Natl. Acad. Sci. 17, 1931).
    """
    deviations = []
    for values in groups:
        if len(values) > 1 and min(values) > 0:
            expected = math.sqrt((1 - 2 / (9 * (len(values) - 1))) ** 3)
            deviations.append(statistics.stdev(map(math.log, values)) / expected)
    return statistics.median(deviations) if deviations else TYPICAL_SPREAD


@dataclass(frozen=True, slots=True)
class Pace:
    """The speed of a run.

    Attributes:
        start_s: Extra seconds of the warm-up steps, compared with the same number of steady steps.
        samples_per_s: Samples per second after warm-up.
        samples_per_step: Samples per optimizer step.
    """

    start_s: float
    samples_per_s: float
    samples_per_step: float


@dataclass(frozen=True, slots=True)
class BreakEven:
    """The steps in which the candidate has trained more samples than the baseline. `when` is `at once` (all steps),
    `never`, `after` (after step `steps`) or `until` (until step `steps`). `steps` are steps of the candidate."""

    when: str
    steps: float | None = None


def break_even(baseline: Pace, candidate: Pace) -> BreakEven:
    """Return the steps in which the candidate has needed less time than the baseline for the same number of samples.

    The time is `start_s + samples / samples_per_s`. A break-even within the first step becomes `at once` or `never`."""
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

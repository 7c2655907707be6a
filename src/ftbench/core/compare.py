"""Compare two groups of runs: differences in their settings, ratios with 95 % intervals, break-even points.

Unknown values are None.

An interval is based on the best available evidence:

`runs` Several runs on at least one side, each a separate process. The ratio is the ratio of the geometric means. Its
interval is the t interval of the difference of the mean logarithms. If the spread between repeated runs is known, it
adds one degree of freedom (moderated variance: G. K. Smyth, Stat. Appl. Genet. Mol. Biol. 3, 2004). It never reduces
the observed variance, and the side with fewer runs gives the degrees of freedom. If the spread is unknown, the interval
is Welch's (B. L. Welch, Biometrika 34, 1947). If only one side was repeated, both sides are assumed to have the same
variance (J. R. Crawford and D. C. Howell, The Clinical Neuropsychologist 12, 1998: one value and a sample), and the
verdict is at most `likely`.

`steps` One run per side. The order-statistic interval of each run's median step gives the standard error of its
logarithm (R. M. Price and D. G. Bonett, J. Stat. Comput. Simul. 72, 2002: ratios of medians). Steps are paired if both
runs trained on the same tokens in the same order. Repeated runs differ by more than their steps do, so the spread
between runs is added, and the verdict is at most `likely`.

A speed also differs from one sitting to the next: another card, host or day. A ratio of repeated runs of one sitting
does not contain this spread, because it is the same for both sides. All other intervals contain it (`sitting`).

If several comparisons are shown together, each interval has the confidence 1 - 5 % / comparisons, so that all of them
hold simultaneously with 95 % (Bonferroni correction).
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ftbench.core.stats import CONFIDENCE, median_error, t_quantile

UNPROVEN = ("dataset.hash", "dataset.order_hash")  # settings that count as different if both runs lack them
# Standard deviation of the logarithm of a rate between runs of one spec on one GPU. It is used without repeats. The
# value is the median of eight repeated specs on an H200 (results/h200/plain and results/h200/recipes).
TYPICAL_SPREAD = 0.0025
# Weight of this known spread in degrees of freedom. The spreads of specs (0.01 to 13 % on an H200) vary about as much
# as the variances of two runs vary by chance (tests/core/test_compare.py).
TYPICAL_FREEDOM = 1
# Standard deviation of the logarithm of a rate between sittings (another card or day) of one spec, and of a
# launch-bound one. In results/h200, seven specs have two to four sittings: median 1.7 %, launch-bound 6.2 %.
SITTING_SPREAD, LAUNCH_BOUND_SPREAD = 0.02, 0.06
_VAGUE = 4.0  # if the ends of an interval have a larger ratio, it shows little more than the direction


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio with its 95 % interval.

    Attributes:
        value: Candidate over baseline.
        low: Lower bound, None if unknown.
        high: Upper bound, None if unknown.
        basis: `runs`, `steps`, or empty without an interval.
        runs: Number of runs of the baseline and of the candidate.
    """

    value: float
    low: float | None = None
    high: float | None = None
    basis: str = ""
    runs: tuple[int, int] = (1, 1)

    @property
    def direction(self) -> str:
        """`higher` or `lower` if the interval excludes 1, otherwise empty."""
        if self.low is None or self.high is None:
            return ""
        return "higher" if self.low > 1 else "lower" if self.high < 1 else ""

    @property
    def verdict(self) -> str:
        """`higher`, `lower`, `not distinguishable`, or `unknown` without an interval. If a side has a single run, at
        most `likely higher` or `likely lower`."""
        if self.low is None:
            return "unknown"
        likely = "likely " if min(self.runs) == 1 else ""
        return f"{likely}{self.direction}" if self.direction else "not distinguishable"

    @property
    def vague(self) -> bool:
        """Whether the interval is too wide to be useful."""
        return self.low is not None and self.high is not None and self.high > _VAGUE * self.low


@dataclass(frozen=True, slots=True)
class Difference:
    """One setting that differs between two runs. A value of None is unknown."""

    key: str
    baseline: str | None
    candidate: str | None

    def __str__(self) -> str:
        return f"{self.key}: {self.baseline or 'unknown'} → {self.candidate or 'unknown'}"


def differences(
    baseline: Mapping[str, str], candidate: Mapping[str, str], implied: Callable[[str], bool] = lambda key: False
) -> list[Difference]:
    """Return the settings in which two runs differ, without the settings that are compared.

    A setting differs if the values are unequal, if one side lacks it, or if both lack a setting of `UNPROVEN`.

    Args:
        baseline: Settings of one run.
        candidate: Settings of the other run.
        implied: Function that returns whether a setting belongs to the compared settings.
    """
    keys = dict.fromkeys([*baseline, *candidate, *UNPROVEN])
    every = ((key, baseline.get(key), candidate.get(key)) for key in keys)
    return [Difference(key, a, b) for key, a, b in every if (a != b or a is None) and not implied(key)]


def geometric_mean(values: Sequence[float]) -> float | None:
    """Return the geometric mean. It is None without values, or if a value is not positive."""
    return math.exp(statistics.fmean(map(math.log, values))) if values and min(values) > 0 else None


def ratio_of_runs(
    baseline: Sequence[float], candidate: Sequence[float], *, spread: float | None = None, comparisons: int = 1,
    sitting: float = 0.0,
) -> Ratio | None:  # fmt: skip
    """Return the ratio of two sides with an interval by the rule `runs` (see the module).

    Args:
        baseline: One positive value per run.
        candidate: One positive value per run of the other side.
        spread: Standard deviation of the logarithm between repeated runs, None if unknown.
        comparisons: Number of comparisons that are shown together.
        sitting: Standard deviation of the logarithm of the ratio between sittings, 0 within one.

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
    """Return the quantile level of an interval's upper end, corrected for the number of intervals that are shown
    together."""
    return 1 - (1 - CONFIDENCE) / comparisons / 2


def _normal(comparisons: int = 1) -> float:
    return statistics.NormalDist().inv_cdf(_two_sided(comparisons))


def interval(values: Sequence[float], sitting: float) -> tuple[float, float] | None:
    """Return the 95 % interval of the geometric mean of runs, with the spread between sittings; None without a mean.

    With one run, the spread between repeated runs is `TYPICAL_SPREAD`.
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
    """Return the standard error of the difference of two means, and its degrees of freedom."""
    repeated = [variance_of(side, spread) for side in sides if len(side) > 1]
    known = repeated if len(repeated) == len(sides) else repeated * 2
    parts = [variance / len(side) for (variance, _), side in zip(known, sides, strict=True)]
    if spread is not None or len(repeated) == 1 or not sum(parts):
        return math.sqrt(sum(parts)), min(freedom for _, freedom in known)
    welch = sum(parts) ** 2 / sum(part**2 / freedom for part, (_, freedom) in zip(parts, known, strict=True))
    return math.sqrt(sum(parts)), welch


def variance_of(logs: Sequence[float], spread: float | None) -> tuple[float, float]:
    """Return the variance of the logarithms of two or more runs, and its degrees of freedom.

    A known `spread` adds one degree of freedom. It can increase the variance, but does not reduce it."""
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
    """Return `value`, the ratio of two runs, with an interval by the rule `steps` (see the module).

    The interval contains both `value` and the ratio of the medians with their uncertainty. It is wide if a few long
    steps make these two values differ. There is no interval with fewer than six steps per side.

    Args:
        value: Candidate over baseline.
        baseline: One positive value per steady step.
        candidate: The same for the other run.
        paired: Whether step i of both runs trained on the same tokens.
        spread: Standard deviation of the logarithm between repeated runs.
        comparisons: Number of comparisons that are shown together.
        sitting: Standard deviation of the logarithm of the ratio between sittings.
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
    """Return the standard deviation of the logarithm between repeated runs, or `TYPICAL_SPREAD` without repeats.

    It is the median over the groups, so that a single stalled run has little influence. Each deviation is divided by
    its expected median for the group's size (the median of χ² after Wilson and Hilferty, Proc. Natl. Acad. Sci. 17,
    1931).
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
        start_s: Additional seconds of the start, compared with the same number of steady steps.
        samples_per_s: Steady rate.
        samples_per_step: Samples per optimizer step.
    """

    start_s: float
    samples_per_s: float
    samples_per_step: float


@dataclass(frozen=True, slots=True)
class BreakEven:
    """When the candidate has trained more samples than the baseline. `when` is `at once` (from its first step),
    `never`, `after` (its step `steps`) or `until` (its step `steps`)."""

    when: str
    steps: float | None = None


def break_even(baseline: Pace, candidate: Pace) -> BreakEven:
    """Return when the candidate needs less time than the baseline for the same number of samples.

    The time of a run is its start plus samples / rate. A change of order in the candidate's first step is ignored."""
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

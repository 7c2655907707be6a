"""Two sides of a comparison: what differs, the ratio with its 95 % interval, and when a slow start has paid for itself.
Plain numbers in, plain records out; what the data cannot tell is None, never a guess. Whether both learn the same is
judged in `core/learning.py`.

An interval comes from the best evidence there is:

`runs`   several runs on a side, each a fresh process: a t interval of the difference of the mean logarithms, turned
         back into a ratio. The ratio is that of the geometric means. Where it is known how far like runs spread, that
         counts as one more run (a moderated variance: G. K. Smyth, Stat. Appl. Genet. Mol. Biol. 3, 2004), never makes
         a side steadier than it showed itself, and the side with fewer runs gives the degrees of freedom; where it is
         not known the interval is Welch's (B. L. Welch, Biometrika 34, 1947). Where only one side was repeated, the
         other is taken to spread alike (J. R. Crawford and D. C. Howell, The Clinical Neuropsychologist 12, 1998: one
         value against a sample), and the verdict is `likely` at most.
`steps`  one run a side. The order-statistic interval of each run's median step gives the standard error of its
         logarithm (R. M. Price and D. G. Bonett, J. Stat. Comput. Simul. 72, 2002: ratios of medians); where both ran
         the same tokens in the same order the steps are taken in pairs. A run that is started again differs by more
         than its steps do, so the spread between like runs is added as a floor, and the verdict is `likely` at most.

Where several comparisons are read together, each interval has the confidence 1 - 5 % / comparisons, so that all of them
hold at once with 95 % (Bonferroni's correction).
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ftbench.core.stats import CONFIDENCE, median_error, t_quantile

UNPROVEN = ("dataset.hash", "dataset.order_hash")  # a recipe is called the same only where both sides name these
# Standard deviation of the logarithm of a rate between runs of one spec on one GPU, where no runs at hand tell it: the
# middle of eight repeated specs on an H200 (results/h200/plain and results/h200/recipes).
TYPICAL_SPREAD = 0.0025
# How many runs that knowledge is worth, in degrees of freedom: specs are as unlike in how their runs spread (0.01 to
# 13 % on an H200) as variances of two runs each are by chance (tests/core/test_compare.py).
TYPICAL_FREEDOM = 1
_VAGUE = 4.0  # an interval whose ends are this far apart says hardly more than the direction


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
    def direction(self) -> str:
        """`higher` or `lower` where the interval excludes equality, else empty."""
        if self.low is None or self.high is None:
            return ""
        return "higher" if self.low > 1 else "lower" if self.high < 1 else ""

    @property
    def verdict(self) -> str:
        """`higher`, `lower`, `not distinguishable`, or `unknown` without an interval; where a side ran once, no more
        than `likely higher` or `likely lower`."""
        if self.low is None:
            return "unknown"
        likely = "likely " if min(self.runs) == 1 else ""
        return f"{likely}{self.direction}" if self.direction else "not distinguishable"

    @property
    def vague(self) -> bool:
        """Whether the interval is so wide that its ends say nothing worth reading."""
        return self.low is not None and self.high is not None and self.high > _VAGUE * self.low


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
    """Return what keeps two runs from being the same recipe, but for the facts that are `implied` by the thing
    compared: facts that both know and do not agree on, facts that one of them lacks, and, unknown on both sides, those
    without which nothing is proven (`UNPROVEN`). An empty list is an iso pair."""
    keys = dict.fromkeys([*baseline, *candidate, *UNPROVEN])
    every = ((key, baseline.get(key), candidate.get(key)) for key in keys)
    return [Difference(key, a, b) for key, a, b in every if (a != b or a is None) and not implied(key)]


def geometric_mean(values: Sequence[float]) -> float | None:
    """Return the geometric mean of positive values; None for none, or where one is not positive."""
    return math.exp(statistics.fmean(map(math.log, values))) if values and min(values) > 0 else None


def ratio_of_runs(
    baseline: Sequence[float], candidate: Sequence[float], *, spread: float | None = None, comparisons: int = 1
) -> Ratio | None:
    """Return the ratio of a positive figure, one value a run, with an interval by the rule `runs`, one of `comparisons`
    that are read together; `spread` is the standard deviation of the figure's logarithm between like runs, None where
    it is not known. Without an interval where neither side was repeated, None where a side has no value."""
    above, below = geometric_mean(candidate), geometric_mean(baseline)
    if above is None or below is None:
        return None
    value, counts = above / below, (len(baseline), len(candidate))
    if max(counts) < 2:
        return Ratio(value, runs=counts)
    error, freedom = _standard_error([[math.log(x) for x in side] for side in (baseline, candidate)], spread)
    half = t_quantile(_two_sided(comparisons), freedom) * error if error else 0.0
    half = min(half, 500.0)  # beyond it an interval has no end that a number could hold
    return Ratio(value, value * math.exp(-half), value * math.exp(half), "runs", counts)


def _two_sided(comparisons: int) -> float:
    """Return the probability below the upper end of an interval, one of so many that are to hold at once."""
    return 1 - (1 - CONFIDENCE) / comparisons / 2


def _standard_error(sides: Sequence[Sequence[float]], spread: float | None) -> tuple[float, float]:
    """Return the standard error of the difference of two means, with its degrees of freedom."""
    repeated = [variance_of(side, spread) for side in sides if len(side) > 1]
    known = repeated if len(repeated) == len(sides) else repeated * 2
    parts = [variance / len(side) for (variance, _), side in zip(known, sides, strict=True)]
    if spread is not None or len(repeated) == 1 or not sum(parts):
        return math.sqrt(sum(parts)), min(freedom for _, freedom in known)
    welch = sum(parts) ** 2 / sum(part**2 / freedom for part, (_, freedom) in zip(parts, known, strict=True))
    return math.sqrt(sum(parts)), welch


def variance_of(logs: Sequence[float], spread: float | None) -> tuple[float, float]:
    """Return the variance of two or more runs' logarithms and its degrees of freedom, with what is known of like runs
    as one run more, where that is more than they showed themselves."""
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
) -> Ratio:
    """Return `value`, the ratio of two runs' figures, with an interval by the rule `steps` from the positive figures of
    their steady steps, one of `comparisons` that are read together. `paired` says that step i of one ran the tokens of
    step i of the other; `spread` is the standard deviation of the figure's logarithm between like runs. The interval
    holds both `value` and the ratio of the medians, each with its uncertainty, and so grows where a few long steps pull
    the two apart. No interval with fewer than six steps a side."""
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
    error = math.hypot(*(each for each in errors if each is not None), math.sqrt(2) * spread)
    half = statistics.NormalDist().inv_cdf(_two_sided(comparisons)) * error
    ends = (math.log(value), middle)
    return Ratio(value, math.exp(min(ends) - half), math.exp(max(ends) + half), "steps")


def spread_between(groups: Iterable[Sequence[float]]) -> float:
    """Return the standard deviation of a positive figure's logarithm between like runs: the middle one of the groups
    that were repeated, each divided by what the median of such a deviation is for its size (the median of χ² after
    Wilson and Hilferty, Proc. Natl. Acad. Sci. 17, 1931), so that one stalled run does not speak for all;
    `TYPICAL_SPREAD` where none was repeated."""
    deviations = []
    for values in groups:
        if len(values) > 1 and min(values) > 0:
            expected = math.sqrt((1 - 2 / (9 * (len(values) - 1))) ** 3)
            deviations.append(statistics.stdev(map(math.log, values)) / expected)
    return statistics.median(deviations) if deviations else TYPICAL_SPREAD


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
    """Return where the times of both for the same samples cross: start + samples / rate on either side. A crossing
    within the candidate's first step is none that a run can show: nothing is trained before a step ends."""
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

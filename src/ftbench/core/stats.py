"""Statistics of step times and of sample lengths in tokens. With too few step times, functions return None."""

import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)
MINIMUM_STEADY = 5  # a run with fewer steady steps gets a warning
CONFIDENCE = 0.95
MAD_TO_SIGMA = 1.4826  # converts a median absolute deviation to the standard deviation of a normal distribution


def grouped_by(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Group items by `key(item)` and return {key: list of items}. Keys and items keep their order."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def total(values: Iterable[float | int | None]) -> float:
    """Return the sum of the values that are not None."""
    return sum(value for value in values if value is not None)


def warmup_steps(times: Sequence[float], recompiles: Sequence[int | None] = (), positions: Sequence[int] = ()) -> int:
    """Return the number of warm-up steps. `positions` are the computed tokens of each step.

    The second half of the run shows the steady speed: `median`, `deviation` (from the median absolute deviation) and
    `p90` of its step times. Warm-up ends before the first later step that takes at most
    `median + max(0.1 * median, 3 * deviation)`. Warm-up includes every step of the first half that compiled a graph, or
    took more than `2 * p90` and twice the time of as many tokens in the second half. At most half is warm-up.
    """
    n = len(times)
    if n < 2:
        return n
    half = n // 2
    tail, lengths = times[half:], positions[half:]
    middle = statistics.median(tail)
    spread = MAD_TO_SIGMA * statistics.median(abs(t - middle) for t in tail)
    limit = middle + max(0.10 * middle, 3 * spread)
    warm = next((step for step in range(1, half) if times[step] <= limit), half)
    far = [2 * quantile(tail, 0.90)] * half
    slope, start = statistics.linear_regression(lengths, tail) if len(set(lengths)) > 1 else (0.0, 0.0)
    if slope > 0:
        far = [max(far[0], 2 * (start + slope * length)) for length in positions[:half]]
    starts = [i + 1 for i in range(half) if times[i] > far[i] or (i < len(recompiles) and recompiles[i])]
    return max([warm, *starts])


def step_time(times: Sequence[float]) -> dict[str, Any]:
    """Return a dict with `median, mean, p10, p90, cv, ci95` of step times in seconds. `cv` is standard deviation /
    mean. `ci95` is the 95 % confidence interval of the median."""
    mean = statistics.fmean(times)
    return {
        "median": statistics.median(times), "mean": mean, "p10": quantile(times, 0.10), "p90": quantile(times, 0.90),
        "cv": statistics.stdev(times) / mean if len(times) > 1 and mean > 0 else None, "ci95": median_interval(times),
    }  # fmt: skip


def quantile(values: Sequence[float], q: float) -> float:
    """Return the q-quantile (0 ≤ q ≤ 1) by linear interpolation between sorted values."""
    ordered = sorted(values)
    rank = q * (len(ordered) - 1)
    low = math.floor(rank)
    high = math.ceil(rank)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """Return a confidence interval of the median that does not assume a distribution.

    The interval is (k-th smallest value, k-th largest value), with the largest k that reaches the coverage `confidence`
    (Conover, Practical Nonparametric Statistics, ch. 3). Return None for fewer than six values at 95 %.
    """
    ordered, (k, _) = sorted(values), _order_statistic(len(values), confidence)
    return (ordered[k - 1], ordered[-k]) if k else None


@lru_cache(maxsize=256)
def _order_statistic(n: int, confidence: float) -> tuple[int, float]:
    """Return k and the coverage of the interval from the k-th smallest to the k-th largest of n values. k is the
    largest number that reaches the coverage `confidence`, or 0 if n is too small."""
    if n > 1000:  # normal approximation of the binomial: k may be smaller by 1
        k = math.floor(n / 2 - statistics.NormalDist().inv_cdf((1 + confidence) / 2) * math.sqrt(n) / 2)
        return k, confidence
    tail, k = 0.0, 0
    while k < n // 2 and 1 - 2 * (tail + math.comb(n, k) / 2**n) >= confidence:
        tail += math.comb(n, k) / 2**n
        k += 1
    return k, 1 - 2 * tail


def drift(times: Sequence[float]) -> float | None:
    """Return `median(last third) / median(first third) - 1` of step times: +0.05 means 5 % slower."""
    third = len(times) // 3
    return None if third < 5 else statistics.median(times[-third:]) / statistics.median(times[:third]) - 1


def differs(times: Sequence[float]) -> bool:
    """Return whether the first and the last third of step times differ beyond noise (Mann-Whitney test at 5 %)."""
    first = sorted(times[: (third := len(times) // 3)])
    wins = sum(bisect_left(first, time) + bisect_right(first, time) - third for time in times[-third:])
    return abs(wins) > statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * third * math.sqrt((2 * third + 1) / 3)


def median_error(values: Sequence[float]) -> float | None:
    """Return the standard error of a median. Return None for fewer than six values.

    The error is `width / (2 * z)`: the width of the median's confidence interval and the normal quantile z of its
    coverage (Price and Bonett, 2002).
    """
    interval = median_interval(values, CONFIDENCE)
    if interval is None:
        return None
    _, coverage = _order_statistic(len(values), CONFIDENCE)
    return (interval[1] - interval[0]) / 2 / statistics.NormalDist().inv_cdf((1 + coverage) / 2)


# Points and weights of an integral over (-1, 1): the tanh-sinh rule (H. Takahasi and M. Mori, Publ. RIMS 9, 1974).
_TANH_SINH = tuple(
    (math.tanh(angle), 0.1 * math.pi / 2 * math.cosh(i / 10) / math.cosh(angle) ** 2)
    for i in range(-32, 33)
    for angle in (math.pi / 2 * math.sinh(i / 10),)
)


@lru_cache(maxsize=256)
def t_quantile(p: float, freedom: float) -> float:
    """Return the p-quantile (0.5 < p < 1) of Student's t distribution with `freedom` degrees of freedom. Use bisection
    and numerical integration with t = √freedom * tan(angle), because importing numpy takes 0.15 s."""
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)

    def below(t: float) -> float:
        half = math.atan(t / math.sqrt(freedom)) / 2
        return 0.5 + scale * half * sum(w * math.pow(math.cos(half * (1 + x)), freedom - 1) for x, w in _TANH_SINH)

    low, high = 0.0, 1.0
    while below(high) < p:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < p else (low, middle)
    return (low + high) / 2


def equivalence(differences: Sequence[float]) -> tuple[float, float]:
    """Return the 90 % interval (low, high) of the mean of paired differences. Two trainings are equivalent if this
    interval is within the margin: two one-sided tests at 5 % (D. J. Schuirmann, J. Pharmacokinet. Biopharm. 15, 1987).
    For a single difference, low and high equal the difference."""
    mean, count = statistics.fmean(differences), len(differences)
    if count < 2:
        return mean, mean
    half = t_quantile(0.95, count - 1) * statistics.stdev(differences) / math.sqrt(count)
    return mean - half, mean + half


# --- token lengths ---------------------------------------------------------------------------------------------------

HISTOGRAM_BINS = 20


def describe(lengths: Sequence[int]) -> dict[str, Any]:
    """Return a dict with `count, total, mean, weighted_mean, p50, p90, p99, max, histogram` of lengths in tokens.

    `weighted_mean` is sum(length**2) / sum(length). The FLOPs of attention depend on `weighted_mean`.
    """
    total = sum(lengths)
    return {
        "count": len(lengths), "total": total, "mean": total / len(lengths),
        "weighted_mean": sum(n * n for n in lengths) / total if total else 0.0,
        **{f"p{percent}": quantile(lengths, percent / 100) for percent in (50, 90, 99)},
        "max": max(lengths), "histogram": histogram(lengths),
    }  # fmt: skip


def histogram(lengths: Sequence[int]) -> dict[str, list[int]]:
    """Return edges and counts of HISTOGRAM_BINS equal bins. Bin i counts the lengths n with edges[i] <= n <
    edges[i+1]."""
    width = max(1, -(-(max(lengths) + 1) // HISTOGRAM_BINS))
    counts = [0] * HISTOGRAM_BINS
    for n in lengths:
        counts[n // width] += 1
    return {"edges": [i * width for i in range(HISTOGRAM_BINS + 1)], "counts": counts}


def padding_efficiency(lengths: Sequence[int], batch_size: int) -> float:
    """Return real tokens / computed positions. Each batch of consecutive samples is padded to its longest sample."""
    batches = (lengths[start : start + batch_size] for start in range(0, len(lengths), batch_size))
    return sum(lengths) / sum(max(batch) * len(batch) for batch in batches)

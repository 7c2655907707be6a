"""Statistics of step times (warm-up, medians, intervals; too little data gives None) and of token lengths."""

import heapq
import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)
MINIMUM_STEADY = 5  # a run with fewer steady steps gets a warning
CONFIDENCE = 0.95
MAD_TO_SIGMA = 1.4826  # converts a median absolute deviation to the standard deviation of a normal distribution


def grouped_by(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Return the items of each key: {key: items}. Keys and items keep their order."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def total(values: Iterable[float | int | None]) -> float:
    """Return the sum of the values that are known (not None)."""
    return sum(value for value in values if value is not None)


def warmup_steps(times: Sequence[float], recompiles: Sequence[int | None] = ()) -> int:
    """Return the number of warm-up steps.

    The second half of the run defines a steady step: median m, standard deviation d (from the median absolute
    deviation) and 90th percentile p of the step times. Warm-up contains the first step, and the steps after it until
    one takes at most m + max(0.1 m, 3 d). A new shape can cause more compilation and tuning later. If a step of the
    first half took more than 2 p or compiled a graph, warm-up therefore ends after the last such step. At most half of
    the steps are warm-up, so a run that slows down later keeps its slow steps.
    """
    n = len(times)
    if n < 2:
        return n
    half = n // 2
    tail = times[half:]
    middle = statistics.median(tail)
    spread = MAD_TO_SIGMA * statistics.median(abs(t - middle) for t in tail)
    limit = middle + max(0.10 * middle, 3 * spread)
    far = 2 * quantile(tail, 0.90)
    warm = 1
    while warm < half and times[warm] > limit:
        warm += 1
    starts = [i + 1 for i in range(half) if times[i] > far or (i < len(recompiles) and recompiles[i])]
    return max([warm, *starts])


def step_time(times: Sequence[float]) -> dict[str, Any] | None:
    """Return `median, mean, p10, p90, cv, ci95` of the steady steps in seconds; None for an empty window. `cv` is the
    standard deviation over the mean, `ci95` the 95 % confidence interval of the median."""
    if not times:
        return None
    mean = statistics.fmean(times)
    return {
        "median": statistics.median(times), "mean": mean, "p10": quantile(times, 0.10), "p90": quantile(times, 0.90),
        "cv": statistics.stdev(times) / mean if len(times) > 1 and mean > 0 else None, "ci95": median_interval(times),
    }  # fmt: skip


def quantile(values: Sequence[float], q: float) -> float:
    """Return the q-quantile (0 ≤ q ≤ 1) by linear interpolation between order statistics."""
    ordered = sorted(values)
    rank = q * (len(ordered) - 1)
    low = math.floor(rank)
    high = math.ceil(rank)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """Return a distribution-free confidence interval of the median.

    It consists of the k-th smallest and the k-th largest value, for the largest k that covers `confidence` (Conover,
    Practical Nonparametric Statistics, ch. 3). Return None if there are too few values (fewer than six for 95 %).
    """
    ordered, (k, _) = sorted(values), _order_statistic(len(values), confidence)
    return (ordered[k - 1], ordered[-k]) if k else None


@lru_cache(maxsize=256)
def _order_statistic(n: int, confidence: float) -> tuple[int, float]:
    """Return the largest k such that the k-th smallest and largest of n values cover `confidence`, and their
    coverage; k is 0 if the extremes do not cover it."""
    if n > 1000:  # normal approximation of the binomial
        k = math.floor(n / 2 - statistics.NormalDist().inv_cdf((1 + confidence) / 2) * math.sqrt(n) / 2)
        return k, confidence
    tail, k = 0.0, 0
    while k < n // 2 and 1 - 2 * (tail + math.comb(n, k) / 2**n) >= confidence:
        tail += math.comb(n, k) / 2**n
        k += 1
    return k, 1 - 2 * tail


def drift(times: Sequence[float]) -> float | None:
    """Return the median of the last third divided by that of the first third, minus 1 (+0.05: 5 % slower)."""
    third = len(times) // 3
    if third < 5:
        return None
    return statistics.median(times[-third:]) / statistics.median(times[:third]) - 1


def median_error(values: Sequence[float]) -> float | None:
    """Return the standard error of a median, None with fewer than six values.

    It is the width of the order-statistic interval, divided by twice the normal quantile of its coverage (Price and
    Bonett, 2002).
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
    """Return the p-quantile (0.5 < p < 1) of Student's t by bisection of its distribution function, integrated over the
    angle in t = √freedom tan(angle). numpy would take 0.15 s to import."""
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
    """Return the 90 % interval of the mean of paired differences. Two one-sided tests at 5 % judge two trainings as
    equivalent if this interval is within the margin (D. J. Schuirmann, J. Pharmacokinet. Biopharm. 15, 1987). One
    difference has no spread: the interval is the value itself."""
    mean, count = statistics.fmean(differences), len(differences)
    if count < 2:
        return mean, mean
    half = t_quantile(0.95, count - 1) * statistics.stdev(differences) / math.sqrt(count)
    return mean - half, mean + half


# --- token lengths ---------------------------------------------------------------------------------------------------

HISTOGRAM_BINS = 20


def describe(lengths: Sequence[int]) -> dict[str, Any]:
    """Return `count, total, mean, weighted_mean, p50, p90, p99, max, histogram` of lengths in tokens.

    `weighted_mean` is the mean over tokens (sum of squares over sum). The attention term of the FLOP count needs it.
    """
    if not lengths:
        raise ValueError("no lengths to describe")
    total = sum(lengths)
    return {
        "count": len(lengths),
        "total": total,
        "mean": total / len(lengths),
        "weighted_mean": sum(n * n for n in lengths) / total if total else 0.0,
        "p50": quantile(lengths, 0.50),
        "p90": quantile(lengths, 0.90),
        "p99": quantile(lengths, 0.99),
        "max": max(lengths),
        "histogram": histogram(lengths),
    }


def histogram(lengths: Sequence[int]) -> dict[str, list[int]]:
    """Return HISTOGRAM_BINS bins of equal integer width. Bin i counts the lengths n with edges[i] <= n < edges[i+1]."""
    width = max(1, -(-(max(lengths) + 1) // HISTOGRAM_BINS))
    counts = [0] * HISTOGRAM_BINS
    for n in lengths:
        counts[n // width] += 1
    return {"edges": [i * width for i in range(HISTOGRAM_BINS + 1)], "counts": counts}


def padding_efficiency(lengths: Sequence[int], batch_size: int) -> float:
    """Return the share of real tokens if consecutive samples form batches that are padded to their longest sample."""
    computed = sum(
        max(batch) * len(batch)
        for start in range(0, len(lengths), batch_size)
        if (batch := lengths[start : start + batch_size])
    )
    return sum(lengths) / computed


def packing_efficiency(lengths: Sequence[int], max_length: int) -> float:
    """Return real tokens over positions if samples are packed into rows of `max_length` by worst-fit decreasing, a
    lower bound for real packers."""
    rows: list[int] = []  # negative free space of each row, since heapq is a min-heap
    for n in sorted(lengths, reverse=True):
        if rows and -rows[0] >= n:
            heapq.heapreplace(rows, rows[0] + n)
        else:
            heapq.heappush(rows, -(max_length - n))
    return sum(lengths) / (len(rows) * max_length)

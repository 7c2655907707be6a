"""Statistics of the token lengths of a data set, padding efficiency and packing efficiency."""

import heapq
from collections.abc import Sequence
from typing import Any

from ftbench.core.stats import quantile

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
    """Return HISTOGRAM_BINS bins of equal integer width; bin i counts edges[i] <= n < edges[i+1]."""
    width = max(1, -(-(max(lengths) + 1) // HISTOGRAM_BINS))
    counts = [0] * HISTOGRAM_BINS
    for n in lengths:
        counts[n // width] += 1
    return {"edges": [i * width for i in range(HISTOGRAM_BINS + 1)], "counts": counts}


def padding_efficiency(lengths: Sequence[int], batch_size: int) -> float:
    """Return real tokens over positions if consecutive samples form batches padded to their longest sample."""
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

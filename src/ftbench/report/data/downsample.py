"""Fewer points of a curve, honestly: every point that is shown was measured, and no extreme is lost."""

from __future__ import annotations

import math
from collections.abc import Sequence

FEWEST = 8


def downsample(values: Sequence[float], points: int) -> list[int]:
    """Return the places of at most `points` of the values, in rising order; all of them where there are no more.

    The curve is cut into equal buckets, and each keeps its minimum, its maximum and, where there is one, its first gap
    (a value that is not finite), so that a gap stays one. The first and the last value are always kept, and with each
    bucket's extremes those of the whole. Raises ValueError below FEWEST points.
    """
    if points < FEWEST:
        raise ValueError(f"a curve needs {FEWEST} points, not {points}")
    n = len(values)
    if n <= points:
        return list(range(n))
    whole = all(map(math.isfinite, values))
    buckets = (points - 2) // (2 if whole else 3)
    kept = {0, n - 1}
    for number in range(buckets):
        start, end = n * number // buckets, n * (number + 1) // buckets
        part = values[start:end]
        if not whole:
            gap = next((i for i, value in enumerate(part) if not math.isfinite(value)), None)
            if gap is not None:
                kept.add(start + gap)
            known: Sequence[float] = [value for value in part if math.isfinite(value)]
            if not known:
                continue
        else:
            known = part
        kept.add(start + part.index(min(known)))
        kept.add(start + part.index(max(known)))
    return sorted(kept)

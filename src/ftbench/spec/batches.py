"""The lengths of synthetic samples, the order they are trained in, and what shares a row: lengths in tokens, no ids.

The worker makes its batches so, and an estimate counts them so.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ftbench.spec.datasets import DATASETS, Dataset

if TYPE_CHECKING:  # imported where it is used: most commands begin without it
    import numpy as np

SHORTEST = 2
DEFAULT_SIGMA = 0.65  # spread of the log of the lengths of instruction data
WINDOW = 50  # batches among which samples of like length are brought together (transformers' LengthGroupedSampler)


def synthetic_lengths(dataset: Dataset, count: int) -> list[int]:
    """Fixed, or log-normal with the mean asked for after cutting at `max_length`."""
    if dataset.length is not None:
        return [dataset.length] * count
    import numpy as np

    source = DATASETS[dataset.like] if dataset.like else None
    mean = dataset.mean_length if source is None else source.mean_tokens
    sigma = (source.sigma if source else None) or DEFAULT_SIGMA
    assert mean is not None
    normal = np.random.default_rng(dataset.seed + 1).standard_normal(count)
    low, high = math.log(SHORTEST), math.log(dataset.max_length) + 4 * sigma
    for _ in range(60):  # the mean of the cut lengths grows with the mean of their logs
        middle = (low + high) / 2
        if _cut(normal, middle, sigma, dataset.max_length).mean() < mean:
            low = middle
        else:
            high = middle
    return [int(n) for n in _cut(normal, high, sigma, dataset.max_length)]


def _cut(normal: np.ndarray, mu: float, sigma: float, longest: int) -> np.ndarray:
    import numpy as np

    return np.clip(np.rint(np.exp(mu + sigma * normal)), SHORTEST, longest)


def packed(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """The places of the samples of each row of at most `max_length` tokens, rows in the order of their first sample:
    each sample goes into the row with the least room that still takes it (best fit, longest first)."""
    room: list[tuple[int, int]] = []  # what is left in each row, and which row; ascending
    found: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        at = bisect.bisect_left(room, (lengths[place], 0))
        if at < len(room):
            left, row = room.pop(at)
            found[row].append(place)
        else:
            left, row = max_length, len(found)
            found.append([place])
        bisect.insort(room, (left - lengths[place], row))
    return [sorted(row) for row in sorted(found, key=min)]


def grouped(lengths: Sequence[int], batch_size: int, seed: int) -> list[int]:
    """The places in an order in which batches hold samples of like length: windows of fifty batches are sorted by
    length, cut into batches, and the batches shuffled, so that length does not follow the step."""
    import numpy as np

    random = np.random.default_rng(seed)
    result: list[int] = []
    for start in range(0, len(lengths), WINDOW * batch_size):
        places = range(start, min(start + WINDOW * batch_size, len(lengths)))
        window = sorted(places, key=lambda place: -lengths[place])
        batches = [window[at : at + batch_size] for at in range(0, len(window), batch_size)]
        full = [batch for batch in batches if len(batch) == batch_size]
        order = random.permutation(len(full)).tolist()
        result += [place for at in order for place in full[at]]
        result += [place for batch in batches if len(batch) < batch_size for place in batch]
    return result

"""Compute the lengths of synthetic samples, the sizes of generated images, the sample order, and packing.

The worker builds batches with these functions, and the estimator predicts the same batches. Lengths are in tokens.
"""

import bisect
import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from ftbench.spec.datasets import DATASETS, Dataset

SHORTEST = 2
DEFAULT_SIGMA = 0.65  # standard deviation of log(length) in instruction data
CAPTION = 40.0  # default mean text length of generated images
# Aspect ratios of photographs (cameras 4:3 and 3:2, wide 16:9) and of scanned pages (A4, letter).
_SHAPES = {
    "photographs": ((4, 3), (3, 4), (3, 2), (2, 3), (16, 9), (9, 16)),
    "documents": ((210, 297), (17, 22), (297, 210)),
}
_SPREAD = {"photographs": 0.4, "documents": 0.2}  # standard deviation of log(area)
WINDOW = 50  # batches per window; samples are sorted by length in each window (transformers' LengthGroupedSampler)


def synthetic_lengths(dataset: Dataset, count: int) -> list[int]:
    """Return `count` sample lengths, at most `max_length`: all equal, or log-normal with the requested mean."""
    if dataset.length is not None:
        return [dataset.length] * count
    source = DATASETS[dataset.like] if dataset.like else None
    mean = (dataset.mean_length or CAPTION) if source is None else source.mean_tokens
    sigma = (source.sigma if source else None) or DEFAULT_SIGMA
    assert mean is not None
    normal = np.random.default_rng(dataset.seed + 1).standard_normal(count)
    spread = [math.exp(sigma * value) for value in normal.tolist()]
    scale = _scale(np.asarray(spread), mean, sigma, dataset.max_length)
    return [min(dataset.max_length, max(SHORTEST, int(scale * value + 0.5))) for value in spread]


def _scale(spread: npt.NDArray[np.float64], mean: float, sigma: float, longest: int) -> float:
    """Return the factor for which the lengths `factor * spread`, truncated to `longest` tokens, have this mean."""
    low, high = math.log(SHORTEST), math.log(longest) + 4 * sigma
    below, above = 0.0, math.inf
    for _ in range(60):  # bisection: the mean grows with the factor
        middle = (low + high) / 2
        total = float(np.clip(np.floor(math.exp(middle) * spread + 0.5), SHORTEST, longest).sum())
        if total / len(spread) < mean:
            low, below = middle, total
        else:
            high, above = middle, total
        if above - below <= 1:  # the two bounds differ by one token at most
            break
    return math.exp(high)


def picture_sizes(dataset: Dataset, number: int) -> list[tuple[int, int]]:
    """Return (width, height) in pixels of each generated image: one fixed size for all images, or random sizes."""
    assert dataset.image_size is not None
    if dataset.image_sizes == "fixed":
        return [dataset.image_size] * number
    shapes, spread = _SHAPES[dataset.image_sizes], _SPREAD[dataset.image_sizes]
    choices = np.random.default_rng(dataset.seed).integers(0, len(shapes), number).tolist()
    middle = math.prod(dataset.image_size)
    normal = np.random.default_rng(dataset.seed).standard_normal(number)
    areas = [middle * np.exp(spread * value) for value in normal.tolist()]
    return [
        (max(8, round((area * wide / high) ** 0.5)), max(8, round((area * high / wide) ** 0.5)))
        for area, (wide, high) in zip(areas, (shapes[choice] for choice in choices), strict=True)
    ]


def packed(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Pack samples into rows of at most `max_length` tokens (best fit, longest first).

    Returns:
        The sample indices of each row. Rows are sorted by their smallest index.
    """
    room: list[tuple[int, int]] = []  # (free tokens, index) of each row, ascending
    rows: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        at = bisect.bisect_left(room, (lengths[index], 0))
        if at < len(room):
            left, row = room.pop(at)
            rows[row].append(index)
        else:
            left, row = max_length, len(rows)
            rows.append([index])
        bisect.insort(room, (left - lengths[index], row))
    return [sorted(row) for row in sorted(rows, key=min)]


def length_windows(lengths: Sequence[int], batch_size: int) -> Iterator[list[list[int]]]:
    """Sort samples by length in windows of 50 batches. Yield the batches of each window as lists of sample indices."""
    for start in range(0, len(lengths), WINDOW * batch_size):
        places = range(start, min(start + WINDOW * batch_size, len(lengths)))
        window = sorted(places, key=lengths.__getitem__, reverse=True)
        yield [window[at : at + batch_size] for at in range(0, len(window), batch_size)]


def grouped(lengths: Sequence[int], batch_size: int, seed: int) -> list[int]:
    """Return the sample indices in a new order: the samples of each batch have similar lengths.

    The full batches of each window of 50 batches are shuffled. An incomplete batch comes last in its window.
    """
    random = np.random.default_rng(seed)
    result: list[int] = []
    for batches in length_windows(lengths, batch_size):
        full = [batch for batch in batches if len(batch) == batch_size]
        order = random.permutation(len(full)).tolist()
        result += [index for at in order for index in full[at]]
        result += [index for batch in batches if len(batch) < batch_size for index in batch]
    return result

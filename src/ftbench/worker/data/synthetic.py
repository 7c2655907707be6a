"""Random tokens of chosen lengths: deterministic, no tokenizer, no download."""

from __future__ import annotations

import math

import numpy as np

from ftbench.spec.datasets import DATASETS, Dataset
from ftbench.worker.data.tokens import Tokens

SHORTEST = 2
DEFAULT_SIGMA = 0.65  # spread of the log of the lengths of instruction data


def draw(dataset: Dataset, count: int, vocab_size: int) -> list[Tokens]:
    """`count` samples of uniform random ids below `vocab_size`, every token a label."""
    generator = np.random.default_rng(dataset.seed)
    samples = []
    for length in lengths(dataset, count):
        ids = generator.integers(0, vocab_size, size=length).tolist()
        samples.append(Tokens(ids, list(ids), length))
    return samples


def lengths(dataset: Dataset, count: int) -> list[int]:
    """Fixed, or log-normal with the mean asked for after cutting at `max_length`."""
    if dataset.length is not None:
        return [dataset.length] * count
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
    return np.clip(np.rint(np.exp(mu + sigma * normal)), SHORTEST, longest)

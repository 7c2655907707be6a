"""Random tokens of chosen lengths: deterministic, no tokenizer, no download."""

from __future__ import annotations

import numpy as np

from ftbench.spec.batches import synthetic_lengths
from ftbench.spec.datasets import Dataset
from ftbench.worker.data.tokens import Tokens


def draw(dataset: Dataset, count: int, vocab_size: int) -> list[Tokens]:
    """`count` samples of uniform random ids below `vocab_size`, every token a label."""
    generator = np.random.default_rng(dataset.seed)
    samples = []
    for length in synthetic_lengths(dataset, count):
        ids = generator.integers(0, vocab_size, size=length).tolist()
        samples.append(Tokens(ids, list(ids), length))
    return samples

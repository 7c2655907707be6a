"""The largest batch of a spec's data set, before the data is read: exact for synthetic data, a bound for real data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

from ftbench.core.draws import standard_normal
from ftbench.core.memory.recipe import Batch
from ftbench.spec.datasets import DATASETS, Dataset
from ftbench.spec.experiment import Experiment

SHORTEST, SIGMA = 2, 0.65  # worker/data/synthetic.py
DRAWN = 20_000  # samples whose lengths are drawn one by one; of more the longest is taken from the distribution


@dataclass(frozen=True, slots=True)
class Largest:
    """The batch that is expected to be the largest, and the largest that can be. `padded` says that it holds padding,
    or several samples in a row; `basis` where the lengths come from."""

    expected: Batch
    most: Batch
    padded: bool
    basis: str


def largest(spec: Experiment) -> Largest:
    """The batch with the most positions among those that the spec trains on."""
    lengths, basis = sample_lengths(spec.dataset)
    flat = spec.optimizations.packing or spec.optimizations.padding_free
    if spec.optimizations.packing:
        found = _packed(spec, lengths)
    elif lengths is None:
        found = _unknown(spec)
    else:
        tried = _trained(spec, lengths)
        found = max((_shape(spec, batch, max(lengths)) for batch in tried), key=lambda batch: batch.tokens)
    most = found
    if lengths is None:
        rows, longest = spec.train.batch_size, spec.dataset.max_length
        most = Batch(1, rows * longest, rows * longest - rows) if flat else Batch(rows, longest, rows * (longest - 1))
    even = lengths is not None and min(lengths) == max(lengths)
    alone = found.rows == 1 and not flat and not spec.optimizations.fixed_shape
    return Largest(found, most, not (even and not flat) and not alone, basis)


def sample_lengths(dataset: Dataset) -> tuple[list[int] | None, str]:
    """The lengths of all samples in tokens where they are known, and in words what is known."""
    if dataset.name != "synthetic":
        return None, f"no sample is longer than max_length {dataset.max_length:,}"
    count = (dataset.samples or 0) + dataset.eval_samples
    if dataset.length is not None:
        return [dataset.length] * min(count, DRAWN), f"every sample has {dataset.length:,} tokens"
    if count > DRAWN:
        return None, f"lengths drawn, at most max_length {dataset.max_length:,}"
    source = DATASETS[dataset.like] if dataset.like else None
    mean = source.mean_tokens if source else dataset.mean_length
    sigma = (source.sigma if source else None) or SIGMA
    assert mean is not None
    found = drawn(dataset.seed, count, mean, sigma, dataset.max_length)
    return found[: dataset.samples], f"synthetic lengths, the longest {max(found):,}"


@cache
def _normals(seed: int, count: int) -> list[float]:
    return standard_normal(seed, count)


@cache
def drawn(seed: int, count: int, mean: float, sigma: float, longest: int) -> list[int]:
    """The lengths that worker/data/synthetic.py draws: log-normal, cut at `longest`, with this mean after the cut."""
    normal = _normals(seed + 1, count)
    low, high = math.log(SHORTEST), math.log(longest) + 4 * sigma
    while high - low > 1e-9:
        middle = (low + high) / 2
        if sum(_cut(value, middle, sigma, longest) for value in normal) / count < mean:
            low = middle
        else:
            high = middle
    return [_cut(value, high, sigma, longest) for value in normal]


def _cut(normal: float, mu: float, sigma: float, longest: int) -> int:
    return min(max(round(math.exp(mu + sigma * normal)), SHORTEST), longest)


def _trained(spec: Experiment, lengths: Sequence[int]) -> list[Sequence[int]]:
    """The batches that are trained on, as lengths; of samples ordered by length, those with the longest."""
    size = spec.train.batch_size
    if spec.dataset.longest_first or spec.optimizations.length_grouping:
        return [sorted(lengths, reverse=True)[:size]]
    steps = spec.train.max_steps
    seen = len(lengths) if steps is None else min(len(lengths), steps * size * spec.train.gradient_accumulation_steps)
    return [lengths[at : at + size] for at in range(0, seen, size)]


def _shape(spec: Experiment, batch: Sequence[int], longest: int) -> Batch:
    labels = sum(batch) - len(batch)
    if spec.optimizations.padding_free:
        return Batch(1, sum(batch), labels)
    return Batch(len(batch), longest if spec.optimizations.fixed_shape else max(batch), labels)


def _packed(spec: Experiment, lengths: Sequence[int] | None) -> Batch:
    """Rows filled to max_length, laid end to end; fewer where the data set is too small to fill them."""
    room = spec.train.batch_size * spec.dataset.max_length
    tokens = min(room, sum(lengths)) if lengths else room
    return Batch(1, tokens, tokens - spec.train.batch_size)


def _unknown(spec: Experiment) -> Batch:
    """Real data: the longest sample of a batch is as long as the longest of the data set is expected to be, from the
    mean that facts know of it, else max_length."""
    dataset, size = spec.dataset, spec.train.batch_size
    source = DATASETS[dataset.like or dataset.name]
    longest, mean = dataset.max_length, float(dataset.max_length)
    known = source.mean_tokens or dataset.mean_length
    if known:
        longest = expected_longest(known, source.sigma or SIGMA, dataset.samples or 10_000, longest)
        mean = min(known, longest)
    if spec.optimizations.padding_free:
        tokens = round(longest + (size - 1) * mean)
        return Batch(1, tokens, tokens - size)
    return Batch(size, longest, round(size * mean) - size)


def expected_longest(mean: float, sigma: float, count: int, longest: int) -> int:
    """The median of the longest of `count` log-normal lengths with this mean (before the cut at `longest`)."""
    quantile = NormalDist().inv_cdf(0.5 ** (1 / max(count, 1)))
    return max(SHORTEST, min(longest, round(math.exp(math.log(mean) - sigma * sigma / 2 + sigma * quantile))))

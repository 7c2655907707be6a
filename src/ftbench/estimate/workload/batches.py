"""The largest batch of a spec's data set, before the data is read: exact for synthetic data, a bound for real data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

from ftbench.spec.batches import DEFAULT_SIGMA, SHORTEST, synthetic_lengths
from ftbench.spec.datasets import DATASETS, Dataset
from ftbench.spec.experiment import Experiment

DRAWN = 20_000  # samples whose lengths are drawn one by one; of more the longest is taken from the distribution


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The largest batch as the model sees it: `rows` of `length` positions, of which `labels` carry loss."""

    rows: int
    length: int
    labels: int

    @property
    def tokens(self) -> int:
        return self.rows * self.length


@dataclass(frozen=True, slots=True)
class Largest:
    """The batch that is expected to be the largest, and the largest that can be. `padded` says that it holds padding,
    or several samples in a row, `whole` that each has max_length tokens; `basis` where the lengths come from."""

    expected: BatchShape
    most: BatchShape
    padded: bool
    whole: bool
    basis: str


@dataclass(frozen=True, slots=True)
class _BatchLayout:
    """What a spec says of how samples become batches of `size`. Of data in order of length the longest come first;
    `seen` are the samples that a limit on steps leaves."""

    size: int
    seen: int | None
    packing: bool
    padding_free: bool
    fixed: bool
    ordered: bool

    @property
    def flat(self) -> bool:
        return self.packing or self.padding_free


def largest(spec: Experiment) -> Largest:
    """Return the batch with the most positions among those that the spec trains on."""
    on, train = spec.optimizations, spec.train
    steps, passes = train.max_steps, train.gradient_accumulation_steps
    seen = None if steps is None else steps * train.batch_size * passes
    ordered = spec.dataset.longest_first or on.length_grouping
    return _largest(
        spec.dataset, _BatchLayout(train.batch_size, seen, on.packing, on.padding_free, on.fixed_shape, ordered)
    )


@lru_cache(maxsize=1024)
def _largest(dataset: Dataset, layout: _BatchLayout) -> Largest:
    lengths, basis = sample_lengths(dataset)
    flat = layout.flat
    if layout.packing:
        expected = _packed(dataset, layout, lengths)
    elif lengths is None:
        expected = _unknown(dataset, layout)
    else:
        longest = max(lengths)
        in_order = _longest_first(dataset) if layout.ordered else lengths
        tried = (_shape(layout, batch, longest) for batch in _trained(layout, in_order))
        expected = max(tried, key=lambda batch: batch.tokens)
    most = expected
    if lengths is None:
        rows, longest = layout.size, dataset.max_length
        most = BatchShape(1 if flat else rows, rows * longest if flat else longest, rows * (longest - 1))
    even = lengths is not None and min(lengths) == max(lengths)
    alone = expected.rows == 1 and not flat and not layout.fixed
    whole = lengths is not None and min(lengths) == dataset.max_length
    return Largest(expected, most, not (even and not flat) and not alone, whole, basis)


def sample_lengths(dataset: Dataset) -> tuple[list[int] | None, str]:
    """Return the lengths of all samples in tokens where they are known, and in words what is known."""
    if dataset.name != "synthetic":
        return None, f"no sample is longer than max_length {dataset.max_length:,}"
    count = (dataset.samples or 0) + dataset.eval_samples
    if dataset.length is not None:
        return [dataset.length] * min(count, DRAWN), f"every sample has {dataset.length:,} tokens"
    if count > DRAWN:
        return None, f"lengths drawn, at most max_length {dataset.max_length:,}"
    lengths = _drawn(dataset, count)
    return lengths[: dataset.samples], f"synthetic lengths, the longest {max(lengths):,}"


@lru_cache(maxsize=32)
def _drawn(dataset: Dataset, count: int) -> list[int]:
    return synthetic_lengths(dataset, count)


@lru_cache(maxsize=32)
def _longest_first(dataset: Dataset) -> list[int]:
    return sorted(sample_lengths(dataset)[0] or (), reverse=True)


def _trained(layout: _BatchLayout, lengths: Sequence[int]) -> list[Sequence[int]]:
    """Return the batches that are trained on, as lengths; of samples ordered by length, the first."""
    if layout.ordered:
        return [lengths[: layout.size]]
    seen = len(lengths) if layout.seen is None else min(len(lengths), layout.seen)
    return [lengths[at : at + layout.size] for at in range(0, seen, layout.size)]


def _shape(layout: _BatchLayout, batch: Sequence[int], longest: int) -> BatchShape:
    labels = sum(batch) - len(batch)
    if layout.padding_free:
        return BatchShape(1, sum(batch), labels)
    return BatchShape(len(batch), longest if layout.fixed else max(batch), labels)


def _packed(dataset: Dataset, layout: _BatchLayout, lengths: Sequence[int] | None) -> BatchShape:
    """Return the rows filled to max_length, laid end to end; fewer where the data set is too small to fill them, which
    a fixed shape fills with padding."""
    room = layout.size * dataset.max_length
    tokens = min(room, sum(lengths)) if lengths else room
    laid = layout.size * min(dataset.max_length, tokens) if layout.fixed else tokens
    return BatchShape(1, laid, tokens - layout.size)


def _unknown(dataset: Dataset, layout: _BatchLayout) -> BatchShape:
    """Return the real data: the longest sample of a batch is as long as the longest of the data set is expected to be,
    from the mean that facts know of it, else max_length."""
    source, size = DATASETS[dataset.like] if dataset.like else dataset.source, layout.size
    longest, mean = dataset.max_length, float(dataset.max_length)
    known = source.mean_tokens or dataset.mean_length
    if known:
        longest = expected_longest(known, source.sigma or DEFAULT_SIGMA, dataset.samples or 10_000, longest)
        mean = min(known, longest)
    if layout.padding_free:
        tokens = round(longest + (size - 1) * mean)
        return BatchShape(1, tokens, tokens - size)
    return BatchShape(size, longest, round(size * mean) - size)


def expected_longest(mean: float, sigma: float, count: int, longest: int) -> int:
    """Return the median of the longest of `count` log-normal lengths with this mean (before the cut at `longest`)."""
    quantile = NormalDist().inv_cdf(0.5 ** (1 / max(count, 1)))
    return max(SHORTEST, min(longest, round(math.exp(math.log(mean) - sigma * sigma / 2 + sigma * quantile))))

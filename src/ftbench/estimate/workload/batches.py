"""How samples become batches, before the data is read: the largest, which takes the most memory (exact for synthetic
data, a bound for real data), and the mean micro-batches, which take the time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter
from typing import TypeAlias

from ftbench.estimate.workload.images import KnownSamples, known_samples
from ftbench.estimate.workload.lengths import Lengths, expected_longest, sample_lengths
from ftbench.families.vision import NOTHING, ImageSize, VisionShape
from ftbench.spec.batches import DEFAULT_SIGMA, bucketed, length_windows, packed
from ftbench.spec.datasets import DATASETS, Dataset
from ftbench.spec.experiment import Experiment

CLASSES = 8  # groups of micro-batches of like size that are computed with: time is not proportional to size
BOUNDARIES = ("varlen", "flash_attention_2", "flash_attention_3", "flex_attention")  # know where a sample ends

Column: TypeAlias = tuple[int, ...]  # a figure of each row
LaidOut: TypeAlias = tuple[int, int, int, int, bool]  # positions, samples, real tokens, pairs, whether they are masked


@dataclass(frozen=True, slots=True)
class _Layout:
    """What a spec says of how samples become batches of `size` rows: laid end to end (`flat`), also so that they fill
    the rows (`packing`), all of one shape (`fixed`), of samples of like length (`grouping`), in order of length
    (`ordered`: the longest come first). `seen` are the samples that a limit on steps leaves. `boundaries` are told to
    the attention kernel; `unmasked` kernels are given no mask of the padding. A sample is so many `sequences`, each a
    row."""

    size: int
    max_length: int
    packing: bool
    flat: bool
    fixed: bool
    grouping: bool
    ordered: bool
    seen: int | None
    boundaries: bool
    unmasked: bool
    sequences: int


def _layout(spec: Experiment) -> _Layout:
    on, train, data = spec.optimizations, spec.train, spec.dataset
    size = train.batch_size * spec.objective.sequences
    seen = None if train.max_steps is None else train.max_steps * size * train.gradient_accumulation_steps
    # unsloth drops the mask of a batch that is padded on the right: a causal kernel never looks there
    return _Layout(
        size, data.max_length, on.packing, on.packing or on.padding_free, on.fixed_shape,
        on.length_grouping, data.longest_first or on.length_grouping, seen, on.attention in BOUNDARIES,
        spec.method.name == "unsloth", spec.objective.sequences,
    )  # fmt: skip


# --- the largest ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The largest batch as the model sees it: `rows` of `length` positions, of which `labels` carry loss, and what its
    images become."""

    rows: int
    length: int
    labels: int
    images: ImageSize = NOTHING

    @property
    def tokens(self) -> int:
        return self.rows * self.length


@dataclass(frozen=True, slots=True)
class Largest:
    """The batch that is expected to be the largest, and the largest that can be. `padded` says that it holds padding,
    or several samples in a row, `whole` that its rows are of one length and each one sample; `basis` where lengths come
    from."""

    expected: BatchShape
    most: BatchShape
    padded: bool
    whole: bool
    basis: str


def largest(spec: Experiment, vision: VisionShape | None = None) -> Largest:
    """Return the batch with the most positions among those that the spec trains on; `vision` reads images."""
    if vision is not None and (known := known_samples(spec, vision)) is not None:
        return _largest_with_images(known, _layout(spec), spec.optimizations.tile_buckets, spec.dataset.seed)
    return _largest(spec.dataset, _layout(spec))


@lru_cache(maxsize=1024)
def _largest_with_images(known: KnownSamples, layout: _Layout, buckets: bool, seed: int) -> Largest:
    """Return the batch of samples with images, and the largest that can be: where not all samples are known, each as
    the longest of them."""
    samples = known.samples * (1 if known.exact else -(-layout.size // len(known.samples)))
    lengths = [sample.length for sample in samples]
    rows = packed(lengths, layout.max_length) if layout.packing else [[index] for index in range(len(samples))]
    if buckets:
        rows = [[index] for index in bucketed([sample.images.patches for sample in samples], layout.size, seed)]
    sizes = [sum(lengths[index] for index in row) for row in rows]
    if layout.ordered:
        rows.sort(key=lambda row: -sum(lengths[index] for index in row))
    longest, tried = max(sizes), list[BatchShape]()
    for batch in _trained(layout, range(len(rows))):
        shown = [samples[index] for row in batch for index in rows[row]]
        tokens, labels = sum(each.length for each in shown), sum(each.labels for each in shown)
        widest = longest if layout.fixed else max(sum(lengths[index] for index in rows[row]) for row in batch)
        shape = (1, len(batch) * longest if layout.fixed else tokens) if layout.flat else (len(batch), widest)
        tried.append(BatchShape(*shape, labels, sum((each.images for each in shown), NOTHING)))
    expected = most = max(tried, key=lambda batch: batch.tokens)
    if not known.exact and not layout.packing:
        heaviest = max(samples, key=lambda sample: sample.length)
        images = sum([heaviest.images] * layout.size, NOTHING)
        width = (1, layout.size * longest) if layout.flat else (layout.size, longest)
        most = BatchShape(*width, layout.size * heaviest.labels, images)
    padded = (len(set(lengths)) > 1 or layout.flat) and (expected.rows > 1 or layout.flat or layout.fixed)
    return Largest(expected, most, padded, _whole(layout, lengths), known.basis)


def _whole(layout: _Layout, lengths: Sequence[int]) -> bool:
    """Return whether attention sees rows of one length, each one sample: every sample has max_length tokens, or no two
    fit a row together and each is filled up (worker/data/collate.py, `_laid_out`)."""
    two = sum(sorted(lengths)[:2]) if len(lengths) > 1 else 2 * layout.max_length
    filled = layout.flat and layout.fixed and (not layout.packing or two > layout.max_length)
    return min(lengths) == layout.max_length or filled


@lru_cache(maxsize=1024)
def _largest(dataset: Dataset, layout: _Layout) -> Largest:
    lengths, basis = sample_lengths(dataset, layout.sequences)
    flat = layout.flat
    if layout.packing:
        expected = _packed(dataset, layout, lengths)
    elif lengths is None:
        expected = _unknown(dataset, layout)
    else:
        longest = max(lengths)
        in_order = _longest_first(dataset, layout.sequences) if layout.ordered else lengths
        tried = (_shape(layout, batch, longest) for batch in _trained(layout, in_order))
        expected = max(tried, key=lambda batch: batch.tokens)
    most = expected
    if lengths is None:
        rows, longest = layout.size, dataset.max_length
        most = BatchShape(1 if flat else rows, rows * longest if flat else longest, rows * (longest - 1))
    even = lengths is not None and min(lengths) == max(lengths)
    alone = expected.rows == 1 and not flat and not layout.fixed
    whole = lengths is not None and _whole(layout, lengths)
    return Largest(expected, most, not (even and not flat) and not alone, whole, basis)


@lru_cache(maxsize=32)
def _longest_first(dataset: Dataset, sequences: int) -> list[int]:
    return sorted(sample_lengths(dataset, sequences)[0] or (), reverse=True)


def _trained(layout: _Layout, lengths: Sequence[int]) -> list[Sequence[int]]:
    """Return the batches that are trained on, as lengths; of samples ordered by length, the first."""
    if layout.ordered:
        return [lengths[: layout.size]]
    seen = len(lengths) if layout.seen is None else min(len(lengths), layout.seen)
    return [lengths[at : at + layout.size] for at in range(0, seen, layout.size)]


def _shape(layout: _Layout, batch: Sequence[int], longest: int) -> BatchShape:
    labels = sum(batch) - len(batch)
    if layout.flat:
        return BatchShape(1, sum(batch), labels)
    return BatchShape(len(batch), longest if layout.fixed else max(batch), labels)


def _packed(dataset: Dataset, layout: _Layout, lengths: Sequence[int] | None) -> BatchShape:
    """Return the rows filled to max_length, laid end to end; fewer where the data set is too small to fill them, which
    a fixed shape fills with padding."""
    room = layout.size * dataset.max_length
    tokens = min(room, sum(lengths)) if lengths else room
    laid = layout.size * min(dataset.max_length, tokens) if layout.fixed else tokens
    return BatchShape(1, laid, tokens - layout.size)


def _unknown(dataset: Dataset, layout: _Layout) -> BatchShape:
    """Return the real data: the longest sample of a batch is as long as the longest of the data set is expected to be,
    from the mean that facts know of it, else max_length."""
    source, size = DATASETS[dataset.like] if dataset.like else dataset.source, layout.size
    longest, mean = dataset.max_length, float(dataset.max_length)
    known = source.mean_tokens or dataset.mean_length
    if known:
        longest = expected_longest(known, source.sigma or DEFAULT_SIGMA, dataset.samples or 10_000, longest)
        mean = min(known, longest)
    if layout.flat:
        tokens = round(longest + (size - 1) * mean)
        return BatchShape(1, tokens, tokens - size)
    return BatchShape(size, longest, round(size * mean) - size)


# --- the mean ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Batch:
    """Mean micro-batch of a group that is `weight` of all. `positions` are computed, padding included; `square` is the
    number of query and key pairs of one layer without a window; `masked` says that attention computes all of them
    with a mask, and not only the causal half. `patches` of images are seen by an encoder in `tiles`."""

    weight: float
    samples: float
    positions: float
    real: float
    labels: float
    square: float
    masked: bool
    patches: float = 0.0
    tiles: float = 0.0


def batches_of(spec: Experiment, lengths: Lengths) -> tuple[Batch, ...]:
    """Return the micro-batches of a spec in at most CLASSES groups of like size, which differ in weight."""
    groups = _batches(lengths, _layout(spec))
    if not lengths.patches:
        return groups
    return tuple(
        replace(each, patches=each.samples * lengths.patches, tiles=each.samples * lengths.tiles) for each in groups
    )


def per_step(spec: Experiment, batches: Sequence[Batch], name: str) -> float:
    """Return the mean of a field of the micro-batches, of all micro-batches of an optimizer step."""
    passes = spec.train.gradient_accumulation_steps
    return passes * sum(batch.weight * float(getattr(batch, name)) for batch in batches)


def mean_batch(
    spec: Experiment, samples: float, positions: float, real: float, labels: float, of_a_token: float
) -> Batch:
    """Return the micro-batch of a run, from its means; `of_a_token` is the mean length of the sample a token is in."""
    on, padded = spec.optimizations, positions > real * 1.0001
    if on.attention in BOUNDARIES:
        return Batch(1.0, samples, positions, real, labels, real * of_a_token, False)
    if on.packing or on.padding_free:
        return Batch(1.0, samples, positions, real, labels, positions**2, padded or samples > 1)
    masked = padded and spec.method.name != "unsloth"
    return Batch(1.0, samples, positions, real, labels, positions**2 / (samples * spec.objective.sequences), masked)


@lru_cache(maxsize=4096)
def _batches(lengths: Lengths, layout: _Layout) -> tuple[Batch, ...]:
    totals, squares, counts = _rows(lengths, layout.packing, layout.size if layout.grouping else 0, layout.max_length)
    size, more = layout.size, -(-layout.size // len(totals))
    if more > 1:  # what was drawn fills no whole batch of this size: it is drawn over and over
        totals, squares, counts = totals * more, squares * more, counts * more
    whole = len(totals) // size
    longest = max(totals)
    starts = range(0, whole * size, size)
    laid = [
        _laid_out(layout, totals[at : at + size], squares[at : at + size], counts[at : at + size], longest)
        for at in starts
    ]
    laid.sort(key=itemgetter(0))
    classes = 1 if laid[0][0] == laid[-1][0] else min(CLASSES, whole)
    edges = [-(-whole * index // classes) for index in range(classes + 1)]
    return tuple(_mean(laid[a:b], (b - a) / whole, lengths.labels) for a, b in itertools.pairwise(edges))


def _mean(laid: Sequence[LaidOut], weight: float, labels: float) -> Batch:
    positions, samples, real, square, masked = (sum(column) / len(laid) for column in zip(*laid, strict=True))
    return Batch(weight, samples, positions, real, real * labels, square, masked > 0.5)


@lru_cache(maxsize=64)
def _rows(lengths: Lengths, packing: bool, grouping: int, max_length: int) -> tuple[Column, Column, Column]:
    """Return of each row its tokens, the sum of its samples' squared lengths, and its samples; the rows of a batch
    after one another. `grouping` is the size of the batches that hold samples of like length, 0 where they do not."""
    values = lengths.values
    if packing:
        rows = [[values[index] for index in row] for row in packed(values, max_length)]
        squares = tuple(sum([length * length for length in row]) for row in rows)
        return tuple(map(sum, rows)), squares, tuple(map(len, rows))
    if grouping:
        windows = length_windows(values, grouping)
        values = tuple([values[index] for window in windows for batch in window for index in batch])
    return values, tuple([length * length for length in values]), (1,) * len(values)


def _laid_out(layout: _Layout, totals: Column, squares: Column, counts: Column, longest: int) -> LaidOut:
    """Return a batch as `worker/data/collate.py` lays it out."""
    real, samples, wide = sum(totals), sum(counts), longest if layout.fixed else max(totals)
    positions = real if layout.flat and not layout.fixed else max(real, wide * layout.size)
    if layout.boundaries:
        return positions, samples, real, sum(squares), False
    if layout.flat:
        return positions, samples, real, positions * positions, samples > 1 or positions > real
    masked = positions > real and not layout.unmasked
    return positions, samples // layout.sequences, real, layout.size * wide * wide, masked

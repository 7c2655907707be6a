"""Predict the largest batch of a spec before its data is read. This batch determines the memory peak.

For synthetic data, the prediction is exact. For real data, the prediction is a range of batch shapes (`Largest`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ftbench.estimate.workload.batches import Layout, layout_of
from ftbench.estimate.workload.lengths import FileLengths, expected_longest, file_lengths, sample_lengths
from ftbench.families.vision import NOTHING, ImageSize, VisionShape
from ftbench.spec.batches import DEFAULT_SIGMA, SHORTEST, packed
from ftbench.spec.datasets import DATASETS, Dataset
from ftbench.spec.experiment import Experiment

if TYPE_CHECKING:
    from ftbench.estimate.workload.images import KnownSamples

Lengths = npt.NDArray[np.int64]
_UNLIKELY = 0.05  # probability that the longest sample is shorter than the low end of the range


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The shape of a batch in the model: `(rows, length)`, including padding.

    `labels` is the number of label tokens in the batch. `images` counts the patches, tiles and tokens of all images."""

    rows: int
    length: int
    labels: int
    images: ImageSize = NOTHING

    @property
    def tokens(self) -> int:
        return self.rows * self.length


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest batch of a run: the `expected` shape, the `most` possible shape, and the `least` likely shape.

    `padded` means that a batch has padding, or rows with several samples. `whole` means that each row has one sample,
    and all rows have the same length. `unequal` means that other batches may have other lengths. `basis` describes the
    source of the lengths. `records` are the tokens of each batch longer than all before, if their order is known."""

    expected: BatchShape
    most: BatchShape
    padded: bool
    whole: bool
    basis: str
    least: BatchShape | None = None
    unequal: bool = False
    records: tuple[int, ...] = ()


def largest(spec: Experiment, vision: VisionShape | None = None) -> Largest:
    """Return a spec's batch with the most positions (tokens and padding). `vision` is the model's image encoder."""
    file = None
    if spec.dataset.name in ("file", "sample"):
        counted = file_lengths(spec.dataset, spec.model, spec.objective.pairs)
        if not isinstance(counted, str) and max(counted.values) > SHORTEST:  # the file has text that can be counted
            file = counted
    if vision is not None:
        from ftbench.estimate.workload.images import known_samples

        if (known := known_samples(spec, vision)) is not None:
            return _largest_with_images(known, layout_of(spec))
    return _largest(spec.dataset, layout_of(spec), file)


@lru_cache(maxsize=1024)
def _largest_with_images(known: KnownSamples, layout: Layout) -> Largest:
    """Return the largest batch of samples with images.

    If training may use other samples (`known.exact` is false), `most` is a batch of copies of the longest sample."""
    samples = known.samples * (1 if known.exact else -(-layout.size // len(known.samples)))
    lengths = [sample.length for sample in samples]
    rows = packed(lengths, layout.max_length) if layout.packing else [[index] for index in range(len(samples))]
    sizes, tried = [sum(lengths[index] for index in row) for row in rows], list[BatchShape]()
    order, longest = range(len(rows)), max(sizes)
    trained: Sequence[int] = order[: layout.seen]
    if layout.ordered:
        trained = sorted(order, key=lambda row: -sizes[row])[: layout.size]
    for batch in (trained[at : at + layout.size] for at in range(0, len(trained), layout.size)):
        shown = [samples[index] for row in batch for index in rows[row]]
        tokens, labels = sum(each.length for each in shown), sum(each.labels for each in shown)
        widest = longest if layout.fixed else max(sizes[row] for row in batch)
        shape = (1, len(batch) * longest if layout.fixed else tokens) if layout.flat else (len(batch), widest)
        tried.append(BatchShape(*shape, labels, sum((each.images for each in shown), NOTHING)))
    expected = most = max(tried, key=lambda batch: batch.tokens)
    if not known.exact and not layout.packing:
        heaviest = max(samples, key=lambda sample: sample.length)
        images = sum([heaviest.images] * layout.size, NOTHING)
        width = (1, layout.size * longest) if layout.flat else (layout.size, longest)
        most = BatchShape(*width, layout.size * heaviest.labels, images)
    unequal = len(set(lengths)) > 1
    padded = (unequal or layout.flat) and (expected.rows > 1 or layout.flat or layout.fixed)
    records = tuple(np.unique(np.maximum.accumulate([batch.tokens for batch in tried])).tolist())
    return Largest(expected, most, padded, _whole(layout, np.asarray(lengths)), known.basis, None, unequal, records)


def _whole(layout: Layout, lengths: Lengths) -> bool:
    """Return whether each row in attention contains one sample, and all rows have the same length.

    This is the case if every sample has max_length tokens. This is also the case if rows of one sample are padded to a
    fixed length (worker/data/collate.py, `_concatenated`). A packed row has one sample if two samples never fit."""
    if lengths.min() == layout.max_length or not (layout.flat and layout.fixed):
        return bool(lengths.min() == layout.max_length)
    return not layout.packing or len(lengths) < 2 or bool(np.sort(lengths)[:2].sum() > layout.max_length)


@lru_cache(maxsize=1024)
def _largest(dataset: Dataset, layout: Layout, file: FileLengths | None = None) -> Largest:
    lengths, basis = sample_lengths(dataset, layout.sequences)
    if file is not None:
        longest, most = (min(dataset.max_length, length) for length in (max(file.values), file.most))
        basis = f"the longest sample {longest:,} tokens, at most {most:,}: {file.source}"
    if layout.packing:
        expected = _packed(dataset, layout, lengths)
    elif lengths is None:
        expected = _unknown(dataset, layout, file)
    else:
        batch = _heaviest(layout, np.sort(lengths)[::-1] if layout.ordered else lengths)
        expected = _shape(layout, batch, int(lengths.max()))
    single = expected.rows == 1 and not layout.flat and not layout.fixed
    if lengths is not None:
        padded = not (lengths.min() == lengths.max() and not layout.flat) and not single
        return Largest(expected, expected, padded, _whole(layout, lengths), basis, None, bool(np.ptp(lengths)))
    rows, longest = layout.size, dataset.max_length
    if file is not None and not layout.packing:
        longest = min(longest, file.most)
    labels = rows * (longest - 1)
    padded_rows = BatchShape(rows, layout.width(longest), labels)
    heaviest = BatchShape(1, rows * longest, labels) if layout.flat else padded_rows
    least = None if layout.packing else _unknown(dataset, layout, file, _UNLIKELY)
    return Largest(expected, heaviest, not single, False, basis, least, True)


def _heaviest(layout: Layout, lengths: Lengths) -> Lengths:
    """Return the sample lengths of the batch with the most positions, including padding."""
    size, trained = layout.size, lengths[: layout.size if layout.ordered else layout.seen]
    starts = np.arange(0, len(trained), size)
    if layout.flat:
        positions = np.add.reduceat(trained, starts)
    else:
        rows = np.minimum(size, len(trained) - starts)
        positions = rows if layout.fixed else rows * layout.width(np.maximum.reduceat(trained, starts))
    at = starts[np.argmax(positions)]
    return trained[at : at + size]


def _shape(layout: Layout, batch: Lengths, longest: int) -> BatchShape:
    tokens = int(batch.sum())
    if layout.flat:
        return BatchShape(1, tokens, tokens - len(batch))
    return BatchShape(len(batch), longest if layout.fixed else int(layout.width(batch.max())), tokens - len(batch))


def _packed(dataset: Dataset, layout: Layout, lengths: Lengths | None) -> BatchShape:
    """Return the shape of a packed batch. Full rows have max_length tokens.

    A small data set may not fill the rows. With a fixed shape, the rest is padding."""
    room = layout.size * dataset.max_length
    tokens = room if lengths is None else min(room, int(lengths.sum()))
    laid = layout.size * min(dataset.max_length, tokens) if layout.fixed else tokens
    return BatchShape(1, laid, tokens - layout.size)


def _unknown(dataset: Dataset, layout: Layout, file: FileLengths | None, chance: float = 0.5) -> BatchShape:
    """Return an estimate of the largest batch of real data. `chance` selects a quantile (0.5: the median).

    The length of the longest sample comes from the file. Without a file, this length is computed from the mean length
    of the data set. If the mean is unknown, the longest sample has max_length tokens."""
    source, size = DATASETS[dataset.like] if dataset.like else dataset.source, layout.size
    longest, mean = dataset.max_length, float(dataset.max_length)
    known = source.mean_tokens or dataset.mean_length
    if file is not None:
        cut = [min(longest, length) for length in file.values]
        longest, mean = max(cut), sum(cut) / len(cut)
    elif known:
        longest = expected_longest(known, source.sigma or DEFAULT_SIGMA, dataset.samples or 10_000, longest, chance)
        mean = min(known, longest)
    if layout.flat:
        tokens = round(longest + (size - 1) * mean)
        return BatchShape(1, tokens, tokens - size)
    return BatchShape(size, layout.width(longest), round(size * mean) - size)

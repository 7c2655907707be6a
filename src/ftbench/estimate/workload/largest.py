"""The largest batch of a spec before its data is read. It decides the memory.

It is exact for synthetic data and a bound for real data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from ftbench.estimate.workload.batches import Layout, layout_of
from ftbench.estimate.workload.lengths import FileLengths, expected_longest, file_basis, file_lengths, sample_lengths
from ftbench.families.vision import NOTHING, ImageSize, VisionShape
from ftbench.spec.batches import DEFAULT_SIGMA, SHORTEST, packed
from ftbench.spec.datasets import DATASETS, Dataset
from ftbench.spec.experiment import Experiment

if TYPE_CHECKING:
    from ftbench.estimate.workload.images import KnownSamples

_UNLIKELY = 0.05  # probability that the longest sample is shorter than at the low end of the range


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The largest batch as the model sees it.

    It has `rows` of `length` positions, `labels` with loss, and the size of its images."""

    rows: int
    length: int
    labels: int
    images: ImageSize = NOTHING

    @property
    def tokens(self) -> int:
        return self.rows * self.length


@dataclass(frozen=True, slots=True)
class Largest:
    """The batch that is expected to be the largest, the largest possible one, and the smallest likely one.

    `padded`: it has padding, or rows with several samples. `whole`: all rows have one length and one sample. `basis` is
    the source of the lengths."""

    expected: BatchShape
    most: BatchShape
    padded: bool
    whole: bool
    basis: str
    least: BatchShape | None = None


def largest(spec: Experiment, vision: VisionShape | None = None) -> Largest:
    """Return the largest batch of a spec by positions; `vision` describes the model's image encoder."""
    file = _file(spec)
    if vision is not None:
        from ftbench.estimate.workload.images import known_samples

        if (known := known_samples(spec, vision)) is not None:
            return _largest_with_images(known, layout_of(spec))
    return _largest(spec.dataset, layout_of(spec), file)


def _file(spec: Experiment) -> FileLengths | None:
    """Return the lengths of the spec's file, or None if there is no readable file."""
    if spec.dataset.name not in ("file", "sample"):
        return None
    counted = file_lengths(spec.dataset, spec.model, spec.objective.pairs)
    return None if isinstance(counted, str) or max(counted.values) == SHORTEST else counted  # no known text


@lru_cache(maxsize=1024)
def _largest_with_images(known: KnownSamples, layout: Layout) -> Largest:
    """Return the largest batch of samples with images. If not all are known, each may be as long as the longest."""
    samples = known.samples * (1 if known.exact else -(-layout.size // len(known.samples)))
    lengths = [sample.length for sample in samples]
    rows = packed(lengths, layout.max_length) if layout.packing else [[index] for index in range(len(samples))]
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


def _whole(layout: Layout, lengths: Sequence[int]) -> bool:
    """Return whether attention sees rows of one length with one sample each.

    This is true if every sample has max_length tokens. It is also true if each row has one sample (packing is off, or
    no two samples fit) and is padded to a fixed length (worker/data/collate.py, `_concatenated`)."""
    if min(lengths) == layout.max_length or not (layout.flat and layout.fixed):
        return min(lengths) == layout.max_length
    return not layout.packing or len(lengths) < 2 or sum(sorted(lengths)[:2]) > layout.max_length


@lru_cache(maxsize=1024)
def _largest(dataset: Dataset, layout: Layout, file: FileLengths | None = None) -> Largest:
    lengths, basis = sample_lengths(dataset, layout.sequences)
    if lengths is not None and dataset.length is not None and not layout.packing:
        lengths = lengths[: max(2, layout.size)]  # all are equal
    least = None
    if file is not None:
        basis = file_basis(dataset, file)
    flat = layout.flat
    if layout.packing:
        expected = _packed(dataset, layout, lengths)
    elif lengths is None:
        expected = _unknown(dataset, layout, file)
        least = _unknown(dataset, layout, file, _UNLIKELY)
    else:
        longest = max(lengths)
        in_order = _longest_first(dataset, layout.sequences) if layout.ordered else lengths
        expected = _shape(layout, _heaviest(layout, in_order), longest)
    most = expected
    if lengths is None:
        rows, longest = layout.size, dataset.max_length
        if file is not None and not layout.packing:
            longest = min(longest, file.most)
        most = BatchShape(1 if flat else rows, rows * longest if flat else longest, rows * (longest - 1))
    even = lengths is not None and min(lengths) == max(lengths)
    single = expected.rows == 1 and not flat and not layout.fixed
    whole = lengths is not None and _whole(layout, lengths)
    return Largest(expected, most, not (even and not flat) and not single, whole, basis, least)


@lru_cache(maxsize=32)
def _longest_first(dataset: Dataset, sequences: int) -> list[int]:
    return sorted(sample_lengths(dataset, sequences)[0] or (), reverse=True)


def _trained(layout: Layout, lengths: Sequence[int]) -> list[Sequence[int]]:
    """Return the batches of a training as lengths; only the first if samples are sorted by length."""
    if layout.ordered:
        return [lengths[: layout.size]]
    seen = len(lengths) if layout.seen is None else min(len(lengths), layout.seen)
    return [lengths[at : at + layout.size] for at in range(0, seen, layout.size)]


def _heaviest(layout: Layout, lengths: Sequence[int]) -> Sequence[int]:
    """Return the batch with the most positions: of padded ones that with the longest sample, or the last, incomplete
    one."""
    if layout.flat or layout.fixed or layout.ordered:
        return max(_trained(layout, lengths), key=sum if layout.flat else len)
    seen = len(lengths) if layout.seen is None else min(len(lengths), layout.seen)
    size, complete = layout.size, seen // layout.size * layout.size
    batches = [lengths[complete:seen]] if complete < seen else []
    if complete:
        at = lengths.index(max(lengths[:complete])) // size * size
        batches.insert(0, lengths[at : at + size])
    return max(batches, key=lambda batch: len(batch) * max(batch))


def _shape(layout: Layout, batch: Sequence[int], longest: int) -> BatchShape:
    labels = sum(batch) - len(batch)
    if layout.flat:
        return BatchShape(1, sum(batch), labels)
    return BatchShape(len(batch), longest if layout.fixed else max(batch), labels)


def _packed(dataset: Dataset, layout: Layout, lengths: Sequence[int] | None) -> BatchShape:
    """Return concatenated rows of max_length.

    A small data set may not fill them; a fixed shape pads the rest."""
    room = layout.size * dataset.max_length
    tokens = min(room, sum(lengths)) if lengths else room
    laid = layout.size * min(dataset.max_length, tokens) if layout.fixed else tokens
    return BatchShape(1, laid, tokens - layout.size)


def _unknown(dataset: Dataset, layout: Layout, file: FileLengths | None, chance: float = 0.5) -> BatchShape:
    """Return the largest batch of real data, which is larger with probability 1 - `chance`.

    The longest sample comes from the file, otherwise from the data set's known mean, otherwise it is max_length."""
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
    return BatchShape(size, longest, round(size * mean) - size)

"""How long the samples of a spec are, and what its micro-batches compute: exactly for synthetic data, else from runs on
the same data, else from what is known of the data set."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import Any, TypeAlias

from ftbench.estimate.workload.file_lengths import file_lengths
from ftbench.spec import batches
from ftbench.spec.datasets import Dataset
from ftbench.spec.experiment import Experiment, Model

MOST_SAMPLES = 4096  # drawn for an estimate; more change the mean of a batch by about 1 %
CLASSES = 8  # groups of micro-batches of like size that are computed with: time is not proportional to size
BOUNDARIES = ("varlen", "flash_attention_2", "flash_attention_3", "flex_attention")  # know where a sample ends

Column: TypeAlias = tuple[int, ...]  # a figure of each row
LaidOut: TypeAlias = tuple[int, int, int, int, bool]  # positions, samples, real tokens, pairs, whether they are masked


@dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """Lengths in tokens of samples as they are drawn, the share of tokens that carry loss, and where both come from.
    `upper_bound` says that nothing is known but the longest that is allowed; `rows` is how many samples the data set
    has, where it was read. Equal only to itself: batches are kept by it."""

    values: tuple[int, ...]
    labels: float
    source: str
    upper_bound: bool = False
    rows: int | None = None

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values)


@dataclass(frozen=True, slots=True)
class Batch:
    """Mean micro-batch of a group that is `weight` of all. `positions` are computed, padding included; `square` is the
    number of query and key pairs of one layer without a window; `masked` says that attention computes all of them
    with a mask, and not only the causal half."""

    weight: float
    samples: float
    positions: float
    real: float
    labels: float
    square: float
    masked: bool


def lengths_of(
    dataset: Dataset, recorded: Iterable[tuple[Dataset, dict[str, Any]]] = (), model: Model | None = None
) -> Lengths:
    """Return the lengths of a data set for a model; `recorded` are data sets of earlier runs with the `dataset` section
    of their summaries."""
    if dataset.name == "synthetic":
        count = min(dataset.samples or MOST_SAMPLES, MOST_SAMPLES)
        return Lengths(_drawn(dataset, count), 1.0, "exact: synthetic lengths")
    same = [described for other, described in recorded if _same_data(dataset, other)]
    if same and (known := _from_histogram(same[-1], dataset)) is not None:
        return known
    if dataset.source.mean_tokens is not None:
        like = Dataset(name="synthetic", like=dataset.name, samples=MOST_SAMPLES, max_length=dataset.max_length)
        drawn = _drawn(like, min(dataset.samples or MOST_SAMPLES, MOST_SAMPLES))
        return Lengths(drawn, 1.0, f"drawn to the mean length known of {dataset.name}")
    why = f"the lengths of {dataset.name} are not known"
    if dataset.name in ("file", "sample") and model is not None:
        counted = file_lengths(dataset, model)
        if not isinstance(counted, str):
            return _of_file(dataset, *counted)
        why += f" ({counted})"
    why += f": every sample counts as max_length {dataset.max_length:,}"
    return Lengths((dataset.max_length,) * 64, 1.0, why, upper_bound=True)


def _of_file(dataset: Dataset, lengths: Sequence[int], rows: int, source: str) -> Lengths:
    """Return the lengths in an order like that of training, as many as are trained on."""
    trained = max(1, min(dataset.samples or rows, len(lengths)))
    shuffled = random.Random(dataset.seed).sample(lengths, trained)
    return Lengths(tuple(min(length, dataset.max_length) for length in shuffled), 1.0, source, rows=rows)


@lru_cache(maxsize=32)
def _drawn(dataset: Dataset, count: int) -> tuple[int, ...]:
    return tuple(batches.synthetic_lengths(dataset, min(count, 1024) if dataset.length is not None else count))


def _same_data(wanted: Dataset, other: Dataset) -> bool:
    return (wanted.name, wanted.path, wanted.revision) == (other.name, other.path, other.revision)


def _from_histogram(described: dict[str, Any], dataset: Dataset) -> Lengths | None:
    """Return samples drawn evenly from the bins of a run's histogram of lengths before they were cut."""
    lengths = described.get("tokens_before_truncation") or {}
    histogram, mean = lengths.get("histogram") or {}, lengths.get("mean")
    counts, edges = histogram.get("counts"), histogram.get("edges")
    total = (described.get("tokens") or {}).get("total")
    if not counts or not edges or not mean or not total:
        return None
    dice = random.Random(dataset.seed)
    size = min(sum(counts), MOST_SAMPLES)
    values = dice.choices(range(len(counts)), counts, k=size)
    spread = [edges[i] + dice.random() * (edges[i + 1] - edges[i]) for i in values]
    scale = mean * size / sum(spread)  # a bin is wide beside short samples: the mean is what was measured
    cut = tuple(max(2, min(dataset.max_length, round(length * scale))) for length in spread)
    labels = min(1.0, (described.get("label_tokens") or total) / total) if dataset.loss_on != "all" else 1.0
    return Lengths(cut, labels, f"recorded by a run on {dataset.name}")


@dataclass(frozen=True, slots=True)
class _Layout:
    """What a spec says of how samples become batches of `size` rows. `flat` rows are laid end to end; `boundaries` are
    told to the attention kernel; `unmasked` kernels are given no mask of the padding."""

    size: int
    max_length: int
    packing: bool
    grouping: bool
    flat: bool
    fixed: bool
    boundaries: bool
    unmasked: bool


def batches_of(spec: Experiment, lengths: Lengths) -> tuple[Batch, ...]:
    """Return the micro-batches of a spec in at most CLASSES groups of like size, which differ in weight."""
    on = spec.optimizations
    # unsloth drops the mask of a batch that is padded on the right: a causal kernel never looks there
    return _batches(lengths, _Layout(
        spec.train.batch_size, spec.dataset.max_length, on.packing, on.length_grouping,
        on.packing or on.padding_free, on.fixed_shape, on.attention in BOUNDARIES, spec.method.name == "unsloth",
    ))  # fmt: skip


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
    return Batch(1.0, samples, positions, real, labels, positions**2 / samples, masked)


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
        rows = [[values[index] for index in row] for row in batches.packed(values, max_length)]
        squares = tuple(sum([length * length for length in row]) for row in rows)
        return tuple(map(sum, rows)), squares, tuple(map(len, rows))
    if grouping:
        windows = batches.length_windows(values, grouping)
        values = tuple(values[index] for window in windows for batch in window for index in batch)
    return values, tuple([length * length for length in values]), (1,) * len(values)


def _laid_out(layout: _Layout, totals: Column, squares: Column, counts: Column, longest: int) -> LaidOut:
    """Return a batch as `worker/data/collate.py` lays it out."""
    real, samples, wide = sum(totals), sum(counts), longest if layout.fixed else max(totals)
    positions = real if layout.flat and not layout.fixed else max(real, wide * layout.size)
    if layout.boundaries:
        return positions, samples, real, sum(squares), False
    if layout.flat:
        return positions, samples, real, positions * positions, samples > 1 or positions > real
    return positions, samples, real, layout.size * wide * wide, positions > real and not layout.unmasked

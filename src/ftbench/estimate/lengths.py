"""How long the samples of a spec are, and what its micro-batches compute: exactly for synthetic data, else from runs on
the same data, else from what is known of the data set."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

from ftbench.spec.datasets import DATASETS, Dataset
from ftbench.spec.experiment import Experiment

MOST_SAMPLES = 8192  # drawn for an estimate; more change the mean of a batch by less than 1 %
CLASSES = 8  # groups of micro-batches of like size that are computed with: time is not proportional to size
BOUNDARIES = ("varlen", "flash_attention_2", "flash_attention_3", "flex_attention")  # know where a sample ends


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths in tokens of samples as they are drawn, the share of tokens that carry loss, and where both come from.
    `upper_bound` says that nothing is known but the longest that is allowed."""

    values: tuple[int, ...]
    labels: float
    source: str
    upper_bound: bool = False

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
    rows: float
    positions: float
    real: float
    labels: float
    square: float
    masked: bool


def lengths_of(spec: Experiment, recorded: Iterable[tuple[Dataset, dict[str, Any]]] = ()) -> Lengths:
    """`recorded` are data sets of earlier runs with the `dataset` section of their summaries."""
    dataset = spec.dataset
    if dataset.name == "synthetic":
        count = min(dataset.samples or MOST_SAMPLES, MOST_SAMPLES)
        return Lengths(_drawn(dataset, count), 1.0, "exact: synthetic lengths")
    same = [described for other, described in recorded if _same_data(dataset, other)]
    if same and (known := _from_histogram(same[-1], dataset)) is not None:
        return known
    if DATASETS[dataset.name].mean_tokens is not None:
        like = Dataset(name="synthetic", like=dataset.name, samples=MOST_SAMPLES, max_length=dataset.max_length)
        drawn = _drawn(like, min(dataset.samples or MOST_SAMPLES, MOST_SAMPLES))
        return Lengths(drawn, 1.0, f"drawn to the mean length known of {dataset.name}")
    why = f"the lengths of {dataset.name} are not known: every sample counts as max_length {dataset.max_length:,}"
    return Lengths((dataset.max_length,) * 64, 1.0, why, upper_bound=True)


@lru_cache(maxsize=32)
def _drawn(dataset: Dataset, count: int) -> tuple[int, ...]:
    if dataset.length is not None:
        return (dataset.length,) * min(count, 1024)
    from ftbench.spec.batches import synthetic_lengths

    return tuple(synthetic_lengths(dataset, count))


def _same_data(wanted: Dataset, other: Dataset) -> bool:
    return (wanted.name, wanted.path, wanted.revision) == (other.name, other.path, other.revision)


def _from_histogram(described: dict[str, Any], dataset: Dataset) -> Lengths | None:
    """Samples drawn evenly from the bins of a run's histogram of lengths before they were cut."""
    told = described.get("tokens_before_truncation") or {}
    histogram, mean = told.get("histogram") or {}, told.get("mean")
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
    seed: int
    packing: bool
    grouping: bool
    flat: bool
    fixed: bool
    boundaries: bool
    unmasked: bool


def batches_of(spec: Experiment, lengths: Lengths) -> tuple[Batch, ...]:
    """The micro-batches of a spec in at most CLASSES groups of like size, which differ in weight."""
    on = spec.optimizations
    # unsloth drops the mask of a batch that is padded on the right: a causal kernel never looks there
    return _batches(lengths, _Layout(
        spec.train.batch_size, spec.dataset.max_length, spec.dataset.seed, on.packing, on.length_grouping,
        on.packing or on.padding_free, on.fixed_shape, on.attention in BOUNDARIES, spec.method.name == "unsloth",
    ))  # fmt: skip


@lru_cache(maxsize=512)
def _batches(lengths: Lengths, layout: _Layout) -> tuple[Batch, ...]:
    rows, size = _rows(lengths.values, layout), layout.size
    if len(rows) < size:  # what was drawn fills no whole batch of this size: it is drawn over and over
        rows = rows * -(-size // len(rows))
    longest = max(sum(row) for row in rows) if layout.fixed else None
    groups = (rows[at : at + size] for at in range(0, len(rows) - size + 1, size))
    found = sorted((_batch(group, layout, longest, lengths.labels) for group in groups), key=lambda b: b.positions)
    if found[0] == found[-1]:
        return (found[0],)
    cuts = [len(found) * i // CLASSES for i in range(CLASSES + 1)]
    return tuple(_mean(found[a:b], len(found)) for a, b in pairwise(cuts) if b > a)


def _rows(values: tuple[int, ...], layout: _Layout) -> list[list[int]]:
    """The sample lengths of each row, in training order."""
    from ftbench.spec import batches

    if layout.packing:
        return [[values[place] for place in row] for row in batches.packed(values, layout.max_length)]
    if layout.grouping:
        return [[values[place]] for place in batches.grouped(values, layout.size, layout.seed)]
    return [[value] for value in values]


def _batch(rows: Sequence[list[int]], layout: _Layout, longest: int | None, labels: float) -> Batch:
    """As `worker/data/collate.py` lays it out."""
    samples = [length for row in rows for length in row]
    real = sum(samples)
    wide = longest or max(sum(row) for row in rows)
    positions = max(real, wide * len(rows)) if longest or not layout.flat else real
    if layout.boundaries:
        square, masked = sum(n * n for n in samples), False
    elif layout.flat:
        square, masked = positions * positions, len(samples) > 1 or positions > real
    else:
        square, masked = len(rows) * wide * wide, positions > real and not layout.unmasked
    return Batch(1.0, len(samples), 1 if layout.flat else len(rows), positions, real, real * labels, square, masked)


def _mean(batches: Sequence[Batch], total: int) -> Batch:
    def mean(name: str) -> float:
        return sum(float(getattr(batch, name)) for batch in batches) / len(batches)

    return Batch(
        weight=len(batches) / total,
        samples=mean("samples"),
        rows=mean("rows"),
        positions=mean("positions"),
        real=mean("real"),
        labels=mean("labels"),
        square=mean("square"),
        masked=sum(batch.masked for batch in batches) * 2 > len(batches),
    )

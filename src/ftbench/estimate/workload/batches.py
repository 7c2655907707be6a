"""Predict the mean micro-batches of a spec before its data is read. The mean micro-batches determine the step time."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ftbench.estimate.workload.lengths import Lengths
from ftbench.spec.batches import length_windows, packed
from ftbench.spec.experiment import Experiment
from ftbench.spec.methods import Unsloth, family

CLASSES = 8  # micro-batches of similar size form this many groups, because time is not proportional to size
FLEX_BLOCK = 128  # unsloth pads rows of gpt-oss to a multiple of its attention's blocks (unsloth/models/rl.py)
# Attention kernels that do not mix the samples of a row.
BOUNDARIES = ("varlen", "flash_attention_2", "flash_attention_3", "flex_attention")


@dataclass(frozen=True, slots=True)
class Layout:
    """How samples become batches of `size` rows.

    `flat`: the samples of a batch are concatenated. `packing`: rows contain several samples. `fixed`: all rows are
    padded to one length. `grouping`: the samples of a batch have similar lengths. `ordered`: samples are sorted by
    length, longest first. `seen`: the number of trained samples (None: all samples). `boundaries`: attention separates
    the samples of a row. `unmasked`: attention gets no mask for padding. `sequences`: the number of rows per sample.
    `multiple`: padded rows have a multiple of this number of tokens."""

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
    multiple: int

    def width(self, longest: Any) -> Any:
        """Return the padded length of rows. `longest` is the length of the longest row, or an array of such lengths."""
        return -(-longest // self.multiple) * self.multiple


def layout_of(spec: Experiment) -> Layout:
    on, train, data, unsloth = spec.optimizations, spec.train, spec.dataset, spec.method.name == "unsloth"
    flat = on.packing or on.padding_free or concatenates(spec)
    size, passes = train.batch_size * spec.objective.sequences, train.gradient_accumulation_steps
    seen = None if train.max_steps is None else train.max_steps * size * passes
    # unsloth drops the mask if padding is on the right: with causal attention, no token attends to this padding
    return Layout(
        size, data.max_length, on.packing, flat, on.fixed_shape, on.length_grouping,
        data.longest_first or on.length_grouping, seen, on.attention in BOUNDARIES or (unsloth and flat), unsloth,
        spec.objective.sequences, FLEX_BLOCK if unsloth and family(spec.model) == "gpt_oss" else 1,
    )  # fmt: skip


def concatenates(spec: Experiment) -> bool:
    """Return whether unsloth concatenates the samples of a batch by default, without padding.

    Since December 2025, unsloth concatenates text samples, except for Gemma 2 and gpt_oss (unsloth/trainer.py,
    PADDING_FREE_BLOCKLIST). unsloth may pad small steps (utils/padding_choice.py), which estimates ignore."""
    if not isinstance(spec.method, Unsloth) or spec.method.padded or spec.optimizations.fixed_shape:
        return False
    return not spec.dataset.has_images and family(spec.model) not in ("gemma2", "gpt_oss")


@dataclass(frozen=True, slots=True)
class Batch:
    """The mean of a group of similar micro-batches. `weight` is the group's share of all micro-batches, from 0 to 1.

    `positions` counts tokens and padding, and `real` only tokens. `square` is the number of query-key pairs per layer
    without a window. With `masked`, attention computes all query-key pairs instead of the causal half. `joined` is the
    number of concatenated samples. `patches` and `tiles` are the numbers of image patches and image tiles."""

    weight: float
    samples: float
    positions: float
    real: float
    labels: float
    square: float
    masked: bool
    joined: float = 0.0
    patches: float = 0.0
    tiles: float = 0.0


def batches_of(spec: Experiment, lengths: Lengths) -> tuple[Batch, ...]:
    """Return at most CLASSES mean micro-batches of a spec. Each is the mean of a group of similar micro-batches."""
    groups = _batches(lengths, layout_of(spec))
    if not lengths.patches:
        return groups
    return tuple(
        replace(each, patches=each.samples * lengths.patches, tiles=each.samples * lengths.tiles) for each in groups
    )


def per_step(spec: Experiment, batches: Sequence[Batch], name: str) -> float:
    """Return the mean of a `Batch` field per step: the mean per micro-batch times the gradient accumulation steps."""
    passes = spec.train.gradient_accumulation_steps
    return passes * sum(batch.weight * float(getattr(batch, name)) for batch in batches)


def mean_batch(
    spec: Experiment, samples: float, positions: float, real: float, labels: float, of_a_token: float
) -> Batch:
    """Return the mean micro-batch of a finished run, computed from the run's mean values.

    `of_a_token` is the mean sample length, weighted by tokens: a sample of n tokens counts n times."""
    on, padded = spec.optimizations, positions > real * 1.0001
    if on.attention in BOUNDARIES:
        return Batch(1.0, samples, positions, real, labels, real * of_a_token, False)
    if on.packing or on.padding_free:
        return Batch(1.0, samples, positions, real, labels, positions**2, padded or samples > 1)
    masked = padded and spec.method.name != "unsloth"
    square = positions**2 / (samples * spec.objective.sequences)
    return Batch(1.0, samples, positions, real, labels, square, masked)


@lru_cache(maxsize=4096)
def _batches(lengths: Lengths, layout: Layout) -> tuple[Batch, ...]:
    rows, size = _rows(lengths, layout.packing, layout.size if layout.grouping else 0, layout.max_length), layout.size
    rows = np.tile(rows, -(-size // rows.shape[1]))  # repeat the samples if they are too few for a batch
    count = rows.shape[1] // size
    columns = _laid_out(layout, rows[:, : count * size].reshape(3, count, size), rows[0].max())
    columns = columns[:, np.argsort(columns[0], kind="stable")]
    classes = 1 if columns[0, 0] == columns[0, -1] else min(CLASSES, count)
    groups = itertools.pairwise(-(-count * index // classes) for index in range(classes + 1))
    return tuple(_mean(columns[:, a:b], (b - a) / count, lengths.labels) for a, b in groups)


def _mean(columns: npt.NDArray[np.float64], weight: float, labels: float) -> Batch:
    positions, samples, real, square, masked, joined = (columns.sum(axis=1) / columns.shape[1]).tolist()
    return Batch(weight, samples, positions, real, real * labels, square, masked > 0.5, joined)


@lru_cache(maxsize=64)
def _rows(lengths: Lengths, packing: bool, grouping: int, max_length: int) -> npt.NDArray[np.float64]:
    """Return an array (3, rows) in batch order: each row's tokens, sum of squared sample lengths, number of samples.

    With length grouping, `grouping` is the batch size. Otherwise `grouping` is 0."""
    values = np.asarray(lengths.values, dtype=float)
    if packing:
        rows = packed(lengths.values, max_length)
        counts = [len(row) for row in rows]
        starts, values = np.cumsum([0, *counts[:-1]]), values[list(itertools.chain(*rows))]
        return np.stack([np.add.reduceat(values, starts), np.add.reduceat(values**2, starts), np.asarray(counts)])
    if grouping:
        windows = length_windows(lengths.values, grouping)
        values = values[[index for window in windows for batch in window for index in batch]]
    return np.stack([values, values**2, np.ones_like(values)])


def _laid_out(layout: Layout, rows: npt.NDArray[np.float64], longest: float) -> npt.NDArray[np.float64]:
    """Return an array (6, batches) with the `Batch` fields positions, samples, real, square, masked and joined.

    The batches equal the batches of `worker/data/collate.py`. `rows` contains the values of `_rows` in the shape (3,
    batches, rows per batch)."""
    real, squares, samples = rows.sum(axis=2)
    wide = np.full_like(real, longest) if layout.fixed else layout.width(rows[0].max(axis=1))
    positions = real if layout.flat and not layout.fixed else np.maximum(real, wide * layout.size)
    padded, nothing = positions > real, np.zeros_like(real)
    joined = samples if layout.flat else nothing
    if layout.boundaries:
        return np.stack([positions, samples, real, squares, nothing, joined])
    if layout.flat:
        return np.stack([positions, samples, real, positions**2, (samples > 1) | padded, joined])
    masked = nothing if layout.unmasked else padded
    return np.stack([positions, samples // layout.sequences, real, layout.size * wide**2, masked, joined])


def epochs_samples(spec: Experiment, per_step: float) -> float | None:
    """Return the number of samples that a spec trains in total, or None if the data set's size is unknown.

    `per_step` is the number of samples per optimizer step. With packed rows, `per_step` exceeds the batch size."""
    if spec.train.max_steps is not None:
        return spec.train.max_steps * per_step
    samples = spec.dataset.samples
    return None if samples is None else samples * spec.train.epochs

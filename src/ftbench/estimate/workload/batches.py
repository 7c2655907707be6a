"""Mean micro-batches of a spec before its data is read. They decide the time of a step."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter
from typing import TypeAlias

from ftbench.estimate.workload.lengths import Lengths
from ftbench.spec.batches import length_windows, packed
from ftbench.spec.experiment import Experiment
from ftbench.spec.methods import Unsloth, family

CLASSES = 8  # groups of micro-batches of similar size, because time is not proportional to size
BOUNDARIES = (
    "varlen",
    "flash_attention_2",
    "flash_attention_3",
    "flex_attention",
)  # kernels that know sample ends

Column: TypeAlias = tuple[int, ...]  # one value per row
LaidOut: TypeAlias = tuple[int, int, int, int, bool, int]  # positions, samples, real tokens, pairs, masked, joined


@dataclass(frozen=True, slots=True)
class Layout:
    """How samples become batches of `size` rows.

    Rows are concatenated (`flat`), also until they are full (`packing`), or padded to one shape (`fixed`). Samples
    have similar lengths (`grouping`) or are sorted by length, longest first (`ordered`). `seen` is the number of
    samples that are trained if the number of steps is limited. The attention kernel knows sample boundaries
    (`boundaries`), or gets no mask for padding (`unmasked`). A sample has `sequences` rows."""

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


def layout_of(spec: Experiment) -> Layout:
    on, train, data, unsloth = spec.optimizations, spec.train, spec.dataset, spec.method.name == "unsloth"
    flat = on.packing or on.padding_free or concatenates(spec)
    size, passes = train.batch_size * spec.objective.sequences, train.gradient_accumulation_steps
    seen = None if train.max_steps is None else train.max_steps * size * passes
    # unsloth drops the mask of a batch that is padded on the right: a causal kernel never looks there
    return Layout(
        size, data.max_length, on.packing, flat, on.fixed_shape, on.length_grouping,
        data.longest_first or on.length_grouping, seen, on.attention in BOUNDARIES or (unsloth and flat), unsloth,
        spec.objective.sequences,
    )  # fmt: skip


def concatenates(spec: Experiment) -> bool:
    """Return whether unsloth makes padding-free batches by itself.

    It does so for text since December 2025, except for Gemma 2 and gpt_oss (unsloth/trainer.py,
    PADDING_FREE_BLOCKLIST). Its rule for small steps (utils/padding_choice.py) is not modelled."""
    if not isinstance(spec.method, Unsloth) or spec.method.padded or spec.optimizations.fixed_shape:
        return False
    return not spec.dataset.has_images and family(spec.model) not in ("gemma2", "gpt_oss")


@dataclass(frozen=True, slots=True)
class Batch:
    """The mean micro-batch of a group with share `weight` of all micro-batches.

    `positions` include padding. `square` is the number of query-key pairs per layer without a window. If `masked`,
    attention computes all pairs with a mask instead of the causal half. Rows hold `joined` samples one after the other.
    An encoder reads `patches` of images in `tiles`."""

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
    """Return the micro-batches of a spec in at most CLASSES groups of similar size."""
    groups = _batches(lengths, layout_of(spec))
    if not lengths.patches:
        return groups
    return tuple(
        replace(each, patches=each.samples * lengths.patches, tiles=each.samples * lengths.tiles) for each in groups
    )


def per_step(spec: Experiment, batches: Sequence[Batch], name: str) -> float:
    """Return the sum of a field over all micro-batches of an optimizer step, on average."""
    passes = spec.train.gradient_accumulation_steps
    return passes * sum(batch.weight * float(getattr(batch, name)) for batch in batches)


def mean_batch(
    spec: Experiment, samples: float, positions: float, real: float, labels: float, of_a_token: float
) -> Batch:
    """Return the micro-batch of a run from its means.

    `of_a_token` is the mean length of a sample, weighted by tokens."""
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
    totals, squares, counts = _rows(lengths, layout.packing, layout.size if layout.grouping else 0, layout.max_length)
    size, more = layout.size, -(-layout.size // len(totals))
    if more > 1:  # too few samples for a batch: repeat them
        totals, squares, counts = totals * more, squares * more, counts * more
    count = len(totals) // size
    longest = max(totals)
    starts = range(0, count * size, size)
    laid = [
        _laid_out(layout, totals[at : at + size], squares[at : at + size], counts[at : at + size], longest)
        for at in starts
    ]
    laid.sort(key=itemgetter(0))
    classes = 1 if laid[0][0] == laid[-1][0] else min(CLASSES, count)
    edges = [-(-count * index // classes) for index in range(classes + 1)]
    return tuple(_mean(laid[a:b], (b - a) / count, lengths.labels) for a, b in itertools.pairwise(edges))


def _mean(laid: Sequence[LaidOut], weight: float, labels: float) -> Batch:
    positions, samples, real, square, masked, joined = (sum(column) / len(laid) for column in zip(*laid, strict=True))
    return Batch(weight, samples, positions, real, real * labels, square, masked > 0.5, joined)


@lru_cache(maxsize=64)
def _rows(lengths: Lengths, packing: bool, grouping: int, max_length: int) -> tuple[Column, Column, Column]:
    """Return for each row its tokens, the sum of squared sample lengths, and its samples, in batch order.

    `grouping` is the size of batches with samples of similar length, or 0."""
    values = lengths.values
    if packing:
        rows = [[values[index] for index in row] for row in packed(values, max_length)]
        squares = tuple(sum([length * length for length in row]) for row in rows)
        return tuple(map(sum, rows)), squares, tuple(map(len, rows))
    if grouping:
        windows = length_windows(values, grouping)
        values = tuple([values[index] for window in windows for batch in window for index in batch])
    return values, tuple([length * length for length in values]), (1,) * len(values)


def _laid_out(layout: Layout, totals: Column, squares: Column, counts: Column, longest: int) -> LaidOut:
    """Return the layout of a batch, as in `worker/data/collate.py`."""
    real, samples, wide = sum(totals), sum(counts), longest if layout.fixed else max(totals)
    positions = real if layout.flat and not layout.fixed else max(real, wide * layout.size)
    joined = samples if layout.flat else 0
    if layout.boundaries:
        return positions, samples, real, sum(squares), False, joined
    if layout.flat:
        return positions, samples, real, positions * positions, samples > 1 or positions > real, joined
    masked = positions > real and not layout.unmasked
    return positions, samples // layout.sequences, real, layout.size * wide * wide, masked, 0

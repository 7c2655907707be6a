"""The order in which samples are trained on, and what shares a row."""

import hashlib
from collections.abc import Sequence
from itertools import cycle, islice

import numpy as np

from ftbench.errors import SpecError
from ftbench.families.vision import NOTHING
from ftbench.spec import batches as plans
from ftbench.spec.experiment import Experiment
from ftbench.worker.data.pixels import Pixels
from ftbench.worker.data.tokens import Tokens

Row = list[Tokens]


def rows(samples: Sequence[Tokens]) -> list[Row]:
    """Return a row a sample: its sequences, which are two of a pair."""
    return [sample.sequences for sample in samples]


def packed(samples: Sequence[Tokens], max_length: int) -> list[Row]:
    """Return rows of at most `max_length` tokens filled with whole samples, in the order of their first sample."""
    return [[samples[index] for index in row] for row in plans.packed(_lengths(samples), max_length)]


def grouped(samples: Sequence[Tokens], batch_size: int, seed: int) -> list[Tokens]:
    """Return batches of samples of like length, in an order in which length does not follow the step."""
    return [samples[index] for index in plans.grouped(_lengths(samples), batch_size, seed)]


def bucketed(samples: Sequence[Tokens], pixels: Pixels, batch_size: int, seed: int) -> list[Tokens]:
    """Return batches of samples whose images have equally many patches, which are equally many tiles where images are
    cut into some."""
    patches = [sum((pixels.size(picture) for picture in sample.pictures), NOTHING).patches for sample in samples]
    return [samples[index] for index in plans.bucketed(patches, batch_size, seed)]


def _lengths(samples: Sequence[Tokens]) -> list[int]:
    return [sample.longest for sample in samples]


def longest_first(samples: Sequence[Tokens], batch_size: int) -> list[Tokens]:
    """Return the `batch_size` longest samples, then the others in their order. Raises SpecError where there are too
    few to fill a batch: a smaller one would need less memory than was asked about."""
    if len(samples) < batch_size:
        raise SpecError(
            f"train.batch_size {batch_size} with dataset.longest_first needs as many samples and there are "
            f"{len(samples):,}: raise dataset.samples"
        )
    order = sorted(range(len(samples)), key=lambda index: -samples[index].longest)
    first = order[:batch_size]
    return [samples[index] for index in (*first, *sorted(order[batch_size:]))]


def filled(rows: Sequence[Row], size: int) -> list[Row]:
    """Return the rows with as many without a sample behind them as make a multiple of `size`: every rank takes as many
    batches, and no sample twice."""
    return [*rows, *([] for _ in range(-len(rows) % size))]


def token_hash(rows: Sequence[Row], spec: Experiment, count: int, dealt: slice = slice(None)) -> str:
    """Return the recorder's hash of the first `count` batches, or of those that are `dealt` to one share; pass after
    pass where the data are fewer."""
    size = spec.train.batch_size
    whole = filled(rows, size * spec.launch.shares)
    batches = [whole[at : at + size] for at in range(0, len(whole), size)]
    digest = hashlib.sha256()
    for batch in islice(cycle(batches[dealt]), count):
        samples = [sample for row in batch for sample in row]
        for sample in samples:
            digest.update(np.asarray(sample.ids, dtype=np.int64).tobytes())
        for picture in (picture for sample in samples for picture in sample.pictures):
            digest.update(picture.key.encode())
    return digest.hexdigest()


def verify(rows: Sequence[Row], spec: Experiment, count: int, order_hash: str, rank: int) -> list[str]:
    """Return that a rank was not trained on its share of the rows in their order, where its `count` batches say so."""
    shares = spec.launch.shares
    share = rank * shares // spec.launch.ranks
    if order_hash == token_hash(rows, spec, count, slice(share, None, shares)):
        return []
    return [f"rank {rank} was not trained on share {share + 1} of {shares} of the data, in their order"]

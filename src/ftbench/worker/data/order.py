"""The order in which samples are trained on, and what shares a row."""

from __future__ import annotations

from collections.abc import Sequence

from ftbench.errors import SpecError
from ftbench.families.vision import NOTHING
from ftbench.spec import batches
from ftbench.worker.data.pixels import Pixels
from ftbench.worker.data.tokens import Tokens

Row = list[Tokens]


def rows(samples: Sequence[Tokens]) -> list[Row]:
    """Return a row a sample."""
    return [[sample] for sample in samples]


def packed(samples: Sequence[Tokens], max_length: int) -> list[Row]:
    """Return rows of at most `max_length` tokens filled with whole samples, in the order of their first sample."""
    return [[samples[index] for index in row] for row in batches.packed(_lengths(samples), max_length)]


def grouped(samples: Sequence[Tokens], batch_size: int, seed: int) -> list[Tokens]:
    """Return batches of samples of like length, in an order in which length does not follow the step."""
    return [samples[index] for index in batches.grouped(_lengths(samples), batch_size, seed)]


def bucketed(samples: Sequence[Tokens], pixels: Pixels, batch_size: int, seed: int) -> list[Tokens]:
    """Return batches of samples whose images have equally many patches, which are equally many tiles where images are
    cut into some."""
    patches = [sum((pixels.size(picture) for picture in sample.pictures), NOTHING).patches for sample in samples]
    return [samples[index] for index in batches.bucketed(patches, batch_size, seed)]


def _lengths(samples: Sequence[Tokens]) -> list[int]:
    return [len(sample.ids) for sample in samples]


def longest_first(samples: Sequence[Tokens], batch_size: int) -> list[Tokens]:
    """Return the `batch_size` longest samples, then the others in their order. Raises SpecError where there are too
    few to fill a batch: a smaller one would need less memory than was asked about."""
    if len(samples) < batch_size:
        raise SpecError(
            f"train.batch_size {batch_size} with dataset.longest_first needs as many samples and there are "
            f"{len(samples):,}: raise dataset.samples"
        )
    order = sorted(range(len(samples)), key=lambda index: -len(samples[index].ids))
    first = order[:batch_size]
    return [samples[index] for index in (*first, *sorted(order[batch_size:]))]

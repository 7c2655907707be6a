"""The order in which samples are trained on, and what shares a row."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

from ftbench.errors import SpecError
from ftbench.worker.data.tokens import Tokens

WINDOW = 50  # batches among which samples of like length are brought together (transformers' LengthGroupedSampler)
Row = list[Tokens]


def rows(samples: Sequence[Tokens]) -> list[Row]:
    """A row a sample."""
    return [[sample] for sample in samples]


def packed(samples: Sequence[Tokens], max_length: int) -> list[Row]:
    """Rows of at most `max_length` tokens filled with whole samples, in the order of their first sample: each sample
    goes into the row with the least room that still takes it (best fit, longest first)."""
    room: list[tuple[int, int]] = []  # what is left in each row, and which row; ascending
    found: list[list[int]] = []
    for place in sorted(range(len(samples)), key=lambda place: -len(samples[place].ids)):
        length = len(samples[place].ids)
        at = bisect.bisect_left(room, (length, 0))
        if at < len(room):
            left, row = room.pop(at)
            found[row].append(place)
        else:
            left, row = max_length, len(found)
            found.append([place])
        bisect.insort(room, (left - length, row))
    return [[samples[place] for place in sorted(row)] for row in sorted(found, key=min)]


def grouped(samples: Sequence[Tokens], batch_size: int, seed: int) -> list[Tokens]:
    """Batches of samples of like length: windows of fifty batches are sorted by length, cut into batches, and the
    batches shuffled, so that length does not follow the step."""
    random = np.random.default_rng(seed)
    result: list[Tokens] = []
    for start in range(0, len(samples), WINDOW * batch_size):
        window = sorted(samples[start : start + WINDOW * batch_size], key=lambda sample: -len(sample.ids))
        batches = [window[at : at + batch_size] for at in range(0, len(window), batch_size)]
        full = [batch for batch in batches if len(batch) == batch_size]
        order = random.permutation(len(full)).tolist()
        result += [sample for place in order for sample in full[place]]
        result += [sample for batch in batches if len(batch) < batch_size for sample in batch]
    return result


def longest_first(samples: Sequence[Tokens], batch_size: int) -> list[Tokens]:
    """The `batch_size` longest samples, then the others in their order. Raises SpecError where there are too few to
    fill a batch: a smaller one would need less memory than was asked about."""
    if len(samples) < batch_size:
        raise SpecError(
            f"train.batch_size {batch_size} with dataset.longest_first needs as many samples and there are "
            f"{len(samples):,}: raise dataset.samples"
        )
    order = sorted(range(len(samples)), key=lambda place: -len(samples[place].ids))
    first = order[:batch_size]
    return [samples[place] for place in (*first, *sorted(order[batch_size:]))]

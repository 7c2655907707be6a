"""Samples → a padded batch, counting what goes into it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ftbench.worker.data.tokens import IGNORE
from ftbench.worker.recorder import BatchCount


class CountingCollator:
    """Pads on the right to the longest sample of the batch and hands the counts to `sink`, batch by batch."""

    def __init__(self, pad_token_id: int, sink: Callable[[BatchCount], None]) -> None:
        self._pad = pad_token_id
        self._sink = sink

    def __call__(self, samples: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        ids = [np.asarray(sample["input_ids"], dtype=np.int64) for sample in samples]
        longest = max(map(len, ids))
        shape = (len(ids), longest)
        input_ids = np.full(shape, self._pad, dtype=np.int64)
        mask = np.zeros(shape, dtype=np.int64)
        labels = np.full(shape, IGNORE, dtype=np.int64)
        for row, sample in enumerate(samples):
            n = len(ids[row])
            input_ids[row, :n] = ids[row]
            mask[row, :n] = 1
            labels[row, :n] = sample["labels"]
        self._sink(
            BatchCount(
                real=sum(map(len, ids)),
                padded=len(ids) * longest,
                labels=int((labels[:, 1:] != IGNORE).sum()),
                samples=len(ids),
                longest=longest,
                tokens=[row.tobytes() for row in ids],
            )
        )
        return {
            "input_ids": torch.from_numpy(input_ids),
            "attention_mask": torch.from_numpy(mask),
            "labels": torch.from_numpy(labels),
        }

"""Count the tokens, samples and images of a batch or a step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ftbench.families.vision import NOTHING, ImageSize

BEFORE_FORWARD = ("generation", "scoring")  # parts of a GRPO step before the forward pass
Shape = tuple[int, int, int]  # of a batch: number of sequences, longest sequence, padded tokens
COUNT = "count"  # key of the BatchCount in a batch


@dataclass(slots=True)
class BatchCount:
    """Token, sample and image counts of one batch. `add` sums the counts over a step."""

    real: int = 0  # tokens without padding
    padded: int = 0
    labels: int = 0
    samples: int = 0
    longest: int = 0
    images: int = 0
    of_images: ImageSize | None = None  # None: the batches of this run cannot have images
    sequences: int = 1  # sequences per sample: 2 for preference pairs
    rewards: tuple[float, float] | None = None  # for pairs: sums of reward accuracy and margin
    generation: dict[str, float] = field(default_factory=dict)  # for GRPO: more columns of steps.csv
    tokens: list[bytes] = field(default_factory=list)  # real tokens and image keys, for the order hash

    def add(self, other: BatchCount) -> None:
        """Add the counts of another batch in the same step, but not its list `tokens`."""
        self.real += other.real
        self.padded += other.padded
        self.labels += other.labels
        self.samples += other.samples
        self.longest = max(self.longest, other.longest)
        self.images += other.images
        self.of_images = other.of_images and other.of_images + (self.of_images or NOTHING)
        if other.rewards:
            before = self.rewards or (0.0, 0.0)
            self.rewards = before[0] + other.rewards[0], before[1] + other.rewards[1]
        self.generation |= other.generation

    def columns(self) -> dict[str, Any]:
        """Return the counts by column name of steps.csv. Return an empty dictionary if nothing was counted."""
        if not self.padded:
            return {}
        columns = {"real_tokens": self.real, "padded_tokens": self.padded, "label_tokens": self.labels,
                   "samples": self.samples, "longest_sequence": self.longest, **self.generation}  # fmt: skip
        if self.rewards and self.samples:
            columns |= {"reward_accuracy": self.rewards[0] / self.samples,
                        "reward_margin": self.rewards[1] / self.samples}  # fmt: skip
        if seen := self.of_images:
            columns |= {"images": self.images, "tiles": seen.tiles, "image_patches": seen.patches,
                        "image_tokens": seen.tokens, "text_tokens": self.real - seen.tokens}  # fmt: skip
        return columns


def count_of(rows: Sequence[np.ndarray], padded: int, labels: int) -> BatchCount:
    """Return the counts of a batch. `rows` contains the token ids of each sample without padding. `padded` is the
    number of computed positions, including padding. `labels` is the number of positions with a loss."""
    longest = max(map(len, rows), default=0)
    tokens = [row.tobytes() for row in rows]
    return BatchCount(sum(map(len, rows)), padded, labels, len(rows), longest, tokens=tokens)


def padding_of(shapes: Collection[Shape]) -> str | None:
    """Return how batches of these shapes are padded, such as `to a multiple of 8`. Return None without shapes."""
    widths = {(longest, tokens / samples) for samples, longest, tokens in shapes if samples and longest}
    if any(width < longest for longest, width in widths):
        return "samples end to end"
    if all(width == longest for longest, width in widths):
        return "to the longest of a batch" if widths else None
    if len({width for _, width in widths}) == 1:
        return f"to {next(iter(widths))[1]:g} tokens"
    multiples = (8, 16, 32, 64, 128, 256)
    fitting = (m for m in multiples if all(width == -(-longest // m) * m for longest, width in widths))
    return f"to a multiple of {multiple}" if (multiple := next(fitting, 0)) else "otherwise"

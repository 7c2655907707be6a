"""What is in one batch, and in all batches of a step together."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from ftbench.families.vision import NOTHING, ImageSize

# columns that are no whole numbers
FLOATS = ("loss", "grad_norm", "reward_accuracy", "reward_margin", "reward", "generation_peak_gb")
BEFORE_FORWARD = ("generation", "scoring")  # of a step that makes its own batches: columns of their seconds
Shape = tuple[int | None, int | None, int]  # of a batch: its sequences, the longest of them, its tokens with padding
COUNT = "count"  # the key of a batch under which its counts travel, also from another process


@dataclass(slots=True)
class BatchCount:
    """Counts of tokens and samples, and the bytes of the real tokens and of what tells images apart, in order, where
    the host has them. `real` and `labels` may be tensors on the device; `samples` and `longest` are None where rows
    hold an unknown number; of `images` there are none in text, and `pictures` tells them apart, in order. A sample is
    so many `sequences`; `rewards` of pairs are the sums of their accuracy and margin. `generation` are columns of the
    completions of a step."""

    real: Any = 0
    padded: int = 0
    labels: Any = 0
    samples: int | None = 0
    longest: int | None = 0
    images: int = 0
    of_images: ImageSize = NOTHING
    pictures: tuple[str, ...] = ()
    sequences: int = 1
    rewards: tuple[float, float] | None = None
    generation: dict[str, float] = field(default_factory=dict)
    tokens: list[bytes] = field(default_factory=list)

    def add(self, other: BatchCount) -> None:
        """Add another batch of the same step, but for its tokens and pictures."""
        self.real = self.real + other.real
        self.padded += other.padded
        self.labels = self.labels + other.labels
        self.images += other.images
        self.of_images += other.of_images
        if other.rewards:
            before = self.rewards or (0.0, 0.0)
            self.rewards = before[0] + other.rewards[0], before[1] + other.rewards[1]
        self.generation |= other.generation
        known = self.samples is not None and other.samples is not None
        self.samples = (self.samples or 0) + (other.samples or 0) if known else None
        self.longest = max(self.longest or 0, other.longest or 0) if known else None

    def columns(self) -> dict[str, Any]:
        """Return the counts by their column of steps.csv; empty where nothing was counted."""
        if not self.padded:
            return {}
        columns = {"real_tokens": self.real, "padded_tokens": self.padded, "label_tokens": self.labels,
                   "samples": self.samples, "longest_sequence": self.longest, **self.generation}  # fmt: skip
        if self.rewards and self.samples:
            columns |= {"reward_accuracy": self.rewards[0] / self.samples,
                        "reward_margin": self.rewards[1] / self.samples}  # fmt: skip
        if self.images:
            seen = self.of_images
            columns |= {"images": self.images, "tiles": seen.tiles, "image_patches": seen.patches,
                        "image_tokens": seen.tokens, "text_tokens": self.real - seen.tokens}  # fmt: skip
        return columns


def padding_of(shapes: Collection[Shape]) -> str | None:
    """Return in words how batches were padded; None where none says."""
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


def numbers(columns: dict[str, Any]) -> dict[str, Any]:
    """Return the values of columns as steps.csv holds them."""
    return {name: number(name, value) for name, value in columns.items()}


def number(name: str, value: Any) -> Any:
    """Return a column's value as steps.csv holds it: tokens are whole numbers; None stays unknown."""
    if value is None:
        return None
    return float(value) if name in FLOATS else int(value)

"""Batches of one shape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ftbench.spec.optimizations.declaration import ROUNDING, Optimization, Tolerance

if TYPE_CHECKING:
    from ftbench.spec.experiment import Experiment


def _refusals(spec: Experiment) -> Iterator[str]:
    if spec.optimizations.padding_free:
        yield "optimizations.fixed_shape pads and padding_free does not: choose one, or packing"


OPTIMIZATION = Optimization(
    description="pad every batch to the longest sample of the data set: one shape, one compiled graph",
    verified="one shape was counted",
    tolerance=Tolerance(ROUNDING),
    refusals=_refusals,
    beside={True: {"optimizations.compile": True}},
)

"""Packing: rows filled with whole samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ftbench.spec.optimizations.declaration import COARSE, Optimization, Tolerance

if TYPE_CHECKING:
    from ftbench.spec.experiment import Experiment


def _refusals(spec: Experiment) -> Iterator[str]:
    if spec.optimizations.padding_free:
        yield "optimizations.packing lays samples end to end already: set padding_free to off"
    if spec.dataset.longest_first:
        yield "optimizations.packing fills every row: dataset.longest_first says nothing there"


OPTIMIZATION = Optimization(
    description="fill rows of max_length with whole samples, each seeing only itself; batch_size counts rows",
    verified="no padded position was counted",
    tolerance=Tolerance(COARSE, another_order=True),
    refusals=_refusals,
)

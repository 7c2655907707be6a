"""Batches of samples of like length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ftbench.spec.optimizations.declaration import COARSE, Optimization, Tolerance

if TYPE_CHECKING:
    from ftbench.spec.experiment import Experiment


def _refusals(spec: Experiment) -> Iterator[str]:
    if spec.optimizations.packing or spec.optimizations.fixed_shape:
        yield "optimizations.length_grouping saves padding that packing and fixed_shape leave no room for"
    if spec.dataset.longest_first:
        yield "optimizations.length_grouping and dataset.longest_first both order the samples: choose one"


OPTIMIZATION = Optimization(
    description="batch samples of like length: less padding, and another order of the samples",
    verified="the counts of the batches",
    tolerance=Tolerance(COARSE, another_order=True),
    refusals=_refusals,
)

"""Batches without padding: samples end to end in one row."""

from ftbench.spec.optimizations.declaration import ROUNDING, Optimization, Tolerance

OPTIMIZATION = Optimization(
    description="lay the samples of a batch end to end in one row instead of padding them",
    verified="no padded position was counted",
    tolerance=Tolerance(ROUNDING),
    pairs="trl pads pairs (its own padding_free is switched off at present): leave it off",
)

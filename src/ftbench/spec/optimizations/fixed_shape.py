"""Batches of one shape."""

from ftbench.spec.optimizations.declaration import ROUNDING, Optimization, Tolerance

OPTIMIZATION = Optimization(
    description="pad every batch to the longest sample of the data set: one shape, one compiled graph",
    verified="one shape was counted",
    tolerance=Tolerance(ROUNDING),
    pairs="a batch that is not full would be filled up with pairs that are none: leave it off",
    excludes={
        "optimizations.padding_free": "optimizations.fixed_shape pads and padding_free does not: choose one, or packing"
    },
    beside={True: {"optimizations.compile": True}},
)

"""Packing: rows filled with whole samples."""

from ftbench.spec.optimizations.declaration import COARSE, Optimization, Tolerance

OPTIMIZATION = Optimization(
    description="fill rows of max_length with whole samples, each seeing only itself; batch_size counts rows",
    verified="no padded position was counted",
    tolerance=Tolerance(COARSE, another_order=True),
    pairs="a pair is two rows of one loss, and rows are not packed: leave it off",
    excludes={
        "optimizations.padding_free": "optimizations.packing lays samples end to end already: set padding_free to off",
        "dataset.longest_first": "optimizations.packing fills every row: dataset.longest_first says nothing there",
    },
)

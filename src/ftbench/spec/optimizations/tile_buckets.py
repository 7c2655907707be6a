"""Batches whose samples have images of equally many tiles."""

from ftbench.spec.optimizations.declaration import COARSE, Optimization, Tolerance

OPTIMIZATION = Optimization(
    description="batch samples whose images have equally many tiles (patches in Qwen's models): few shapes for the "
    "encoder, and another order of the samples",
    verified="the counts of the batches",
    tolerance=Tolerance(COARSE, another_order=True),
    images="orders images",
    excludes=dict.fromkeys(
        ("optimizations.length_grouping", "dataset.longest_first"),
        "optimizations.tile_buckets, length_grouping and dataset.longest_first each order the samples: choose one",
    ),
)

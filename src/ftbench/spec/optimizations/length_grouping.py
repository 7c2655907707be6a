"""Batches of samples of like length."""

from ftbench.spec.optimizations.declaration import COARSE, Optimization, Tolerance

OPTIMIZATION = Optimization(
    description="batch samples of like length: less padding, and another order of the samples",
    verified="the counts of the batches",
    tolerance=Tolerance(COARSE, another_order=True),
    pairs=None,
    excludes={
        **dict.fromkeys(
            ("optimizations.packing", "optimizations.fixed_shape"),
            "optimizations.length_grouping saves padding that packing and fixed_shape leave no room for",
        ),
        "dataset.longest_first": "optimizations.length_grouping and dataset.longest_first both order the samples: "
        "choose one",
    },
)

"""Optimizations of how samples become batches, and of how images are processed."""

from typing import Annotated

from ftbench.spec.optimizations.declaration import COARSE, EXACT, ROUNDING, Optimization, Tolerance, or_number

OPTIMIZATIONS = {
    "packing": Optimization(
        description="fill rows of max_length with several samples; each sample attends only to itself; batch_size "
        "counts rows",
        verified="no padded position was counted",
        tolerance=Tolerance(COARSE, another_order=True),
        not_with_dpo="the two answers of a pair need separate rows: set it to off",
        excludes={
            "optimizations.padding_free": "optimizations.packing already removes the padding: set padding_free to off",
            "dataset.longest_first": "optimizations.packing fills every row, so dataset.longest_first has no effect: "
            "set it to off",
        },
    ),
    "padding_free": Optimization(
        description="concatenate the samples of a batch in one row instead of padding them",
        verified="no padded position was counted",
        tolerance=Tolerance(ROUNDING),
        not_with_dpo="trl pads pairs (its padding_free is currently switched off): set it to off",
    ),
    "fixed_shape": Optimization(
        description="pad every batch to the longest sample of the dataset: one shape, one compiled graph",
        verified="one batch shape was counted",
        tolerance=Tolerance(ROUNDING),
        not_with_dpo="an incomplete batch would be filled with pairs that do not exist: set it to off",
        excludes={
            "optimizations.padding_free": "optimizations.fixed_shape pads and padding_free does not: choose one, or "
            "packing"
        },
        ablate_with={True: {"optimizations.compile": True}},
    ),
    "length_grouping": Optimization(
        description="batch samples of similar length: less padding, another sample order",
        verified="the token counts of the batches",
        tolerance=Tolerance(COARSE, another_order=True),
        not_with_dpo=None,
        excludes={
            **dict.fromkeys(
                ("optimizations.packing", "optimizations.fixed_shape"),
                "optimizations.length_grouping has no effect with packing or fixed_shape: choose one",
            ),
            "dataset.longest_first": "optimizations.length_grouping and dataset.longest_first both order the samples: "
            "choose one",
        },
    ),
    "loader_processes": Optimization(
        type=Annotated[bool | int, or_number("a number of processes", 1, 64)],
        description="build batches and process images in worker processes, two batches ahead each; a number sets how "
        "many (on: 4)",
        verified="the trainer's data loader has this many workers",
        tolerance=Tolerance(EXACT),
        not_with_dpo=None,
    ),
    "image_cache": Optimization(
        description="process images once before training and keep them on disk, so that no step waits for them",
        verified="all images of a batch come from the disk cache",
        tolerance=Tolerance(EXACT),
        needs_images=True,
    ),
    "image_size": Optimization(
        type=Annotated[bool | int, or_number("the longest side of an image in pixels", 28, 8192, also="off")],
        description="scale images down until the longest side has this many pixels, and do not split larger ones into "
        "tiles: fewer tokens, less detail",
        verified="the number of tiles per image; images are scaled in the processor",
        tolerance=Tolerance(COARSE),
        needs_images=True,
        not_ablated=(True,),
    ),
}

"""Batches that are made in processes of their own."""

from typing import Annotated

from ftbench.spec.optimizations.declaration import EXACT, Optimization, Tolerance, or_number

OPTIMIZATION = Optimization(
    type=Annotated[bool | int, or_number("a number of processes", 1, 64)],
    description="make batches, and process their images, in processes beside the training, two batches each ahead; a "
    "number is how many (on is 4)",
    verified="the trainer's loader has as many processes",
    tolerance=Tolerance(EXACT),
    pairs=None,
)

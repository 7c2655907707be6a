"""Batches that are made in processes of their own."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator

from ftbench.spec.optimizations.declaration import EXACT, Optimization, Tolerance


def _or_processes(value: object) -> object:
    if not isinstance(value, bool) and not (isinstance(value, int) and 1 <= value <= 64):
        raise ValueError("must be on, off or a number of processes, 1 to 64")
    return value


OPTIMIZATION = Optimization(
    type=Annotated[bool | int, BeforeValidator(_or_processes)],
    description="make batches, and process their images, in processes beside the training, two batches each ahead; a "
    "number is how many (on is 4)",
    verified="the trainer's loader has as many processes",
    tolerance=Tolerance(EXACT),
    pairs=None,
    unsimulated="batches are made in other processes",
)

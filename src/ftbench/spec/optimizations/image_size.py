"""Images of fewer pixels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from ftbench.spec.optimizations.declaration import COARSE, Optimization, Tolerance, or_number

if TYPE_CHECKING:
    from ftbench.spec.experiment import Experiment


def _refusals(spec: Experiment) -> Iterator[str]:
    if not spec.dataset.may_have_images:
        yield f"optimizations.image_size scales images, and {spec.dataset.name} has none: leave it off"


OPTIMIZATION = Optimization(
    type=Annotated[bool | int, or_number("the pixels of an image's longest side", 28, 8192, also="off")],
    description="scale images down until their longest side has this many pixels, and cut no larger ones into tiles: "
    "fewer tokens, and less to see",
    verified="the tiles that the model cuts images into; images are scaled where they are processed",
    tolerance=Tolerance(COARSE),
    unsloth="its image models are not measured here: leave it off",
    refusals=_refusals,
    not_ablated=(True,),
)

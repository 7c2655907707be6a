"""Images of fewer pixels."""

from typing import Annotated

from ftbench.spec.optimizations.declaration import COARSE, Optimization, Tolerance, or_number

OPTIMIZATION = Optimization(
    type=Annotated[bool | int, or_number("the pixels of an image's longest side", 28, 8192, also="off")],
    description="scale images down until their longest side has this many pixels, and cut no larger ones into tiles: "
    "fewer tokens, and less to see",
    verified="the tiles that the model cuts images into; images are scaled where they are processed",
    tolerance=Tolerance(COARSE),
    images="scales images",
    not_ablated=(True,),
)

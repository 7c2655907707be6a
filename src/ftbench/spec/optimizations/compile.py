"""torch.compile on each layer."""

from typing import Annotated, Literal

from ftbench.spec.optimizations.declaration import ROUNDING, Optimization, Tolerance, or_words

OPTIMIZATION = Optimization(
    type=Annotated[bool | Literal["dynamic", "lean"], or_words("dynamic", "lean")],
    description="torch.compile each layer of the decoder, and of what reads images: faster steps, a slow start, again "
    "for each new shape; dynamic compiles for all lengths at once, lean keeps nothing for the backward pass that is "
    "made again without a product: norms, an MLP's activation",
    verified="every layer is compiled and graphs were counted",
    tolerance=Tolerance(ROUNDING),
    pairs=None,
    unsloth="it compiles what it rewrites itself: leave it off",
    after=("liger",),  # a layer as Liger rewrote it
    not_ablated=("lean",),  # it is for memory, and no faster
)

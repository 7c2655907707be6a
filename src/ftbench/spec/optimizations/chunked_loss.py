"""The loss over chunks of the label tokens."""

from typing import Annotated

from ftbench.spec.optimizations.declaration import ROUNDING, Optimization, Tolerance, or_number

OPTIMIZATION = Optimization(
    type=Annotated[bool | int, or_number("the label tokens of a chunk", 16, 1 << 20)],
    description="loss over chunks of the label tokens and its gradient at once, without trl's metrics and waits; a "
    "number is the tokens of a chunk (on is 2048): fewer need less memory",
    verified="the model's forward is ours",
    tolerance=Tolerance(ROUNDING),
    pairs="it is the loss of answers alone: leave it off",
    unsloth="it has a fused loss of its own: leave it off",
)

"""The loss over chunks of the label tokens."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator

from ftbench.spec.optimizations.declaration import ROUNDING, Optimization, Tolerance


def _or_tokens(value: object) -> object:
    number = isinstance(value, int) and 16 <= value <= 1 << 20
    if not isinstance(value, bool) and not number:
        raise ValueError("must be on, off or the label tokens of a chunk, 16 to 1,048,576")
    return value


OPTIMIZATION = Optimization(
    type=Annotated[bool | int, BeforeValidator(_or_tokens)],
    description="loss over chunks of the label tokens and its gradient at once, without trl's metrics and waits; a "
    "number is the tokens of a chunk (on is 2048): fewer need less memory",
    verified="the model's forward is ours",
    tolerance=Tolerance(ROUNDING),
    pairs="it is the loss of answers alone: leave it off",
    unsloth="it has a fused loss of its own: leave it off",
)

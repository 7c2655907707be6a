"""The gradient's product with a frozen output head in 8-bit floats."""

from collections.abc import Iterator

from ftbench.spec.base import Experiment
from ftbench.spec.optimizations.declaration import COARSE, Optimization, Tolerance


def _refusals(spec: Experiment) -> Iterator[str]:
    on = spec.optimizations
    if on.fp8 == "off" or not on.chunked_loss:
        yield "optimizations.fp8_head is a part of fp8 and of chunked_loss: set both, or set it to off"
    if on.weight_offload:
        yield "optimizations.fp8_head keeps a copy of the head on the GPU, which weight_offload does not: set it to off"


OPTIMIZATION = Optimization(
    description="the gradient of the loss in 8-bit floats, multiplied with a copy of the frozen output head in 8 bits; "
    "the logits and the loss stay as they are; not tried on a GPU so far",
    verified="the head is frozen and has its copy in 8 bits",
    tolerance=Tolerance(COARSE),
    unsloth="it has a fused loss of its own: leave it off",
    refusals=_refusals,
    not_ablated=(True,),  # beside two others, on no recipe that ships
)

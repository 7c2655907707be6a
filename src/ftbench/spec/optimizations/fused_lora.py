"""The adapters' products within the base product."""

from collections.abc import Iterator
from typing import Any

from ftbench.spec.base import Experiment
from ftbench.spec.optimizations.declaration import ROUNDING, Optimization, Tolerance


def _refusals(spec: Experiment) -> Iterator[str]:
    """Yield what its products leave out, so that it would train something else."""
    method: Any = spec.method
    name = "optimizations.fused_lora"
    if not method.adapters:
        yield f"{name} multiplies adapters and method {method.name} has none: use lora or qlora"
    if not method.adapters or method.name == "unsloth":
        return
    if method.dropout:
        yield f"{name} reads an input once for all adapters, and dropout gives each its own: set method.dropout to 0"
    if method.bias != "none":
        yield f"{name} leaves biases frozen: set method.bias to none"
    if spec.launch.sharded:
        strategy = spec.launch.strategy
        yield f"{name} keeps whole matrices on each GPU, which {strategy} would spread: set it to off, or use ddp"
    if spec.objective.name == "dpo" and spec.objective.in_step:
        yield (
            f"{name} writes the adapters anew for each forward pass, and the reference's stands between a step's "
            "forward and backward: set objective.precompute_ref_log_probs to on"
        )
    if spec.train.precision == "fp16":
        yield f"{name} goes with train.precision bf16 or fp32"


OPTIMIZATION = Optimization(
    description="the adapters' products within the base product, layers that read one input together: fewer passes "
    "over the activations",
    verified="every adapted layer multiplies so",
    tolerance=Tolerance(ROUNDING),
    pairs=None,
    unsloth="it fuses adapters itself: leave it off",
    refusals=_refusals,
    after=("fp8",),  # what a base layer is decides how its adapters are multiplied
    beside={True: {"optimizations.compile": True}},
)

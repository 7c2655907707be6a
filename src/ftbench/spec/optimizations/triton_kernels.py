"""Our own Triton kernels between the products."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ftbench.spec.optimizations.declaration import ROUNDING, Optimization, Tolerance

if TYPE_CHECKING:
    from ftbench.spec.experiment import Experiment


def _refusals(spec: Experiment) -> Iterator[str]:
    name = "optimizations.triton_kernels"
    if not spec.method.adapters:
        yield f"{name} takes norms for frozen and method {spec.method.name} trains them: use lora or qlora"
    if spec.launch.strategy not in ("none", "ddp"):
        yield f"{name} was not tried with launch.strategy {spec.launch.strategy}: set it to off, or use ddp"


OPTIMIZATION = Optimization(
    description="our own kernels for norms with the sums before them, for heads with their norms and rotation, and for "
    "the gradient of the MLP's gate, which write what a product of fused_lora reads",
    verified="every layer of the decoder computes by them",
    tolerance=Tolerance(ROUNDING),
    unsloth="it has kernels of its own: leave it off",
    excludes={"optimizations.liger": "optimizations.triton_kernels takes the place of liger's: set one of them to off"},
    refusals=_refusals,
    needs_gpu=True,
    unsimulated="its kernels are Triton's",
    after=("fused_lora", "liger"),  # whose products its buffers are for
    beside={True: {"optimizations.compile": True, "optimizations.fused_lora": True}},
)

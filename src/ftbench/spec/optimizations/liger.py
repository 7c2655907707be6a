"""Liger's Triton kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftbench.spec.optimizations.declaration import ROUNDING, Optimization, Tolerance, needs_gpu

if TYPE_CHECKING:
    from ftbench.spec.experiment import Experiment


def _unsimulated(spec: Experiment) -> tuple[str, str]:
    return "optimizations.liger: its kernels are Triton's", "optimizations.liger=off"


OPTIMIZATION = Optimization(
    description="Liger's Triton kernels: norms, rotary embedding, SwiGLU, fused loss",
    verified="modules that run a function of Liger's are counted",
    tolerance=Tolerance(ROUNDING),
    unsloth="it has kernels of its own: leave it off",
    refusals_on=needs_gpu("liger"),
    unsimulated=_unsimulated,
    after=("chunked_loss",),  # which it leaves the loss to
)

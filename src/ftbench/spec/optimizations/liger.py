"""Liger's Triton kernels."""

from ftbench.spec.optimizations.declaration import ROUNDING, Optimization, Tolerance

OPTIMIZATION = Optimization(
    description="Liger's Triton kernels: norms, rotary embedding, SwiGLU, fused loss",
    verified="modules that run a function of Liger's are counted",
    tolerance=Tolerance(ROUNDING),
    pairs="its loss is of answers alone: leave it off",
    unsloth="it has kernels of its own: leave it off",
    needs_gpu=True,
    after=("chunked_loss",),  # which it leaves the loss to
)

"""Activation offloading: what the backward pass needs waits in host memory."""

from ftbench.spec.optimizations.declaration import EXACT, Optimization, Tolerance

OPTIMIZATION = Optimization(
    description="keep what the backward pass needs in host memory (trl): less device memory, slower",
    verified="the trainer's context for it is there",
    tolerance=Tolerance(EXACT),
    unsloth="method.use_gradient_checkpointing: unsloth does that",
    excludes={
        "optimizations.gradient_checkpointing": "optimizations.activation_offload and gradient_checkpointing save the "
        "same memory: choose one",
    },
    needs_gpu=True,
)

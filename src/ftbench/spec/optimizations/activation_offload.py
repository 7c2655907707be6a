"""Activation offloading: what the backward pass needs waits in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ftbench.spec.optimizations.declaration import EXACT, Optimization, Tolerance

if TYPE_CHECKING:
    from ftbench.spec.experiment import Experiment


def _refusals(spec: Experiment) -> Iterator[str]:
    if spec.optimizations.gradient_checkpointing:
        yield "optimizations.activation_offload and gradient_checkpointing save the same memory: choose one"


OPTIMIZATION = Optimization(
    description="keep what the backward pass needs in host memory (trl): less device memory, slower",
    verified="the trainer's context for it is there",
    tolerance=Tolerance(EXACT),
    unsloth="method.use_gradient_checkpointing: unsloth does that",
    refusals=_refusals,
    needs_gpu=True,
    unsimulated="it moves tensors by streams that only a GPU has",
)

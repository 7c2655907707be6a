"""Compute the gradient of the hidden states as an 8-bit product with the output head, within the chunked loss.

The head's two products are a twelfth of a step's FLOPs (Qwen3-8B: 0.62 of 7.57 billion weights), but run at half the
speed of the layers' 8-bit products. Logits need high precision, because an error of 0.1 changes a probability by 10 %.
The gradient is a sum over all words, so rounding errors average out.
"""

from typing import Any

import torch

from ftbench.errors import SpecError
from ftbench.kernels.small_products import WEIGHT, cast
from ftbench.spec.experiment import Experiment
from ftbench.worker.model.parts import base_model
from ftbench.worker.optimizations.fp8 import MULTIPLE

ROWS = 256  # rows of the transposed head cast at a time: all at once would need 5 GB in float32 for Qwen3


def apply(model: Any, spec: Experiment) -> None:
    """Give the head a transposed copy in 8 bits. Raises SpecError for a trained head or an unsupported shape."""
    head = base_model(model).get_output_embeddings()
    weight = head.weight.detach()
    if any(parameter.requires_grad for parameter in head.parameters()) or any(side % MULTIPLE for side in weight.shape):
        raise SpecError(
            f"optimizations.fp8_head takes a frozen head whose sides are multiples of {MULTIPLE}, and this one is "
            f"{' x '.join(map(str, weight.shape))}{' and trained' if head.weight.requires_grad else ''}: set it to off"
        )
    largest = weight.abs().amax()
    parts, factors = zip(*(cast(part, WEIGHT, "tensorwise", largest) for part in weight.t().split(ROWS)), strict=True)
    head.register_buffer("of_gradient", torch.cat(parts), persistent=False)
    head.register_buffer("of_gradient_factor", factors[0], persistent=False)


def verify(model: Any, spec: Experiment) -> list[str]:
    head = base_model(model).get_output_embeddings()
    if spec.optimizations.fp8_head and (not hasattr(head, "of_gradient") or head.weight.requires_grad):
        return ["optimizations.fp8_head is on, but the head is trained or lacks its 8-bit copy"]
    return []

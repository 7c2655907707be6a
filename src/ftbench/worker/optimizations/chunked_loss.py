"""The loss over chunks of the label tokens, with no wait for the device.

trl's own chunked loss counts the label tokens on the device, waits for the count, and computes entropy and accuracy,
which wait again. Here the collator has counted already and says where they stand; logits of one chunk are alive at a
time, and are made again in the backward pass.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import CausalLMOutputWithPast

from ftbench.errors import SpecError
from ftbench.spec.experiment import Experiment
from ftbench.worker.data.tokens import IGNORE

CHUNK = 2048  # label tokens; x 152k words x 4 bytes is 1.2 GB of logits
POSITIONS = "label_positions"  # the batch's key: where in the flattened labels a label stands


def apply(model: Any, spec: Experiment) -> None:
    """Gives the base model a forward pass that ends in the loss. Raises SpecError for a model whose logits are more
    than a product with the head."""
    asked = spec.optimizations.chunked_loss
    if asked is False:
        return
    base = _base(model)
    text = base.config.get_text_config()
    if getattr(text, "final_logit_softcapping", None) or getattr(text, "logit_scale", None):
        raise SpecError(
            f"optimizations.chunked_loss does not know how {type(base).__name__} scales its logits: leave it off"
        )
    base.forward = MethodType(_forward(base.forward, CHUNK if asked is True else asked), base)


def _base(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _forward(original: Any, chunk: int) -> Any:
    def chunked_forward(
        self: Any, input_ids: Any = None, labels: Any = None, label_positions: Any = None, **kwargs: Any
    ) -> Any:
        if label_positions is None:
            return original(input_ids=input_ids, labels=labels, **kwargs)
        count = kwargs.pop("num_items_in_batch", None)
        kwargs.pop("use_cache", None)
        hidden = self.base_model(input_ids=input_ids, use_cache=False, **kwargs).last_hidden_state
        total = chunked_loss(hidden, labels, label_positions, self.get_output_embeddings(), chunk)
        return CausalLMOutputWithPast(loss=total / (max(len(label_positions), 1) if count is None else count))

    return chunked_forward


def chunked_loss(
    hidden: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor, head: Any, chunk: int = CHUNK
) -> torch.Tensor:
    """Sum of the cross entropies, in nats. `hidden` is batch x length x width; `positions` are where labels stand in
    the flattened `labels`, each predicted from the position before it; `chunk` of them are computed at a time."""
    states = hidden.reshape(-1, hidden.shape[-1])[positions - 1]
    targets = labels.reshape(-1)[positions]
    total = (
        hidden.new_zeros((), dtype=torch.float32) + states[:0].sum().float()
    )  # a batch without labels has a gradient
    for part, wanted in zip(states.split(chunk), targets.split(chunk), strict=True):
        total = total + checkpoint(_chunk, part, wanted, head.weight, head.bias, use_reentrant=False)
    return total


def _chunk(states: torch.Tensor, targets: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
    logits = F.linear(states.to(weight.dtype), weight, bias).float()
    return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")


def is_on(model: Any) -> bool:
    return bool(getattr(_base(model).forward, "__name__", "") == "chunked_forward")


def proof(model: Any, spec: Experiment) -> list[str]:
    if spec.optimizations.chunked_loss and not is_on(model):
        return [f"optimizations.chunked_loss is on and {type(_base(model)).__name__} computes its loss otherwise"]
    return []

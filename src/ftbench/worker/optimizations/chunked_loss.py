"""Compute the loss over chunks of the label tokens, without waiting for the device.

trl's chunked loss counts the label tokens on the device and waits for the count. It also computes entropy and accuracy,
and waits for them. In ftbench, the collator counts the label tokens and passes their positions. Only the logits of one
chunk exist at a time. Their gradient is computed immediately, as in Liger's fused loss. So each label needs two
products with the head's weight. Recomputing the logits in the backward pass would need a third product. With `compile`,
the softmax of a chunk is one compiled function. It reads or writes the logits 3 times instead of 11 times.

The loss reads the outputs of the decoder only at label tokens. Prompts, images and padding have no labels. So with
`fixed_shape`, `o_proj` and the MLP of the last layer compute only label tokens, if they are less than half of all
tokens. torch.compile then compiles the last layer separately. The collator gives all batches the same number of
positions. Without `fixed_shape`, this number varies, so torch.compile would compile the layer again and again.
"""

import inspect
from types import MethodType
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutputWithPast

from ftbench.errors import SpecError
from ftbench.kernels import mixins
from ftbench.spec.experiment import Experiment
from ftbench.worker.model.parts import base_model, decoder_layers

SCALES = ("final_logit_softcapping", "logit_scale", "logits_scaling")  # logit scales of gemma2, cohere2, granite
CHUNK = 2048  # label tokens per chunk; with a vocabulary of 152k, the float32 logits have 1.2 GB
POSITIONS = "label_positions"  # key of the batch: positions of labels in the flattened labels


def apply(model: Any, spec: Experiment) -> None:
    """Make the base model's forward pass return the loss. Raise SpecError for a model that scales its logits after the
    product with the head."""
    setting = spec.optimizations.chunked_loss
    base = base_model(model)
    text = base.config.get_text_config()
    if any(getattr(text, key, None) not in (None, 0, 1) for key in SCALES):
        raise SpecError(
            f"optimizations.chunked_loss does not support how {type(base).__name__} scales its logits: set it to off"
        )
    softmax = torch.compile(probabilities) if spec.optimizations.compile else probabilities
    base.forward = MethodType(_forward(base.forward, softmax, CHUNK if setting is True else setting), base)


def skip_unread(model: Any, spec: Experiment) -> bool:
    """Make `o_proj` and the MLP of the last layer compute only label tokens. Call this before the first step. Return
    False without a change if this is not supported: for sharded models, experts and other layers."""
    layer = decoder_layers(model)[-1]
    last = [getattr(getattr(layer, "self_attn", None), "o_proj", None), getattr(layer, "mlp", None)]
    # Experts have no `down_proj` here: the model counts the tokens of each expert.
    if spec.launch.sharded or last[0] is None or not hasattr(last[1], "down_proj"):
        return False
    for module in last:
        mixins.add(_Selective, module)
    base_model(model).selective = last
    return True


class _Selective:
    """Mixin for a module of the last layer. If `rows` is set, it computes only these tokens of the flattened input."""

    rows: torch.Tensor | None = None

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if self.rows is None:
            return super().forward(x)  # type: ignore[misc]
        flat = x.reshape(-1, x.shape[-1])
        made = super().forward(flat.index_select(0, self.rows)[None])[0]  # type: ignore[misc]
        outputs: torch.Tensor = made.new_zeros(len(flat), made.shape[-1]).index_copy(0, self.rows, made)
        return outputs.view(*x.shape[:-1], -1)


def _forward(original: Any, softmax: Any, size: int) -> Any:
    def chunked_forward(
        self: Any, input_ids: Any = None, labels: Any = None, label_positions: Any = None, **kwargs: Any
    ) -> Any:
        for module in getattr(self, "selective", ()):
            module.rows = _read_rows(label_positions, labels)
        if label_positions is None:
            return original(input_ids=input_ids, labels=labels, **kwargs)
        count = kwargs.pop("num_items_in_batch", None)
        kwargs.pop("use_cache", None)
        hidden = self.base_model(input_ids=input_ids, use_cache=False, **kwargs).last_hidden_state
        total = chunked_loss(hidden, labels, label_positions, self.get_output_embeddings(), softmax, size)
        if count is None:
            count = (labels.reshape(-1)[label_positions] >= 0).sum().clamp(min=1)
        return CausalLMOutputWithPast(loss=total / count)

    return chunked_forward


def _read_rows(positions: Any, labels: torch.Tensor) -> torch.Tensor | None:
    """Return the flat indices of the hidden states that the loss reads, or None if they are at least half of all."""
    if positions is None or 2 * len(positions) >= labels.numel():
        return None
    return (positions - 1) % labels.numel()  # position 0 is not a label, but fills batches with few labels


def chunked_loss(
    hidden: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor, head: Any, softmax: Any = None,
    size: int = CHUNK,
) -> torch.Tensor:  # fmt: skip
    """Return the sum of the cross entropies of all labels, in nats. `hidden` is (batch, length, width), and `labels` is
    (batch, length). `positions` are the indices of the labels in the flattened `labels`. The hidden state at p - 1
    predicts the label at p. `size` is the number of labels per chunk. `softmax` is `probabilities` or its compiled
    version."""
    given = (labels, positions, softmax or probabilities, size, torch.is_grad_enabled())
    return _Loss.apply(hidden, _whole(head.weight), _whole(head.bias), *given)


def _whole(parameter: Any) -> Any:
    """Return a parameter of the head as a plain tensor. autograd shards its gradient like the parameter. FSDP2 gathers
    weights when the forward pass of their module is called. The loss does not call the head's forward pass. So gather a
    frozen head here. FSDP2 gathers a trained head together with the last norm."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def _on_device(parameter: Any) -> Any:
    """Return a parameter of the head on the device. With `weight_offload`, copy the parameter from the host."""
    return parameter.fetch() if hasattr(parameter, "fetch") else parameter


def probabilities(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return softmax(logits) (labels, vocabulary) in the dtype of `logits`, and the log probability of each target
    (labels, 1) in float32. Both are 0 for a negative target. Such a target affects neither loss nor gradients."""
    logarithms, has_target = torch.log_softmax(logits.float(), -1), targets[:, None] >= 0
    of_targets = torch.where(has_target, logarithms.gather(1, targets.clamp(min=0)[:, None]), 0.0)
    return torch.where(has_target, logarithms.exp().to(logits.dtype), 0.0), of_targets


class _Loss(torch.autograd.Function):
    """Compute the loss and its gradients in the forward pass. The backward pass only scales these gradients."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: Any, labels: torch.Tensor, positions: torch.Tensor,
        softmax: Any, size: int, learning: bool,
    ) -> torch.Tensor:  # fmt: skip
        given = hidden, weight, bias = hidden, _on_device(weight), _on_device(bias)
        wanted = [learning and is_wanted for is_wanted in ctx.needs_input_grad[:3]]
        gradients = [torch.zeros_like(part) if is_on else None for part, is_on in zip(given, wanted, strict=True)]
        total = hidden.new_zeros((), dtype=torch.float32)
        for chunk in positions.split(size):
            states = hidden.reshape(-1, hidden.shape[-1])[chunk - 1].to(weight.dtype)
            logits = F.linear(states, weight, bias)
            targets = labels.reshape(-1)[chunk]
            if any(wanted):
                if len(chunk) < size:  # the last chunk has a different length in each batch: compile one graph for all
                    torch._dynamo.maybe_mark_dynamic(logits, 0)
                    torch._dynamo.maybe_mark_dynamic(targets, 0)
                gradient, of_targets = softmax(logits, targets)
                del logits
                gradient.scatter_(1, targets.clamp(min=0)[:, None], of_targets.expm1().to(gradient.dtype))
                total -= of_targets.sum()
                _add(gradients, gradient, states, weight, chunk - 1)
                del gradient  # free the memory before the next chunk's logits are computed
            else:
                total += F.cross_entropy(logits.float(), targets, reduction="sum")
                del logits
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (factor,) = gradients
        scaled = [None if part is None else part * factor.to(part.dtype) for part in ctx.saved_tensors]
        return *scaled, *[None] * 5


def _add(gradients: list[Any], gradient: torch.Tensor, states: torch.Tensor, weight: torch.Tensor, rows: Any) -> None:
    """Add one chunk's gradients to the three tensors in `gradients`: hidden states, weight and bias of the head."""
    of_hidden, of_weight, of_bias = gradients
    if of_hidden is not None:
        of_hidden.view(-1, of_hidden.shape[-1])[rows] = (gradient @ weight).to(of_hidden.dtype)
    if of_weight is not None and gradient.dtype == states.dtype == of_weight.dtype:
        of_weight.addmm_(gradient.t(), states)  # in place, without a temporary product
    elif of_weight is not None:  # with autocast, the products have 16 bits, but the weight's gradient has 32
        of_weight += gradient.t() @ states
    if of_bias is not None:
        of_bias += gradient.sum(0)


def is_on(model: Any) -> bool:
    forward = inspect.unwrap(base_model(model).forward)  # accelerate may wrap it in autocast
    return bool(getattr(forward, "__name__", "") == "chunked_forward")


def verify(model: Any, spec: Experiment) -> list[str]:
    if spec.optimizations.chunked_loss and not is_on(model):
        return [f"optimizations.chunked_loss is on and {type(base_model(model)).__name__} uses another loss"]
    return []

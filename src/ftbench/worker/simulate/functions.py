"""Which kernel a GPU would take for scaled dot product attention. Without one torch takes the plain formula, whose
memory grows with the square of the length."""

from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


class Functions(TorchFunctionMode):
    """What is called from Python. Attention of the simulated GPU goes to the kernel that torch prefers there
    (ATen/native/transformers/cuda/sdp_utils.cpp): flash where there is no mask, memory-efficient with one, the formula
    where neither can. `engine` is on while torch's backward pass runs code of its own."""

    engine = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, before = kwargs or {}, self.engine
        self.engine = False
        try:
            if func is F.scaled_dot_product_attention and args[0].device.type == "cuda":
                return _attention(*args, **kwargs)
            if func is torch.tensor:  # its C++ asks for the values of tensors in a list past any mode
                args = tree_map_only(torch.Tensor, torch.Tensor.item, args)
            if func is torch.Tensor.tolist:
                return _listed(args[0])
            return func(*args, **kwargs)
        finally:
            self.engine = before

    def within_engine(self, run: Any) -> Any:
        """Return the engine's own function, with `engine` on and with this mode for the Python that it calls:
        checkpoints, functions with a backward of their own."""

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            before, self.engine = self.engine, True
            try:
                with self:
                    return run(*args, **kwargs)
            finally:
                self.engine = before

        return run_backward


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    if torch.is_autocast_enabled("cuda"):
        query, key, value, attn_mask = (_cast(part) for part in (query, key, value, attn_mask))
    width = query.shape[-1]
    if attn_mask is None and query.dtype in _HALF and width == value.shape[-1] and width <= 256:
        padded = [_padded(part, 8) for part in (query, key, value)]
        scale = width**-0.5 if scale is None else scale
        out = _aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)[0]
        return out[..., :width]
    if query.shape[1] == key.shape[1]:
        bias = _bias(attn_mask, query)
        needed = torch.is_grad_enabled() and any(part.requires_grad for part in (query, key, value))
        return _aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, needed, dropout_p, is_causal, scale=scale
        )[0]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _cast(part: Any) -> Any:
    """Return autocast's policy for attention: 32-bit floats in the type of the products."""
    return part.to(torch.get_autocast_dtype("cuda")) if part is not None and part.dtype == torch.float32 else part


def _padded(part: torch.Tensor, multiple: int) -> torch.Tensor:
    missing = -part.shape[-1] % multiple
    return F.pad(part, (0, missing)) if missing else part


def _bias(mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """Return the mask as the kernel takes it (convert_boolean_attn_mask, pad_bias): a number for each place, its rows
    aligned to 16 elements."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    length = mask.shape[-1]
    if length % 16:
        mask = F.pad(mask, (0, -length % 16))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], length)


def _listed(tensor: torch.Tensor) -> Any:
    """Return a tensor's values as its own function does, which reads memory that is not there."""
    return [_listed(each) for each in tensor] if tensor.ndim else tensor.item()


class LogProbs(torch.autograd.Function):
    """What trl's kernel for the log-probabilities of pairs leaves and takes (trl.kernels.logprob_entropy): figures of
    each position, and in the backward pass a gradient of the logits."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        figures = [torch.empty(logits.shape[:-1], device=logits.device, dtype=torch.float32) for _ in range(4)]
        ctx.save_for_backward(logits, *figures[2:])
        return figures[0], figures[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> torch.Tensor:
        return torch.empty_like(ctx.saved_tensors[0], memory_format=torch.contiguous_format)


def log_probs(logits: torch.Tensor, index: torch.Tensor, **how: Any) -> Any:
    """Stand for trl's function of that kernel."""
    return LogProbs.apply(logits)

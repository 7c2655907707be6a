"""Compute causal attention within each sample, with the attention sinks of gpt-oss. A sink is a trained number per
head. The softmax treats a sink as one more logit without a value vector.

The attention kernels of torch do not support sinks, but their results can be corrected. For each query and head, let
L = log(sum(exp(logits))) and L' = log(exp(L) + exp(sink)). Then output with sinks = exp(L - L') * output without sinks.
The backward kernels read L and the output. ftbench passes L' and the output with sinks instead, and gets the gradients
with sinks. The gradient of a sink is the sum over all queries of -exp(sink - L') * dot(output, gradient of the output).
These corrections read the output twice more.
"""

from typing import Any

import torch

FORWARD = torch.ops.aten._flash_attention_forward
BACKWARD = torch.ops.aten._flash_attention_backward
CUDNN_FORWARD = torch.ops.aten._scaled_dot_product_cudnn_attention
CUDNN_BACKWARD = torch.ops.aten._scaled_dot_product_cudnn_attention_backward


def _with_sinks(out: torch.Tensor, alone: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output with sinks (..., heads, tokens, head_dim) and L' (..., heads, tokens) from those without."""
    whole = torch.logaddexp(alone, sinks.to(alone.dtype)[:, None])
    return (out * (alone - whole).exp()[..., None]).to(out.dtype), whole


def _of_sinks(sinks: torch.Tensor, out: torch.Tensor, dout: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the sinks (heads,)."""
    taken = (dout * out).sum(-1, dtype=whole.dtype)
    return -((sinks[:, None] - whole).exp() * taken).sum(-1).reshape(-1, len(sinks)).sum(0).to(sinks.dtype)


class SinkAttention(torch.autograd.Function):
    """Return 16-bit attention with `sinks` (heads,). Query and result are (tokens, heads, head_dim). Key and value are
    (tokens, kv_heads, head_dim). `bounds` (int32) contains 0 and the end of each sample. `longest` is the length of the
    longest sample. A token attends to itself and to `window` tokens before it (-1: all tokens before it)."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor,
        bounds: torch.Tensor, longest: int, scale: float, window: int,
    ) -> torch.Tensor:  # fmt: skip
        ctx.samples = (longest, longest, 0.0, True)
        ctx.options = {"scale": scale, "window_size_left": window, "window_size_right": 0}
        out, alone, seed, unused, _ = FORWARD(query, key, value, bounds, bounds, *ctx.samples, False, **ctx.options)
        out, whole = _with_sinks(out.transpose(0, 1), alone, sinks)
        out = out.transpose(0, 1)
        ctx.save_for_backward(query, key, value, out, whole, bounds, sinks, seed, unused)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        query, key, value, out, whole, bounds, sinks, seed, unused = ctx.saved_tensors
        dout, samples = gradients[0].contiguous(), (bounds, bounds, *ctx.samples)
        grads = BACKWARD(dout, query, key, value, out, whole, *samples, seed, unused, **ctx.options)
        given = (sinks, out.transpose(0, 1), dout.transpose(0, 1), whole)
        of_sinks = _of_sinks(*given) if ctx.needs_input_grad[3] else None
        return *grads, of_sinks, None, None, None, None


class EqualSinkAttention(torch.autograd.Function):
    """Return the same for samples of one length, without a window. cuDNN's kernels are faster than flash attention
    here. Query and result are (samples, heads, tokens, head_dim). Key and value have kv_heads instead of heads."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor, scale: float
    ) -> torch.Tensor:
        out, alone, *others = CUDNN_FORWARD(query, key, value, None, True, 0.0, True, False, scale=scale)
        out, whole = _with_sinks(out, alone.reshape(out.shape[:-1]), sinks)
        ctx.scale = scale
        ctx.save_for_backward(query, key, value, out, whole, sinks, *others[4:6])
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        query, key, value, out, whole, sinks, seed, offset = ctx.saved_tensors
        # torch keeps cuDNN's plans by the strides of query, key and value only, so `dout` must always have the same
        dout = gradients[0].transpose(1, 2).contiguous().transpose(1, 2)
        rest = (seed, offset, None, None, None, query.shape[2], key.shape[2], 0.0, True)
        grads = CUDNN_BACKWARD(dout, query, key, value, out, whole[..., None], *rest, scale=ctx.scale)
        return *grads, _of_sinks(sinks, out, dout, whole) if ctx.needs_input_grad[3] else None, None

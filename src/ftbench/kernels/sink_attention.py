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


def _with_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert `out` (..., heads, tokens, head_dim) and L (..., heads, tokens) to the output with sinks and L'."""
    lse_sinks = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    return (out * (lse - lse_sinks).exp()[..., None]).to(out.dtype), lse_sinks


def _dsinks(sinks: torch.Tensor, out: torch.Tensor, dout: torch.Tensor, lse_sinks: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the sinks (heads,)."""
    dots = (dout * out).sum(-1, dtype=lse_sinks.dtype)
    return -((sinks[:, None] - lse_sinks).exp() * dots).sum(-1).reshape(-1, len(sinks)).sum(0).to(sinks.dtype)


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
        out, lse, seed, unused, _ = FORWARD(query, key, value, bounds, bounds, *ctx.samples, False, **ctx.options)
        out, lse_sinks = _with_sinks(out.transpose(0, 1), lse, sinks)
        out = out.transpose(0, 1)
        ctx.save_for_backward(query, key, value, out, lse_sinks, bounds, sinks, seed, unused)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        query, key, value, out, lse_sinks, bounds, sinks, seed, unused = ctx.saved_tensors
        dout, samples = gradients[0].contiguous(), (bounds, bounds, *ctx.samples)
        grads = BACKWARD(dout, query, key, value, out, lse_sinks, *samples, seed, unused, **ctx.options)
        results = (out.transpose(0, 1), dout.transpose(0, 1), lse_sinks)
        dsinks = _dsinks(sinks, *results) if ctx.needs_input_grad[3] else None
        return *grads, dsinks, None, None, None, None


class BatchedSinkAttention(torch.autograd.Function):
    """Return 16-bit attention with `sinks` (heads,) for samples of one length, without a window. Query and result are
    (samples, heads, tokens, head_dim). Key and value are (samples, kv_heads, tokens, head_dim). cuDNN computes it."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor, scale: float
    ) -> torch.Tensor:
        out, lse, *others = CUDNN_FORWARD(query, key, value, None, True, 0.0, True, False, scale=scale)
        out, lse_sinks = _with_sinks(out, lse.reshape(out.shape[:-1]), sinks)
        ctx.scale = scale
        ctx.save_for_backward(query, key, value, out, lse_sinks, sinks, *others[4:6])
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        query, key, value, out, lse_sinks, sinks, seed, offset = ctx.saved_tensors
        # torch reuses cuDNN's plan without comparing the strides of `dout`, so they must be equal in every call
        dout = gradients[0].transpose(1, 2).contiguous().transpose(1, 2)
        rest = (seed, offset, None, None, None, query.shape[2], key.shape[2], 0.0, True)
        grads = CUDNN_BACKWARD(dout, query, key, value, out, lse_sinks[..., None], *rest, scale=ctx.scale)
        return *grads, _dsinks(sinks, out, dout, lse_sinks) if ctx.needs_input_grad[3] else None, None

"""Compute causal attention within each sample of a row, with the attention sinks of gpt-oss. A sink is a trained number
per head. The softmax treats a sink as one more logit without a value vector.

Flash attention does not support sinks, but its results can be corrected. For each query and head, let
L = log(sum(exp(logits))) and L' = log(exp(L) + exp(sink)). Then output with sinks = exp(L - L') * output without sinks.
Flash attention's backward kernel reads L and the output. ftbench passes L' and the output with sinks instead, and gets
the gradients with sinks. The gradient of a sink is the sum over all queries of -exp(sink - L') * dot(output, gradient
of the output). These corrections read the output twice more.
"""

from typing import Any

import torch

FORWARD = torch.ops.aten._flash_attention_forward
BACKWARD = torch.ops.aten._flash_attention_backward


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
        whole = torch.logaddexp(alone, sinks.to(alone.dtype)[:, None])  # (heads, tokens)
        out = (out * (alone - whole).exp().t()[..., None]).to(query.dtype)
        ctx.save_for_backward(query, key, value, out, whole, bounds, sinks, seed, unused)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        query, key, value, out, whole, bounds, sinks, seed, unused = ctx.saved_tensors
        dout, samples = gradients[0].contiguous(), (bounds, bounds, *ctx.samples)
        grads = BACKWARD(dout, query, key, value, out, whole, *samples, seed, unused, **ctx.options)
        of_sinks = None
        if ctx.needs_input_grad[3]:
            taken = (dout * out).sum(-1, dtype=whole.dtype).t()
            of_sinks = -((sinks[:, None] - whole).exp() * taken).sum(1).to(sinks.dtype)
        return *grads, of_sinks, None, None, None, None

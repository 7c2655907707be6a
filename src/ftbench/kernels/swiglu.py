"""Compute silu(gate) * up of an MLP. One Triton kernel computes the gradients of gate and up.

A pass reads or writes values of shape (tokens, inner) once. The backward kernel needs 5 passes: it reads gate, up and
the output's gradient, and writes two gradients. torch.compile needs 8 passes, because it reads the inputs once for each
gradient. The forward pass has no kernel, because torch.compile already needs the minimum of 3 passes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn import functional as F
from triton.language import constexpr, tensor

BLOCK = 1024  # columns per program


@triton.jit
def _swiglu_backward(
    dout: tensor, gate: tensor, up: tensor, both: tensor, columns: tensor, dout_row: tensor, gate_row: tensor,
    up_row: tensor, both_row: tensor, BLOCK: constexpr,
) -> None:  # fmt: skip
    """Write [dgate dup] to `both`: dgate = dout * up * s * (1 + gate * (1 - s)), dup = dout * gate * s,
    s = sigmoid(gate)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    d = tl.load(dout + row * dout_row + column, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(gate + row * gate_row + column, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_row + column, mask=mask, other=0.0).to(tl.float32)
    s = tl.sigmoid(g)
    dgate = d * u * s * (1.0 + g * (1.0 - s))
    to = both + row * both_row + column
    tl.store(to, dgate.to(both.dtype.element_ty), mask=mask)
    tl.store(to + columns, (d * g * s).to(both.dtype.element_ty), mask=mask)


@torch.library.custom_op("ftbench::swiglu_backward", mutates_args=())
def swiglu_backward(dout: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, room: int) -> torch.Tensor:
    """Return the gradients of gate and up side by side: (tokens, 2 * inner + room). dout, gate and up are (tokens,
    inner). dout is the gradient of silu(gate) * up. The last `room` columns of the result are not initialized."""
    tokens, columns = gate.shape
    dout = dout if dout.stride(1) == 1 else dout.contiguous()
    both = gate.new_empty(tokens, 2 * columns + room)
    rows = (dout.stride(0), gate.stride(0), up.stride(0), both.stride(0))
    _swiglu_backward[(tokens, triton.cdiv(columns, BLOCK))](dout, gate, up, both, columns, *rows, BLOCK=BLOCK)
    return both


swiglu_backward.register_fake(lambda dout, gate, up, room: gate.new_empty(gate.shape[0], 2 * gate.shape[1] + room))


class SwiGlu(torch.autograd.Function):
    """Return silu(gate) * up (tokens, inner) for gate and up, each (tokens, inner). If `up` is None, `gate` contains
    gate and up side by side: (tokens, 2 * inner or more). The gradients have the shapes of the inputs."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor | None, inner: int) -> torch.Tensor:
        ctx.inner, ctx.room = inner, gate.shape[1] - 2 * inner if up is None else None
        gate, up = (gate[:, :inner], gate[:, inner : 2 * inner]) if up is None else (gate, up)
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gate, up = ctx.saved_tensors
        both = swiglu_backward(gradients[0], gate, up, ctx.room or 0)
        if ctx.room is not None:
            return both, None, None
        return both[:, : ctx.inner], both[:, ctx.inner :], None

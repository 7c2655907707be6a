"""Compute the gate of gpt-oss's experts with Triton kernels.

A pass reads or writes the gate's inputs (rows, 2 * inner) once. The forward kernel needs 1.5 passes and the backward
kernel needs 2.5 passes. Both add the bias of the row's expert. torch.compile needs more passes: it also writes the
inputs with the bias, and it computes the gradients of gate and up in two kernels.
"""

from __future__ import annotations

from typing import Any

import torch

from ftbench.kernels.optional_triton import constexpr, jit, tensor, tl, triton

BLOCK = 1024  # columns of the output per program


@jit
def _gate_and_up(
    both: tensor, bias: tensor, experts: tensor, columns: tensor, BIAS: constexpr, BLOCK: constexpr
) -> tuple[tensor, tensor]:
    """Return gate and up of BLOCK columns of one row, with the bias. In memory, they alternate: gate, up, gate, ..."""
    row = tl.program_id(0).to(tl.int64)
    pair = tl.program_id(1) * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
    mask = pair < 2 * columns
    values = tl.load(both + row * 2 * columns + pair, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        expert = tl.load(experts + row).to(tl.int64)
        values += tl.load(bias + expert * 2 * columns + pair, mask=mask, other=0.0).to(tl.float32)
    return tl.split(tl.reshape(values, (BLOCK, 2)))


@jit
def _clamped_gate_forward(
    both: tensor, bias: tensor, experts: tensor, out: tensor, columns: tensor, ALPHA: constexpr, LIMIT: constexpr,
    BIAS: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    """Write (u + 1) * g * sigmoid(ALPHA * g). g is gate, at most LIMIT. u is up, clamped to [-LIMIT, LIMIT]."""
    gate, up = _gate_and_up(both, bias, experts, columns, BIAS, BLOCK)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g, u = tl.where(gate > LIMIT, LIMIT, gate), tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    gated = (u + 1.0) * g * tl.sigmoid(ALPHA * g)
    to = out + tl.program_id(0).to(tl.int64) * columns + column
    tl.store(to, gated.to(out.dtype.element_ty), mask=column < columns)


@jit
def _clamped_gate_backward(
    dout: tensor, both: tensor, bias: tensor, experts: tensor, dboth: tensor, columns: tensor, ALPHA: constexpr,
    LIMIT: constexpr, BIAS: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    """Write the gradients of gate and up: dgate = dout * (u + 1) * s * (1 + ALPHA * g * (1 - s)), dup = dout * g * s,
    s = sigmoid(ALPHA * g). They are 0 where gate or up is outside of its limits."""
    gate, up = _gate_and_up(both, bias, experts, columns, BIAS, BLOCK)
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    d = tl.load(dout + row * columns + column, mask=column < columns, other=0.0).to(tl.float32)
    g, u = tl.where(gate > LIMIT, LIMIT, gate), tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    s = tl.sigmoid(ALPHA * g)
    dgate = tl.where(gate <= LIMIT, d * (u + 1.0) * s * (1.0 + ALPHA * g * (1.0 - s)), 0.0)
    dup = tl.where(tl.abs(up) <= LIMIT, d * g * s, 0.0)
    pair = tl.program_id(1) * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
    values = tl.interleave(dgate, dup).to(dboth.dtype.element_ty)
    tl.store(dboth + row * 2 * columns + pair, values, mask=pair < 2 * columns)


@torch.library.custom_op("ftbench::clamped_gate", mutates_args=())
def gate_forward(
    both: torch.Tensor, bias: torch.Tensor | None, experts: torch.Tensor, alpha: float, limit: float
) -> torch.Tensor:
    """Return (rows, inner) for `both` (rows, 2 * inner). The columns of `both` are gate, up, gate, ... First, the
    `bias` (experts, 2 * inner) of its expert is added to each row. `experts` (rows,) has the expert of each row."""
    both = both.contiguous()
    out = both.new_empty(len(both), both.shape[1] // 2)
    given = (both, both if bias is None else bias.contiguous(), experts, out, out.shape[1])
    constants = {"ALPHA": alpha, "LIMIT": limit, "BIAS": bias is not None, "BLOCK": BLOCK}
    _clamped_gate_forward[(len(both), triton.cdiv(out.shape[1], BLOCK))](*given, **constants)
    return out


gate_forward.register_fake(lambda both, *_: both.new_empty(both.shape[0], both.shape[1] // 2))


@torch.library.custom_op("ftbench::clamped_gate_backward", mutates_args=())
def gate_backward(
    dout: torch.Tensor, both: torch.Tensor, bias: torch.Tensor | None, experts: torch.Tensor, alpha: float, limit: float
) -> torch.Tensor:
    """Return the gradient of `both`: (rows, 2 * inner). `dout` (rows, inner) is the gradient of the result."""
    both = both.contiguous()
    dboth = torch.empty_like(both)
    given = (dout.contiguous(), both, both if bias is None else bias.contiguous(), experts, dboth, dout.shape[1])
    constants = {"ALPHA": alpha, "LIMIT": limit, "BIAS": bias is not None, "BLOCK": BLOCK}
    _clamped_gate_backward[(len(both), triton.cdiv(dout.shape[1], BLOCK))](*given, **constants)
    return dboth


gate_backward.register_fake(lambda dout, both, *_: torch.empty_like(both, memory_format=torch.contiguous_format))


class _ClampedGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: torch.Tensor, bias: Any, experts: torch.Tensor, alpha: float, limit: float) -> Any:
        ctx.save_for_backward(both, bias, experts)
        ctx.constants = alpha, limit
        return gate_forward(both, bias, experts, alpha, limit)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gate_backward(*gradients, *ctx.saved_tensors, *ctx.constants), None, None, None, None


def clamped_gate(
    both: torch.Tensor, bias: torch.Tensor | None, experts: torch.Tensor, alpha: float, limit: float
) -> torch.Tensor:
    """Return `gate_forward` of the arguments, with a gradient for `both`, but not for the bias."""
    result: torch.Tensor = _ClampedGate.apply(both, bias, experts, alpha, limit)
    return result

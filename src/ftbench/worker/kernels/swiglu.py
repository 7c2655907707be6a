"""The gate of an MLP, a = silu(gate) * up, whose backward pass is one kernel of our own.

Passes over the activations of tokens x inner, backward: gate, up and the gradient read, two gradients written: 5. The
compiler's code makes both gradients in one buffer by computing each of its columns alone, and reads all three for
either: 8. Forward the compiler passes as often as must be (3), within what it makes of its neighbours, and is left to.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn import functional as F
from triton.language import constexpr, tensor

from ftbench.worker.kernels.delayed_cast import scale_to, shortened

BLOCK = 1024  # columns of a program


@triton.jit
def _swiglu_backward(
    dout: tensor, gate: tensor, up: tensor, both: tensor, small: tensor, factor: tensor, maxima: tensor,
    columns: tensor, dout_row: tensor, gate_row: tensor, up_row: tensor, both_row: tensor, LIMIT: constexpr,
    AGAIN: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    """Write the gradients of gate and of up side by side, with LIMIT also in 8 bits, as `delayed_cast` does: a program
    for a row and BLOCK of its columns, or all of them."""
    known = tl.load(maxima)  # without LIMIT: of no use
    if (known > 0) & AGAIN:
        return
    row, scale, largest = tl.program_id(0).to(tl.int64), 1.0, tl.zeros((BLOCK,), tl.float32)
    if LIMIT > 0:
        scale = scale_to(known, maxima + 1, LIMIT)
    for start in range(tl.program_id(1) * BLOCK, columns, tl.num_programs(1) * BLOCK):
        column = start + tl.arange(0, BLOCK)
        there = column < columns
        d = tl.load(dout + row * dout_row + column, mask=there, other=0.0).to(tl.float32)
        g = tl.load(gate + row * gate_row + column, mask=there, other=0.0).to(tl.float32)
        u = tl.load(up + row * up_row + column, mask=there, other=0.0).to(tl.float32)
        s = tl.sigmoid(g)
        dgate, dup = d * u * s * (1.0 + g * (1.0 - s)), d * g * s
        to = both + row * both_row + column
        tl.store(to, dgate.to(both.dtype.element_ty), mask=there)
        tl.store(to + columns, dup.to(both.dtype.element_ty), mask=there)
        if LIMIT > 0:
            largest = tl.maximum(largest, tl.maximum(tl.abs(dgate), tl.abs(dup)))
            to = small + row * 2 * columns + column
            tl.store(to, shortened(dgate, scale, LIMIT).to(small.dtype.element_ty), mask=there)
            tl.store(to + columns, shortened(dup, scale, LIMIT).to(small.dtype.element_ty), mask=there)
    if LIMIT > 0:
        tl.atomic_max(maxima + 1, tl.max(largest, 0))
        tl.store(factor, 1.0 / scale)


def _gradients(dout: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, both: torch.Tensor) -> tuple[Any, ...]:
    """Return what a kernel is given before what is of 8 bits, and after it."""
    rows = (dout.stride(0), gate.stride(0), up.stride(0), both.stride(0))
    return (dout, gate, up, both), (gate.shape[1], *rows)


@torch.library.custom_op("ftbench::swiglu_backward", mutates_args=())
def swiglu_backward(dout: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, room: int) -> torch.Tensor:
    """Return the gradients of gate and up (tokens x inner each, rows of any stride) of that of silu(gate) * up, side by
    side: tokens x (2 inner + room). Nothing is written into the room behind them."""
    tokens, columns = gate.shape
    dout = dout if dout.stride(1) == 1 else dout.contiguous()
    both = gate.new_empty(tokens, 2 * columns + room)
    given, sizes = _gradients(dout, gate, up, both)
    grid, unused = (tokens, triton.cdiv(columns, BLOCK)), (both, both, both)
    _swiglu_backward[grid](*given, *unused, *sizes, LIMIT=0.0, AGAIN=False, BLOCK=BLOCK)
    return both


@swiglu_backward.register_fake
def _(dout: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, room: int) -> torch.Tensor:
    return gate.new_empty(gate.shape[0], 2 * gate.shape[1] + room)


@torch.library.custom_op("ftbench::swiglu_backward_and_cast", mutates_args=())
def swiglu_backward_and_cast(
    dout: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, maxima: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what `swiglu_backward` does, and that in 8 bits with its factor, as `delayed_cast.cast_by_last` does: two
    passes less than it would take."""
    dout = dout if dout.stride(1) == 1 else dout.contiguous()
    both = gate.new_empty(len(gate), 2 * gate.shape[1])
    small, factor = torch.empty_like(both, dtype=dtype), maxima.new_empty(())
    given, sizes = _gradients(dout, gate, up, both)
    limit = torch.finfo(dtype).max
    for again in (False, True):
        _swiglu_backward[(len(gate), 1)](*given, small, factor, maxima, *sizes, LIMIT=limit, AGAIN=again, BLOCK=BLOCK)
    return both, small, factor


@swiglu_backward_and_cast.register_fake
def _(
    dout: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, maxima: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    both = gate.new_empty(gate.shape[0], 2 * gate.shape[1])
    return both, torch.empty_like(both, dtype=dtype), maxima.new_empty(())


class SwiGlu(torch.autograd.Function):
    """Gate and up, tokens x inner each, → silu(gate) * up. They are two tensors, or one that holds them side by side
    and may be wider (`up` is None): then its gradient is one as wide."""

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

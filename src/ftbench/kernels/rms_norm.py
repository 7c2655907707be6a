"""Compute RMSNorm with a frozen weight, with or without the residual addition before it. One kernel computes the
forward pass, and one kernel the backward pass.

norm(y) = weight * y / sqrt(mean(y²) + eps) for each row y. Without a residual, y = x. With a residual,
y = x + residual. Costs are counted in passes. One pass reads or writes values of shape (tokens, width) once.
- Forward, 2 passes: read x, write norm(y). A residual adds 2 passes: read the residual, write y.
- Backward, 3 passes: read y and the gradient of norm(y), write the gradient of x. A residual adds 1 pass: read the
  direct gradient of y. Extra columns of x add 1 pass: write the gradient of x again, with extra columns.
- torch.compile needs 3 forward passes (5 with a residual), because it computes mean(y²) and norm(y) in two kernels.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor


@triton.jit
def _scale(values: tensor, columns: tensor, eps: tensor) -> tensor:
    """Return 1 / sqrt(sum(values²) / columns + eps) for one row of `columns` values, padded with zeros."""
    return tl.rsqrt(tl.sum(values * values, 0) / columns + eps)


@triton.jit
def _rms_norm_forward(
    x: tensor, residual: tensor, weight: tensor, total: tensor, normed: tensor, x_row: tensor, normed_row: tensor,
    columns: tensor, eps: tensor, SUM: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    """Write normed = weight * y / sqrt(mean(y²) + eps) for one row y. If SUM, y is x + residual, and y is also written
    to `total`. Otherwise y is x. One program handles one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < columns
    values = tl.load(x + row * x_row + column, mask=mask, other=0.0).to(tl.float32)
    if SUM:
        values += tl.load(residual + row * columns + column, mask=mask, other=0.0).to(tl.float32)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + row * columns + column, rounded, mask=mask)
        values = rounded.to(tl.float32)
    w = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    scaled = values * _scale(values, columns, eps) * w
    tl.store(normed + row * normed_row + column, scaled.to(normed.dtype.element_ty), mask=mask)


@triton.jit
def _rms_norm_backward(
    dnormed: tensor, dtotal: tensor, total: tensor, weight: tensor, dx: tensor, wide: tensor, dnormed_row: tensor,
    wide_row: tensor, columns: tensor, eps: tensor, SUM: constexpr, WIDE: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    """Write dx, the gradient of one row of `total`: dx = scale * (d - n * mean(d * n)), where d = dnormed * weight, n =
    total * scale, scale = 1 / sqrt(mean(total²) + eps). If SUM, add dtotal. If WIDE, also write dx to `wide`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < columns
    values = tl.load(total + row * columns + column, mask=mask, other=0.0).to(tl.float32)
    d = tl.load(dnormed + row * dnormed_row + column, mask=mask, other=0.0).to(tl.float32)
    d *= tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    scale = _scale(values, columns, eps)
    values *= scale
    gradient = scale * (d - values * (tl.sum(d * values, 0) / columns))
    if SUM:
        gradient += tl.load(dtotal + row * columns + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(dx + row * columns + column, gradient.to(dx.dtype.element_ty), mask=mask)
    if WIDE:
        tl.store(wide + row * wide_row + column, gradient.to(wide.dtype.element_ty), mask=mask)


def _block(columns: int) -> dict[str, int]:
    """Return the launch options of a kernel: one program per row, and one warp per 512 columns (1 to 16 warps)."""
    block = triton.next_power_of_2(columns)
    return {"BLOCK": block, "num_warps": min(max(block // 512, 1), 16)}


def _normed(x: torch.Tensor, weight: torch.Tensor, width: int, room: int) -> torch.Tensor:
    return x.new_empty(x.shape[0], width + room, dtype=torch.result_type(weight, x))


def _total(x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    if residual is None:
        return x.new_empty(0)
    return residual.new_empty(residual.shape, dtype=torch.result_type(x, residual))


@torch.library.custom_op("ftbench::rms_norm_forward", mutates_args=())
def rms_norm_forward(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, room: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return RMSNorm(y) (tokens, width + room) and y (tokens, width), where y = x + residual. The last `room` columns
    of RMSNorm(y) are not initialized. Without a residual, return RMSNorm(x) and an empty tensor. The shapes are x:
    (tokens, width or more), residual: (tokens, width), weight: (width,). Extra columns of x are ignored."""
    width = len(weight)
    residual = None if residual is None else residual.contiguous()
    normed, total = _normed(x if residual is None else _total(x, residual), weight, width, room), _total(x, residual)
    given = (x, x if residual is None else residual, weight, total, normed, x.stride(0), normed.stride(0), width, eps)
    _rms_norm_forward[(len(x),)](*given, SUM=residual is not None, **_block(width))
    return normed, total


@rms_norm_forward.register_fake
def _(x: torch.Tensor, residual: Any, weight: torch.Tensor, eps: float, room: int) -> Any:
    total = _total(x, residual)
    return _normed(x if residual is None else total, weight, len(weight), room), total


def _gradients(total: torch.Tensor, room: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    wide = (total.shape[0], total.shape[1] + room) if room else (0,)
    return torch.empty_like(total), total.new_empty(wide, dtype=dtype)


@torch.library.custom_op("ftbench::rms_norm_backward", mutates_args=())
def rms_norm_backward(
    dnormed: torch.Tensor, dtotal: torch.Tensor | None, total: torch.Tensor, weight: torch.Tensor, eps: float,
    room: int, dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return two tensors: dx (tokens, width), the gradient of the norm's input `total`, and a copy of dx in `dtype`
    with `room` uninitialized extra columns. If room is 0, the copy is empty. `dnormed` (tokens, width or more) is the
    gradient of the norm. `dtotal` (tokens, width) is added to dx, if it is not None. `total` must be contiguous."""
    width = len(weight)
    dnormed = dnormed if dnormed.stride(1) == 1 else dnormed.contiguous()
    dtotal = None if dtotal is None else dtotal.contiguous()
    dx, wide = _gradients(total, room, dtype)
    given = (dnormed, total if dtotal is None else dtotal, total, weight, dx, wide if room else dx)
    rows = (dnormed.stride(0), width + room, width, eps)
    _rms_norm_backward[(len(total),)](*given, *rows, SUM=dtotal is not None, WIDE=room > 0, **_block(width))
    return dx, wide


rms_norm_backward.register_fake(
    lambda dnormed, dtotal, total, weight, eps, room, dtype: _gradients(total, room, dtype)
)  # fmt: skip


class RmsNorm(torch.autograd.Function):
    """Return RMSNorm(x) with `room` uninitialized extra columns, and x (tokens, width). The weight is frozen. Use the
    returned x in the residual connection. Then the backward kernel gets both gradients of x and adds them."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, room: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return rms_norm_forward(x, None, weight, eps, room)[0], x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = ctx.saved_tensors
        return rms_norm_backward(*gradients, x, weight, ctx.eps, 0, x.dtype)[0], None, None, None


class SumRmsNorm(torch.autograd.Function):
    """Return RMSNorm(x + residual) with `room` uninitialized extra columns, and x + residual (tokens, width). Ignore
    extra columns of x. The gradient of x has the same shape as x, and its extra columns are not initialized."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, room: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, total = rms_norm_forward(x, residual, weight, eps, room)
        ctx.save_for_backward(total, weight)
        ctx.eps, ctx.room, ctx.dtypes = eps, x.shape[1] - weight.shape[0], (x.dtype, residual.dtype)
        return normed, total

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        total, weight = ctx.saved_tensors
        dtype, of_residual = ctx.dtypes
        dx, wide = rms_norm_backward(*gradients, total, weight, ctx.eps, ctx.room, dtype)
        return wide if ctx.room else dx.to(dtype), dx.to(of_residual), None, None, None

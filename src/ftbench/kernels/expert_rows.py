"""Copy rows from the order of tokens to the order of experts, and sum them, with Triton kernels on a GPU.

Each token has k copies, which are sorted by expert. Row p is copy order[p], and copy c is row slots[c]. Copy c
belongs to token c // k. A pass reads or writes all rows (tokens * k, width) once. A sum over the copies of each token
needs 1 pass. The backward pass of a weighted sum needs 2 passes. torch.compile needs more passes, and it adds the
gradients of the copies with atomic operations.
"""

from __future__ import annotations

from typing import Any

import torch

from ftbench.kernels.optional_triton import constexpr, jit, tensor, tl, triton

BLOCK = 1024  # columns per program of a sum


@jit
def _gather_sum(
    rows: tensor, slots: tensor, weights: tensor, bias: tensor, experts: tensor, out: tensor, columns: tensor,
    K: constexpr, WEIGHTED: constexpr, BIAS: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    """Write the sum of the K rows of one token in BLOCK columns. If BIAS, add its expert's bias to each row. If
    WEIGHTED, multiply each row by its weight."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(K):
        row = tl.load(slots + token * K + j).to(tl.int64)
        values = tl.load(rows + row * columns + column, mask=mask, other=0.0).to(tl.float32)
        if BIAS:
            expert = tl.load(experts + row).to(tl.int64)
            values += tl.load(bias + expert * columns + column, mask=mask, other=0.0).to(tl.float32)
        if WEIGHTED:
            values *= tl.load(weights + token * K + j).to(tl.float32)
        total += values
    tl.store(out + token * columns + column, total.to(out.dtype.element_ty), mask=mask)


@jit
def _combine_bwd(
    dout: tensor, rows: tensor, weights: tensor, bias: tensor, experts: tensor, order: tensor, drows: tensor,
    dweights: tensor, columns: tensor, K: constexpr, BIAS: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    """Write drows = weight * d and dweights = sum((row + bias) * d) for one row. d is the gradient of the token's
    sum."""
    row = tl.program_id(0).to(tl.int64)
    copy = tl.load(order + row).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < columns
    d = tl.load(dout + copy // K * columns + column, mask=mask, other=0.0).to(tl.float32)
    values = tl.load(rows + row * columns + column, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        expert = tl.load(experts + row).to(tl.int64)
        values += tl.load(bias + expert * columns + column, mask=mask, other=0.0).to(tl.float32)
    scaled = tl.load(weights + copy).to(tl.float32) * d
    tl.store(drows + row * columns + column, scaled.to(drows.dtype.element_ty), mask=mask)
    tl.store(dweights + copy, tl.sum(values * d, 0).to(dweights.dtype.element_ty))


@torch.library.custom_op("ftbench::sum_rows", mutates_args=())
def sum_rows(
    rows: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor | None, bias: torch.Tensor | None,
    experts: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Return (tokens, width): for each token t, the sum of weights[t, j] * (rows[i] + bias[experts[i]]) over j, where i
    is slots[t, j]. The shapes are rows: (tokens * k, width), slots and weights: (tokens, k), bias: (experts, width),
    experts: (tokens * k,). If weights is None, all weights are 1. If bias is None, it is 0."""
    rows, (tokens, k), columns = rows.contiguous(), slots.shape, rows.shape[1]
    out = rows.new_empty(tokens, columns)
    given = (rows if each is None else each.contiguous() for each in (weights, bias, experts))
    switches = {"K": k, "WEIGHTED": weights is not None, "BIAS": bias is not None, "BLOCK": BLOCK}
    _gather_sum[(tokens, triton.cdiv(columns, BLOCK))](rows, slots, *given, out, columns, **switches)
    return out


sum_rows.register_fake(lambda rows, slots, *_: rows.new_empty(slots.shape[0], rows.shape[1]))


@torch.library.custom_op("ftbench::combine_backward", mutates_args=())
def combine_backward(
    dout: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, order: torch.Tensor, bias: torch.Tensor | None,
    experts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the gradients of rows (tokens * k, width) and weights (tokens, k). dout (tokens, width) is the gradient of
    the weighted sums, to which bias (experts, width) was added. `experts` (tokens * k,) has the expert of each row."""
    drows, dweights = rows.new_empty(rows.shape), weights.new_empty(weights.shape)
    rows = rows.contiguous()
    given = (dout.contiguous(), rows, weights.contiguous(), rows if bias is None else bias.contiguous(), experts, order)
    block = triton.next_power_of_2(rows.shape[1])
    switches = {"K": weights.shape[1], "BIAS": bias is not None, "BLOCK": block}
    warps = min(max(block // 512, 1), 16)
    _combine_bwd[(len(rows),)](*given, drows, dweights, rows.shape[1], **switches, num_warps=warps)
    return drows, dweights


combine_backward.register_fake(
    lambda dout, rows, weights, *_: (rows.new_empty(rows.shape), weights.new_empty(weights.shape))
)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, order: torch.Tensor, slots: torch.Tensor, k: int) -> torch.Tensor:
        ctx.save_for_backward(slots.view(hidden.shape[0], k))
        return hidden[order // k]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return sum_rows(gradients[0], *ctx.saved_tensors, None, None, None), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weights: torch.Tensor, order: Any, slots: Any, bias: Any, experts: Any
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, weights, order, bias, experts)
        return sum_rows(rows, slots.view(weights.shape), weights, bias, experts)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return *combine_backward(gradients[0], *ctx.saved_tensors), None, None, None, None


def has_kernels(rows: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """Return whether Triton kernels can compute with `rows`. They do not compute gradients of `bias`."""
    return triton is not None and rows.is_cuda and (bias is None or not bias.requires_grad)


def dispatch(hidden: torch.Tensor, order: torch.Tensor, slots: torch.Tensor, k: int) -> torch.Tensor:
    """Return the k copies of each token, sorted by expert: (tokens * k, width). Row p is hidden[order[p] // k]. The
    shapes are hidden: (tokens, width), order and slots: (tokens * k,), int64."""
    return _Dispatch.apply(hidden, order, slots, k) if has_kernels(hidden) else hidden[order // k]


def combine(
    rows: torch.Tensor, weights: torch.Tensor, order: torch.Tensor, slots: torch.Tensor, bias: torch.Tensor | None,
    experts: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Return (tokens, width) in the dtype of `rows`. It is the weighted sum of the k copies of each token, in float32.
    First, the bias of its expert is added to each row. The shapes are rows: (tokens * k, width), weights: (tokens, k),
    bias: (experts, width) or None, order, slots and experts: (tokens * k,), int64."""
    if has_kernels(rows, bias):
        return _Combine.apply(rows, weights, order, slots, bias, experts)
    rows = rows if bias is None else rows + bias[experts]
    copies = rows[slots].view(*weights.shape, -1)
    return (copies * weights.float().unsqueeze(-1)).sum(1).to(rows.dtype)

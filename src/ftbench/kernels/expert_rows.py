"""Copy rows from the order of tokens to the order of experts, and sum them, with Triton kernels on a GPU.

Each token has k copies, which are sorted by expert. Row p is copy order[p], and copy c is row slots[c]. Copy c
belongs to token c // k. A pass reads or writes all rows (tokens * k, width) once. A sum over the copies of each token
needs 1 pass. The backward pass of a weighted sum needs 2 passes. torch.compile needs more passes, and it adds the
gradients of the copies with atomic operations.
"""

from __future__ import annotations

from typing import Any

import torch

try:
    import triton
    import triton.language as tl
    from triton.language import constexpr, tensor
except ImportError:  # torch for CPUs does not install Triton
    triton = None

BLOCK = 1024  # columns per program of a sum
_jit = triton.jit if triton else lambda kernel: kernel


@_jit
def _gather_sum(
    rows: tensor, slots: tensor, weights: tensor, out: tensor, columns: tensor, K: constexpr, WEIGHTED: constexpr,
    BLOCK: constexpr,
) -> None:  # fmt: skip
    """Write the sum of the K rows of one token in BLOCK columns. If WEIGHTED, multiply each row by its weight."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(K):
        row = tl.load(slots + token * K + j).to(tl.int64)
        values = tl.load(rows + row * columns + column, mask=mask, other=0.0).to(tl.float32)
        if WEIGHTED:
            values *= tl.load(weights + token * K + j).to(tl.float32)
        total += values
    tl.store(out + token * columns + column, total.to(out.dtype.element_ty), mask=mask)


@_jit
def _combine_bwd(
    dout: tensor, rows: tensor, weights: tensor, order: tensor, drows: tensor, dweights: tensor, columns: tensor,
    K: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    """Write drows = weight * d and dweights = sum(row * d) for one row. d is the gradient of the token's sum."""
    row = tl.program_id(0).to(tl.int64)
    copy = tl.load(order + row).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < columns
    d = tl.load(dout + copy // K * columns + column, mask=mask, other=0.0).to(tl.float32)
    values = tl.load(rows + row * columns + column, mask=mask, other=0.0).to(tl.float32)
    scaled = tl.load(weights + copy).to(tl.float32) * d
    tl.store(drows + row * columns + column, scaled.to(drows.dtype.element_ty), mask=mask)
    tl.store(dweights + copy, tl.sum(values * d, 0).to(dweights.dtype.element_ty))


@torch.library.custom_op("ftbench::sum_rows", mutates_args=())
def sum_rows(rows: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """Return (tokens, width): for each token t, the sum of weights[t, j] * rows[slots[t, j]] over j. The shapes are
    rows: (tokens * k, width), slots and weights: (tokens, k). If weights is None, all weights are 1."""
    rows, (tokens, k), columns = rows.contiguous(), slots.shape, rows.shape[1]
    out = rows.new_empty(tokens, columns)
    given = (rows, slots, rows if weights is None else weights.contiguous(), out, columns)
    _gather_sum[(tokens, triton.cdiv(columns, BLOCK))](*given, K=k, WEIGHTED=weights is not None, BLOCK=BLOCK)
    return out


sum_rows.register_fake(lambda rows, slots, weights: rows.new_empty(slots.shape[0], rows.shape[1]))


@torch.library.custom_op("ftbench::combine_backward", mutates_args=())
def combine_backward(
    dout: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, order: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of rows (tokens * k, width) and weights (tokens, k). dout (tokens, width) is the gradient of
    the weighted sums."""
    drows, dweights = rows.new_empty(rows.shape), weights.new_empty(weights.shape)
    given = (dout.contiguous(), rows.contiguous(), weights.contiguous(), order, drows, dweights)
    block = triton.next_power_of_2(rows.shape[1])
    warps = min(max(block // 512, 1), 16)
    _combine_bwd[(len(rows),)](*given, rows.shape[1], K=weights.shape[1], BLOCK=block, num_warps=warps)
    return drows, dweights


combine_backward.register_fake(
    lambda dout, rows, weights, order: (rows.new_empty(rows.shape), weights.new_empty(weights.shape))
)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, order: torch.Tensor, slots: torch.Tensor, k: int) -> torch.Tensor:
        ctx.save_for_backward(slots.view(hidden.shape[0], k))
        return hidden[order // k]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return sum_rows(gradients[0], *ctx.saved_tensors, None), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor, order: Any, slots: Any) -> torch.Tensor:
        ctx.save_for_backward(rows, weights, order)
        return sum_rows(rows, slots.view(weights.shape), weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return *combine_backward(gradients[0], *ctx.saved_tensors), None, None


def _has_kernels(rows: torch.Tensor) -> bool:
    return triton is not None and rows.is_cuda


def dispatch(hidden: torch.Tensor, order: torch.Tensor, slots: torch.Tensor, k: int) -> torch.Tensor:
    """Return the k copies of each token, sorted by expert: (tokens * k, width). Row p is hidden[order[p] // k]. The
    shapes are hidden: (tokens, width), order and slots: (tokens * k,), int64."""
    return _Dispatch.apply(hidden, order, slots, k) if _has_kernels(hidden) else hidden[order // k]


def combine(rows: torch.Tensor, weights: torch.Tensor, order: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return (tokens, width) in the dtype of `rows`. It is the weighted sum of the k copies of each token, in float32.
    The shapes are rows: (tokens * k, width), weights: (tokens, k), order and slots: (tokens * k,), int64."""
    if _has_kernels(rows):
        return _Combine.apply(rows, weights, order, slots)
    copies = rows[slots].view(*weights.shape, -1)
    return (copies * weights.float().unsqueeze(-1)).sum(1).to(rows.dtype)

"""Compute products of rows that are sorted by expert, and add LoRA adapters of experts with a Triton kernel.

A grouped product multiplies all rows of an expert by the matrix W of this expert. An adapter adds (x A) B to the
product x W. The kernel computes the second product of the adapter while it adds it. This needs 2 passes over the result
(a pass reads or writes it once). Separate operations need 4 passes: they write (x A) B, read both products and write
the sum. The gradient of x is computed with the same kernel, because it is a sum of this form, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from transformers.integrations.moe import _can_use_grouped_mm, _grouped_mm

from ftbench.kernels import expert_rows
from ftbench.kernels.optional_triton import constexpr, jit, tensor, tl, triton

ROWS, COLUMNS, MAX_RANK = 64, 128, 256  # rows and columns per program; tl.dot needs rank 16, so it is padded
DTYPES = (torch.bfloat16,)  # grouped products on a GPU need bfloat16


def grouped(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return rows[i] @ matrices[g] for each row i of group g. The shapes are rows: (tokens, in), matrices: (groups, in,
    out), result: (tokens, out). `ends` (groups,) has dtype int32. Group g has the rows ends[g - 1] to ends[g] - 1."""
    return _grouped_mm(rows, matrices, offs=ends)  # torch 2.8 and 2.9 do not have F.grouped_mm


def _sums(rows: torch.Tensor, others: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return rows.T @ others for the rows of each group: (groups, columns of rows, columns of others)."""
    product = getattr(F, "grouped_mm", None) or torch._grouped_mm
    return product(rows.t(), others, offs=ends)


@torch.library.custom_op("ftbench::in_rows", mutates_args=())
def in_rows(matrices: torch.Tensor) -> torch.Tensor:
    """Return a row-major copy of `matrices`, because grouped products require this order. torch.compile may remove a
    plain `contiguous()` after a pointwise operation. It cannot remove this custom operation."""
    return matrices.clone(memory_format=torch.contiguous_format)


in_rows.register_fake(lambda matrices: torch.empty_like(matrices, memory_format=torch.contiguous_format))
in_rows.register_autograd(lambda _, gradient: gradient)


@jit
def _add_products(
    base: tensor, narrow: tensor, matrices: tensor, ends: tensor, bias: tensor, out: tensor, tokens: tensor,
    columns: tensor, groups: tensor, group_stride: tensor, rank_stride: tensor, column_stride: tensor, RANK: constexpr,
    PADDED: constexpr, GROUPS: constexpr, BIAS: constexpr, ROWS: constexpr, COLUMNS: constexpr,
) -> None:  # fmt: skip
    """Write base + narrow @ matrices[g] (+ bias[g] if BIAS) for ROWS rows and COLUMNS columns. g is the group of each
    row. A program loops over the groups of its rows. For each group, it sets the other rows of `narrow` to zero."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    begin = tl.program_id(1) * ROWS
    last = tl.minimum(begin + ROWS, tokens)
    row = begin + tl.arange(0, ROWS)
    rank, group_number = tl.arange(0, PADDED), tl.arange(0, GROUPS)
    inside = (row < tokens)[:, None] & (column < columns)[None, :]
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    total = tl.load(base + at, mask=inside, other=0.0).to(tl.float32)
    ranked = (row < tokens)[:, None] & (rank < RANK)[None, :]
    x = tl.load(narrow + row[:, None] * RANK + rank[None, :], mask=ranked, other=0.0)
    ended = tl.load(ends + group_number, mask=group_number < groups, other=2147483647) <= begin
    group = tl.sum(ended.to(tl.int32), 0)  # groups that end before the first row
    while (begin < last) & (group < groups):
        end = tl.load(ends + group)
        belongs = ((row >= begin) & (row < end))[:, None]
        of_group = matrices + group.to(tl.int64) * group_stride
        w = tl.load(
            of_group + rank[:, None] * rank_stride + column[None, :] * column_stride,
            mask=(rank < RANK)[:, None] & (column < columns)[None, :], other=0.0,
        )  # fmt: skip
        total += tl.dot(tl.where(belongs, x, 0.0), w, input_precision="ieee")
        if BIAS:
            b = tl.load(bias + group * columns + column, mask=column < columns, other=0.0).to(tl.float32)
            total += tl.where(belongs, b[None, :], 0.0)
        begin = tl.maximum(begin, end)
        group += 1
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@torch.library.custom_op("ftbench::add_products", mutates_args=())
def add_products(
    base: torch.Tensor, small: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return base + small @ matrices[g] + bias[g], where g is the group of each row. The shapes are base: (rows, out),
    small: (rows, rank), matrices: (groups, rank, out), ends: (groups,), bias: (groups, out) or None."""
    base, small, (groups, rank, columns) = base.contiguous(), small.contiguous(), matrices.shape
    out, given = torch.empty_like(base), base if bias is None else bias.contiguous()
    grid = (triton.cdiv(columns, COLUMNS), triton.cdiv(len(base), ROWS))
    _add_products[grid](
        base, small, matrices, ends, given, out, len(base), columns, groups, *matrices.stride(), RANK=rank,
        PADDED=max(16, triton.next_power_of_2(rank)), GROUPS=triton.next_power_of_2(groups),
        BIAS=bias is not None, ROWS=ROWS, COLUMNS=COLUMNS,
    )  # fmt: skip
    return out


add_products.register_fake(lambda base, *_: torch.empty_like(base, memory_format=torch.contiguous_format))


class _LoraA(torch.autograd.Function):
    """Return x and x A, where A is the matrix of each row's group. The backward pass adds both gradients of x."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, down: torch.Tensor, ends: torch.Tensor) -> Any:
        ctx.save_for_backward(rows, down, ends)
        return rows.view_as(rows), grouped(rows, down, ends)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (rows, down, ends), (drows, dsmall) = ctx.saved_tensors, gradients
        whole = add_products(drows, dsmall, down.transpose(-2, -1), ends, None) if ctx.needs_input_grad[0] else None
        return whole, _sums(rows, dsmall.contiguous(), ends), None


class _LoraB(torch.autograd.Function):
    """Return base + small @ B + bias, where B and bias are those of each row's group."""

    @staticmethod
    def forward(ctx: Any, base: torch.Tensor, small: torch.Tensor, up: torch.Tensor, ends: Any, bias: Any) -> Any:
        ctx.save_for_backward(small, up, ends)
        return add_products(base, small, up, ends, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (small, up, ends), d = ctx.saved_tensors, gradients[0].contiguous()
        return d, grouped(d, up.transpose(-2, -1), ends), _sums(small, d, ends), None, None


def add_adapter(
    product: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor, down: torch.Tensor, up: torch.Tensor,
    ends: torch.Tensor, bias: torch.Tensor | None,
) -> torch.Tensor | None:  # fmt: skip
    """Return product(rows) + (rows @ A) @ B + bias of each row's expert. The shapes are rows: (tokens, in), down (A):
    (experts, in, rank), up (B): (experts, rank, out), ends: (experts,), bias: (experts, out), without gradient. Return
    None if the kernel does not support the inputs."""
    supported = rows.dtype in DTYPES and down.shape[-1] <= MAX_RANK and _can_use_grouped_mm(rows, down, ends)
    if not supported or not expert_rows.has_kernels(rows, bias):
        return None
    rows, small = _LoraA.apply(rows, down, ends)
    result: torch.Tensor = _LoraB.apply(product(rows), small, up, ends, bias)
    return result

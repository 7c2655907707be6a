"""The gate of an MLP over 8-bit products, both ways: the adapters' part of gate and up is added where they are read,
and what is written is written in 8 bits, too, for the product that follows (`delayed_cast` has the scales).

Passes over the activations of tokens x inner, forward: gate and up read, the product of both written, and half as much:
3.5, where the adapters' product would read and write gate and up once more and a cast would read again: 8.5. Backward:
gate, up and the gradient read, two gradients written, and half as much: 6, where a cast would read two more. The
adapters' numbers are small: tokens x rank, and inner x rank, which the cache holds.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor

from ftbench.worker.kernels.delayed_cast import scale_to, shortened

TILE = {"ROWS": 32, "COLUMNS": 128, "num_warps": 8}
PARTS = 8  # of the columns: a program for ROWS rows and one part


@triton.jit
def _adapted(
    base: tensor, thin: tensor, b: tensor, row: tensor, column: tensor, start: tensor, tokens: tensor, columns: tensor,
    rank: tensor, RANK: constexpr, PRECISION: constexpr,
) -> tensor:  # fmt: skip
    """Return a tile of what the base product made, rows x columns from `start` on, with what the adapters add."""
    r, at = tl.arange(0, RANK), start + column
    values = tl.load(
        base + row[:, None] * 2 * columns + at[None, :],
        mask=(row < tokens)[:, None] & (column < columns)[None, :],
        other=0.0,
    )
    factor = tl.load(
        b + at[None, :] * rank + r[:, None], mask=(r < rank)[:, None] & (column < columns)[None, :], other=0.0
    )
    return values.to(tl.float32) + tl.dot(thin, factor.to(tl.float32), input_precision=PRECISION)


@triton.jit
def _put(
    to: tensor, values: tensor, row: tensor, column: tensor, width: tensor, start: tensor, tokens: tensor,
    columns: tensor,
) -> None:  # fmt: skip
    there = (row < tokens)[:, None] & (column < columns)[None, :]
    tl.store(to + row[:, None] * width + (start + column)[None, :], values.to(to.dtype.element_ty), mask=there)


@triton.jit
def _gate(
    dout: tensor, base: tensor, mid: tensor, b: tensor, out: tensor, small: tensor, factor: tensor, maxima: tensor,
    tokens: tensor, columns: tensor, rank: tensor, BACKWARD: constexpr, LIMIT: constexpr, AGAIN: constexpr,
    RANK: constexpr, PRECISION: constexpr, ROWS: constexpr, COLUMNS: constexpr,
) -> None:  # fmt: skip
    """Write silu(gate) * up, or with BACKWARD the gradients of both side by side, and that in 8 bits."""
    known = tl.load(maxima)
    if (known > 0) & AGAIN:
        return
    scale, largest = scale_to(known, maxima + 1, LIMIT), tl.zeros((ROWS, COLUMNS), tl.float32)
    above, row, r = tl.program_id(0).to(tl.int64) * ROWS, tl.arange(0, ROWS), tl.arange(0, RANK)
    tokens -= tl.program_id(0) * ROWS  # from here on of this tile, whose places 32 bits hold
    base += above * 2 * columns
    mid += above * rank
    dout += above * columns
    out += above * columns * (1 + BACKWARD)
    small += above * columns * (1 + BACKWARD)
    of_mid = (row < tokens)[:, None] & (r < rank)[None, :]
    thin = tl.load(mid + row[:, None] * rank + r[None, :], mask=of_mid, other=0.0).to(tl.float32)
    for first in range(tl.program_id(1) * COLUMNS, columns, tl.num_programs(1) * COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        g = _adapted(base, thin, b, row, column, 0, tokens, columns, rank, RANK, PRECISION)
        u = _adapted(base, thin, b, row, column, columns, tokens, columns, rank, RANK, PRECISION)
        s = tl.sigmoid(g)
        if BACKWARD:
            there = (row < tokens)[:, None] & (column < columns)[None, :]
            d = tl.load(dout + row[:, None] * columns + column[None, :], mask=there, other=0.0).to(tl.float32)
            dgate, dup = d * u * s * (1.0 + g * (1.0 - s)), d * g * s
            largest = tl.maximum(largest, tl.maximum(tl.abs(dgate), tl.abs(dup)))
            _put(out, dgate, row, column, 2 * columns, 0, tokens, columns)
            _put(out, dup, row, column, 2 * columns, columns, tokens, columns)
            _put(small, shortened(dgate, scale, LIMIT), row, column, 2 * columns, 0, tokens, columns)
            _put(small, shortened(dup, scale, LIMIT), row, column, 2 * columns, columns, tokens, columns)
        else:
            gated = g * s * u
            largest = tl.maximum(largest, tl.abs(gated))
            _put(out, gated, row, column, columns, 0, tokens, columns)
            _put(small, shortened(gated, scale, LIMIT), row, column, columns, 0, tokens, columns)
    tl.atomic_max(maxima + 1, tl.max(tl.max(largest, 1), 0))
    tl.store(factor, 1.0 / scale)


def _run(
    dout: torch.Tensor | None, base: torch.Tensor, mid: torch.Tensor, b: torch.Tensor, maxima: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    tokens, columns, rank = len(base), base.shape[1] // 2, mid.shape[1]
    out = base.new_empty(tokens, columns if dout is None else 2 * columns)
    small, factor = torch.empty_like(out, dtype=dtype), maxima.new_empty(())
    given = (base if dout is None else dout.contiguous(), base, mid.contiguous(), b, out, small, factor, maxima)
    constants = {"BACKWARD": dout is not None, "LIMIT": torch.finfo(dtype).max, **_product(rank, mid.dtype), **TILE}
    grid = (triton.cdiv(tokens, TILE["ROWS"]), min(PARTS, triton.cdiv(columns, TILE["COLUMNS"])))
    for again in (False, True):
        _gate[grid](*given, tokens, columns, rank, AGAIN=again, **constants)
    return out, small, factor


def _product(rank: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the inner width of the adapters' product on tensor cores, and their precision, which holds 16 bits."""
    precision = "ieee" if dtype == torch.float32 else "tf32"
    return {"RANK": max(16, triton.next_power_of_2(rank)), "PRECISION": precision}


@torch.library.custom_op("ftbench::gate_and_cast", mutates_args=())
def gate_and_cast(
    base: torch.Tensor, mid: torch.Tensor, b: torch.Tensor, maxima: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return silu(gate) * up, tokens x inner, of [gate up] = base + mid b', tokens x 2 inner, contiguous; that in 8
    bits, and its factor. What the maxima are is said by `cast_by_last`."""
    return _run(None, base, mid, b, maxima, dtype)


@gate_and_cast.register_fake
def _(
    base: torch.Tensor, mid: torch.Tensor, b: torch.Tensor, maxima: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    out = base.new_empty(base.shape[0], base.shape[1] // 2)
    return out, torch.empty_like(out, dtype=dtype), maxima.new_empty(())


@torch.library.custom_op("ftbench::gate_backward_and_cast", mutates_args=())
def gate_backward_and_cast(
    dout: torch.Tensor, base: torch.Tensor, mid: torch.Tensor, b: torch.Tensor, maxima: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradient of [gate up], that in 8 bits, and its factor."""
    return _run(dout, base, mid, b, maxima, dtype)


@gate_backward_and_cast.register_fake
def _(
    dout: torch.Tensor, base: torch.Tensor, mid: torch.Tensor, b: torch.Tensor, maxima: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    out = base.new_empty(base.shape)
    return out, torch.empty_like(out, dtype=dtype), maxima.new_empty(())

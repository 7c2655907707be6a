"""Compute silu(gate) * up of an MLP and the LoRA products before and after it in one kernel per direction.

These kernels replace separate ones only if the MLP's products use 8-bit weights. With 16-bit weights, the fused
backward kernel was slower on an H200 than separate kernels for the gate, its gradient and the adapters.

Costs are counted in passes. One pass reads or writes 16-bit activations (tokens, inner) once. `inner` is the width of
the MLP. `gate_proj`, `up_proj` and `down_proj` are its three linear layers.

- Forward, 2.5 passes: read gate and up (2), write the 8-bit result (0.5).
- Backward, 4 passes: read gate, up and the gradient (3), write the 8-bit gradients of gate and up (1).
- Separate adapter products would add 5 passes: the gradients of B of gate_proj and up_proj (2), the gradient of A of
  down_proj (1), and the gradients of A of gate_proj and up_proj and of the MLP's input (2).
- A program keeps sums over rows in registers. It writes its sums over columns (tokens, rank) to memory, and a second
  kernel adds them. This costs half a pass for rank 16, and one pass for rank 32.

Names: base (tokens, 2 inner) is the product of the input with the frozen weights of gate_proj and up_proj. mid (tokens,
rank) is its product with their A. b (2 inner, rank) is their s B, where s is the scale of LoRA. a (down_rank, inner) is
A of down_proj. [gate up] = base + mid b'. ' is the transpose. thin (tokens, down_rank) is the gradient of
(silu(gate) * up) a'.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor

from ftbench.kernels.delayed_cast import scale_to, shortened

TILE = {"ROWS": 64, "COLUMNS": 64, "num_warps": 4}
PARTS = 8  # programs per group of rows (forward) or columns (backward); each program loops over its share of the tiles


@triton.jit
def _tile(x: tensor, row: tensor, column: tensor, width: tensor, rows: tensor, columns: tensor) -> tensor:
    """Load x[row, column] as a tile. `row` and `column` are vectors of indices. `width` is the row stride in elements.
    Indices from `rows` or `columns` on are out of range and give zeros."""
    there = (row < rows)[:, None] & (column < columns)[None, :]
    return tl.load(x + row[:, None] * width + column[None, :], mask=there, other=0.0)


@triton.jit
def _put(
    to: tensor, values: tensor, row: tensor, column: tensor, width: tensor, rows: tensor, columns: tensor
) -> None:  # fmt: skip
    there = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(to + row[:, None] * width + column[None, :], values.to(to.dtype.element_ty), mask=there)


@triton.jit
def _dot(x: tensor, y: tensor, TYPE: constexpr) -> tensor:
    """Convert two tiles to TYPE and return their matrix product in float32."""
    return tl.dot(x.to(TYPE), y.to(TYPE), input_precision="ieee")


@triton.jit
def _adapted_swiglu_forward(
    base: tensor, mid: tensor, b: tensor, a: tensor, small: tensor, factor: tensor, maxima: tensor, of_rows: tensor,
    tokens: tensor, columns: tensor, mid_row: tensor, b_row: tensor, a_row: tensor, rank: tensor, down_rank: tensor,
    LIMIT: constexpr, AGAIN: constexpr, RANK: constexpr, TYPE: constexpr, ROWS: constexpr, COLUMNS: constexpr,
) -> None:  # fmt: skip
    """Write silu(gate) * up in 8 bits to `small`. Write partial sums of its product with a' to `of_rows`. One program
    handles ROWS tokens and every n-th tile of columns, where n is the number of programs per group of tokens."""
    known = tl.load(maxima)
    if (known > 0) & AGAIN:
        return
    scale, largest = scale_to(known, maxima + 1, LIMIT), tl.zeros((ROWS, COLUMNS), tl.float32)
    above, row, r = tl.program_id(0).to(tl.int64) * ROWS, tl.arange(0, ROWS), tl.arange(0, RANK)
    left = tokens - tl.program_id(0) * ROWS  # remaining rows; relative positions fit in 32 bits
    base += above * 2 * columns
    small += above * columns
    of_rows += (tl.program_id(1).to(tl.int64) * tokens + above) * RANK
    thin, total = _tile(mid + above * mid_row, row, r, mid_row, left, rank), tl.zeros((ROWS, RANK), tl.float32)
    for first in range(tl.program_id(1) * COLUMNS, columns, tl.num_programs(1) * COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        of_gate = _tile(b, column, r, b_row, columns, rank)
        of_up = _tile(b + columns * b_row, column, r, b_row, columns, rank)
        g = _tile(base, row, column, 2 * columns, left, columns) + _dot(thin, tl.trans(of_gate), TYPE)
        u = _tile(base + columns, row, column, 2 * columns, left, columns) + _dot(thin, tl.trans(of_up), TYPE)
        gated = g * tl.sigmoid(g) * u
        largest = tl.maximum(largest, tl.abs(gated))
        total += _dot(gated, tl.trans(_tile(a, r, column, a_row, down_rank, columns)), TYPE)
        _put(small, shortened(gated, scale, LIMIT), row, column, columns, left, columns)
    _put(of_rows, total, row, r, RANK, left, RANK)
    tl.atomic_max(maxima + 1, tl.max(tl.max(largest, 1), 0))
    tl.store(factor, 1.0 / scale)


@triton.jit
def _adapted_swiglu_backward(
    dout: tensor, base: tensor, mid: tensor, b: tensor, thin: tensor, a: tensor, small: tensor, factor: tensor,
    maxima: tensor, of_columns: tensor, of_rows: tensor, tokens: tensor, columns: tensor, mid_row: tensor,
    b_row: tensor, thin_row: tensor, a_row: tensor, rank: tensor, down_rank: tensor, size: tensor, LIMIT: constexpr,
    AGAIN: constexpr, RANK: constexpr, TYPE: constexpr, ROWS: constexpr, COLUMNS: constexpr,
) -> None:  # fmt: skip
    """Write the gradients of gate and up in 8 bits to `small` (tokens, 2 inner). One program handles COLUMNS columns
    and `size` tokens. It also writes two partial sums. `of_rows` is the gradient of mid, summed over the program's
    columns. `of_columns` contains the gradients of b and a, summed over the program's tokens."""
    known = tl.load(maxima)
    if (known > 0) & AGAIN:
        return
    scale, largest = scale_to(known, maxima + 1, LIMIT), tl.zeros((ROWS, COLUMNS), tl.float32)
    row, r, column = tl.arange(0, ROWS), tl.arange(0, RANK), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    of_gate = _tile(b, column, r, b_row, columns, rank)
    of_up = _tile(b + columns * b_row, column, r, b_row, columns, rank)
    of_down = _tile(a, r, column, a_row, down_rank, columns)
    db_gate = tl.zeros((COLUMNS, RANK), tl.float32)
    db_up, da = db_gate, db_gate
    start = tl.program_id(1).to(tl.int64) * size
    of_rows += tl.program_id(0).to(tl.int64) * tokens * RANK
    for first in range(start, tl.minimum(start + size, tokens), ROWS):
        left = tokens - first
        m = _tile(mid + first * mid_row, row, r, mid_row, left, rank)
        t = _tile(thin + first * thin_row, row, r, thin_row, left, down_rank)
        g = _tile(base + first * 2 * columns, row, column, 2 * columns, left, columns)
        u = _tile(base + first * 2 * columns + columns, row, column, 2 * columns, left, columns)
        g, u = g + _dot(m, tl.trans(of_gate), TYPE), u + _dot(m, tl.trans(of_up), TYPE)
        d = _tile(dout + first * columns, row, column, columns, left, columns) + _dot(t, of_down, TYPE)
        s = tl.sigmoid(g)
        gated, dgate, dup = g * s * u, d * u * s * (1.0 + g * (1.0 - s)), d * g * s
        da += _dot(tl.trans(gated), t, TYPE)
        db_gate += _dot(tl.trans(dgate), m, TYPE)
        db_up += _dot(tl.trans(dup), m, TYPE)
        _put(of_rows + first * RANK, _dot(dgate, of_gate, TYPE) + _dot(dup, of_up, TYPE), row, r, RANK, left, RANK)
        largest = tl.maximum(largest, tl.maximum(tl.abs(dgate), tl.abs(dup)))
        to = small + first * 2 * columns
        _put(to, shortened(dgate, scale, LIMIT), row, column, 2 * columns, left, columns)
        _put(to + columns, shortened(dup, scale, LIMIT), row, column, 2 * columns, left, columns)
    of_columns += tl.program_id(1) * 3 * RANK * columns
    _put(of_columns, db_gate, column, r, RANK, columns, RANK)
    _put(of_columns + RANK * columns, db_up, column, r, RANK, columns, RANK)
    _put(of_columns + 2 * RANK * columns, da, column, r, RANK, columns, RANK)
    tl.atomic_max(maxima + 1, tl.max(tl.max(largest, 1), 0))
    tl.store(factor, 1.0 / scale)


def constants_of(rank: int, dtype: torch.dtype, small: torch.dtype, interpreted: bool) -> dict[str, Any]:
    """Return the compile-time constants of a kernel. RANK is at least 16, the smallest inner dimension of tensor
    cores. TYPE is float32 if the kernel is `interpreted`, because Triton's interpreter cannot multiply 16 bits."""
    types = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    TYPE = tl.float32 if interpreted else types.get(dtype, tl.float32)
    return {"RANK": max(16, triton.next_power_of_2(rank)), "TYPE": TYPE, "LIMIT": torch.finfo(small).max, **TILE}


@torch.library.custom_op("ftbench::gate_and_cast", mutates_args=())
def gate_and_cast(
    base: torch.Tensor, mid: torch.Tensor, b: torch.Tensor, a: torch.Tensor, maxima: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return three tensors: silu(gate) * up in 8 bits (tokens, inner), the factor that undoes the scale of these
    values, and (silu(gate) * up) a' (tokens, down_rank). `base` must be contiguous. The module docstring defines the
    other names. `maxima` and `dtype` are as in `cast_by_last`."""
    tokens, columns, rank, down = len(base), base.shape[1] // 2, mid.shape[1], len(a)
    constants = constants_of(max(rank, down), base.dtype, dtype, not base.is_cuda)
    parts = min(PARTS, triton.cdiv(columns, TILE["COLUMNS"]))
    small, factor = base.new_empty(tokens, columns, dtype=dtype), maxima.new_empty(())
    of_rows = maxima.new_empty(parts, tokens, constants["RANK"])
    sizes = (tokens, columns, mid.stride(0), b.stride(0), a.stride(0), rank, down)
    for again in (False, True):
        _adapted_swiglu_forward[(triton.cdiv(tokens, TILE["ROWS"]), parts)](
            base, mid, b, a, small, factor, maxima, of_rows, *sizes, AGAIN=again, **constants
        )  # fmt: skip
    return small, factor, of_rows.sum(0)[:, :down].to(base.dtype).contiguous()


gate_and_cast.register_fake(
    lambda base, mid, b, a, maxima, dtype: (
        base.new_empty(base.shape[0], base.shape[1] // 2, dtype=dtype), maxima.new_empty(()),
        base.new_empty(base.shape[0], a.shape[0]),
    )
)  # fmt: skip


@torch.library.custom_op("ftbench::gate_gradients", mutates_args=())
def gate_gradients(
    dout: torch.Tensor, base: torch.Tensor, mid: torch.Tensor, b: torch.Tensor, thin: torch.Tensor, a: torch.Tensor,
    maxima: torch.Tensor, dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return five tensors: the gradients of gate and up side by side in 8 bits (tokens, 2 inner), the factor that
    undoes their scale, and the gradients of mid, b and a (shapes of mid, b and a). The gradient of silu(gate) * up is
    dout + thin a, where dout (tokens, inner) comes from the frozen weight of down_proj. `base` must be contiguous.
    Rows of mid, b, thin and a may have any stride."""
    tokens, columns, rank, down = len(base), base.shape[1] // 2, mid.shape[1], len(a)
    constants = constants_of(max(rank, down), base.dtype, dtype, not base.is_cuda)
    tiles, wide = triton.cdiv(columns, TILE["COLUMNS"]), constants["RANK"]
    size = triton.cdiv(triton.cdiv(tokens, TILE["ROWS"]), PARTS) * TILE["ROWS"]
    small, factor = torch.empty_like(base, dtype=dtype), maxima.new_empty(())
    of_columns, of_rows = maxima.new_empty(PARTS, 3 * columns, wide), maxima.new_empty(tiles, tokens, wide)
    given = (dout.contiguous(), base, mid, b, thin, a, small, factor, maxima, of_columns, of_rows)
    sizes = (tokens, columns, *(part.stride(0) for part in (mid, b, thin, a)), rank, down, size)
    for again in (False, True):
        _adapted_swiglu_backward[(tiles, PARTS)](*given, *sizes, AGAIN=again, **constants)
    db, da = of_columns.sum(0).to(base.dtype).split([2 * columns, columns])
    dmid = of_rows.sum(0)[:, :rank].to(base.dtype)
    return small, factor, dmid.contiguous(), db[:, :rank].clone(), da[:, :down].t().contiguous()


gate_gradients.register_fake(
    lambda dout, base, mid, b, thin, a, maxima, dtype: (
        torch.empty_like(base, dtype=dtype), maxima.new_empty(()), *map(torch.empty_like, (mid, b, a))
    )
)  # fmt: skip

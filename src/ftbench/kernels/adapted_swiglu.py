"""Compute gated = silu(gate) * up of an MLP, together with the LoRA products before and after it. One kernel computes
the forward pass, and one kernel the backward pass.

The MLP has the linear layers gate_proj, up_proj and down_proj. gate, up and gated are (tokens, inner). x' is the
transpose of x, and s is the scale of LoRA. The kernels use these tensors:
- [gate up] = base + mid @ b' (tokens, 2 * inner).
- base (tokens, 2 * inner) is the product of the MLP's input with the frozen weights of gate_proj and up_proj.
- mid (tokens, rank) is the product of the MLP's input with A of gate_proj and up_proj.
- b (2 * inner, rank) is s * B of gate_proj and up_proj. a (down_rank, inner) is A of down_proj.
- thin (tokens, down_rank) is the gradient of gated @ a'.

One pass reads or writes a 16-bit tensor (tokens, inner) once. The forward kernel needs 2.5 passes, and the backward
kernel 4. Separate adapter kernels would add 5 passes. A program keeps sums over rows in registers. It writes its sums
over columns (tokens, rank) to memory, and a second kernel adds them (half a pass for rank 16, one pass for rank 32).

ftbench uses these kernels only if the MLP has 8-bit weights. With 16-bit weights, the fused backward kernel was slower
on an H200 than separate kernels for the gate, its gradient and the adapters.
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
    """Return x[row, column] as a tile (rows, columns). `row` and `column` are vectors of indices. `width` is the row
    stride of x. The tile is 0 for indices outside x: row >= rows or column >= columns."""
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    return tl.load(x + row[:, None] * width + column[None, :], mask=mask, other=0.0)


@triton.jit
def _store(
    to: tensor, values: tensor, row: tensor, column: tensor, width: tensor, rows: tensor, columns: tensor
) -> None:  # fmt: skip
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(to + row[:, None] * width + column[None, :], values.to(to.dtype.element_ty), mask=mask)


@triton.jit
def _dot(x: tensor, y: tensor, TYPE: constexpr) -> tensor:
    """Return the matrix product x @ y of two tiles in float32. First convert the tiles to TYPE."""
    return tl.dot(x.to(TYPE), y.to(TYPE), input_precision="ieee")


@triton.jit
def _sigmoid(x: tensor, TYPE: constexpr) -> tensor:
    """Return 1 / (1 + exp(-x)). Unless TYPE is float32, use faster approximations (absolute error about 1e-7)."""
    if tl.float32 == TYPE:
        return tl.sigmoid(x)
    total = 1.0 + tl.exp2(x * -1.4426950408889634)  # exp(-x) = 2 ** (-x / ln 2)
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [total], tl.float32, True, 1)


@triton.jit
def _adapted_swiglu_forward(
    base: tensor, mid: tensor, b: tensor, a: tensor, small: tensor, factor: tensor, maxima: tensor, of_rows: tensor,
    tokens: tensor, columns: tensor, mid_row: tensor, b_row: tensor, a_row: tensor, rank: tensor, down_rank: tensor,
    LIMIT: constexpr, AGAIN: constexpr, RANK: constexpr, TYPE: constexpr, ROWS: constexpr, COLUMNS: constexpr,
    STAGES: constexpr,
) -> None:  # fmt: skip
    """Compute [gate up] = base + mid @ b' and gated = silu(gate) * up. Write gated in 8 bits to `small`. n programs
    share ROWS tokens. Each of them handles every n-th tile, and writes its part of the sum gated @ a' to `of_rows`."""
    known = tl.load(maxima)
    if (known > 0) & AGAIN:
        return
    scale, largest = scale_to(known, maxima + 1, LIMIT), tl.zeros((ROWS,), tl.float32)
    above, row, r = tl.program_id(0).to(tl.int64) * ROWS, tl.arange(0, ROWS), tl.arange(0, RANK)
    left = tokens - tl.program_id(0) * ROWS  # remaining rows; relative positions fit in 32 bits
    base += above * 2 * columns
    small += above * columns
    of_rows += (tl.program_id(1).to(tl.int64) * tokens + above) * RANK
    thin, total = _tile(mid + above * mid_row, row, r, mid_row, left, rank), tl.zeros((ROWS, RANK), tl.float32)
    for first in tl.range(tl.program_id(1) * COLUMNS, columns, tl.num_programs(1) * COLUMNS, num_stages=STAGES):
        column = first + tl.arange(0, COLUMNS)
        of_gate = _tile(b, column, r, b_row, columns, rank)
        of_up = _tile(b + columns * b_row, column, r, b_row, columns, rank)
        g = _tile(base, row, column, 2 * columns, left, columns) + _dot(thin, tl.trans(of_gate), TYPE)
        u = _tile(base + columns, row, column, 2 * columns, left, columns) + _dot(thin, tl.trans(of_up), TYPE)
        gated = g * _sigmoid(g, TYPE) * u
        largest = tl.maximum(largest, tl.max(tl.abs(gated), 1))
        total += _dot(gated, tl.trans(_tile(a, r, column, a_row, down_rank, columns)), TYPE)
        _store(small, shortened(gated, scale, LIMIT, tl.float32 == TYPE), row, column, columns, left, columns)
    _store(of_rows, total, row, r, RANK, left, RANK)
    tl.atomic_max(maxima + 1, tl.max(largest, 0))
    tl.store(factor, 1.0 / scale)


@triton.jit
def _adapted_swiglu_backward(
    dout: tensor, base: tensor, mid: tensor, b: tensor, thin: tensor, a: tensor, small: tensor, factor: tensor,
    maxima: tensor, of_columns: tensor, of_rows: tensor, tokens: tensor, columns: tensor, mid_row: tensor,
    b_row: tensor, thin_row: tensor, a_row: tensor, rank: tensor, down_rank: tensor, size: tensor, LIMIT: constexpr,
    AGAIN: constexpr, RANK: constexpr, TYPE: constexpr, ROWS: constexpr, COLUMNS: constexpr, STAGES: constexpr,
) -> None:  # fmt: skip
    """Write the gradients of gate and up in 8 bits to `small` (tokens, 2 * inner). A program handles COLUMNS columns
    and `size` tokens. It writes the gradient of mid, summed over its columns, to `of_rows`. It writes the gradients of
    b and a, summed over its tokens, to `of_columns`. The module docstring defines mid, b and a."""
    known = tl.load(maxima)
    if (known > 0) & AGAIN:
        return
    scale, largest = scale_to(known, maxima + 1, LIMIT), tl.zeros((ROWS,), tl.float32)
    row, r, column = tl.arange(0, ROWS), tl.arange(0, RANK), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    of_gate = _tile(b, column, r, b_row, columns, rank)
    of_up = _tile(b + columns * b_row, column, r, b_row, columns, rank)
    of_down = _tile(a, r, column, a_row, down_rank, columns)
    db_gate = tl.zeros((COLUMNS, RANK), tl.float32)
    db_up, da = db_gate, db_gate
    start = tl.program_id(1).to(tl.int64) * size
    of_rows += tl.program_id(0).to(tl.int64) * tokens * RANK
    for first in tl.range(start, tl.minimum(start + size, tokens), ROWS, num_stages=STAGES):
        left = tokens - first
        m = _tile(mid + first * mid_row, row, r, mid_row, left, rank)
        t = _tile(thin + first * thin_row, row, r, thin_row, left, down_rank)
        g = _tile(base + first * 2 * columns, row, column, 2 * columns, left, columns)
        u = _tile(base + first * 2 * columns + columns, row, column, 2 * columns, left, columns)
        g, u = g + _dot(m, tl.trans(of_gate), TYPE), u + _dot(m, tl.trans(of_up), TYPE)
        d = _tile(dout + first * columns, row, column, columns, left, columns) + _dot(t, of_down, TYPE)
        s = _sigmoid(g, TYPE)
        silu = g * s
        gated, dgate, dup = silu * u, d * u * (s + silu * (1.0 - s)), d * silu
        da += _dot(tl.trans(gated), t, TYPE)
        db_gate += _dot(tl.trans(dgate), m, TYPE)
        db_up += _dot(tl.trans(dup), m, TYPE)
        _store(of_rows + first * RANK, _dot(dgate, of_gate, TYPE) + _dot(dup, of_up, TYPE), row, r, RANK, left, RANK)
        largest = tl.maximum(largest, tl.max(tl.maximum(tl.abs(dgate), tl.abs(dup)), 1))
        to = small + first * 2 * columns
        _store(to, shortened(dgate, scale, LIMIT, tl.float32 == TYPE), row, column, 2 * columns, left, columns)
        _store(to + columns, shortened(dup, scale, LIMIT, tl.float32 == TYPE), row, column, 2 * columns, left, columns)
    of_columns += tl.program_id(1) * 3 * RANK * columns
    _store(of_columns, db_gate, column, r, RANK, columns, RANK)
    _store(of_columns + RANK * columns, db_up, column, r, RANK, columns, RANK)
    _store(of_columns + 2 * RANK * columns, da, column, r, RANK, columns, RANK)
    tl.atomic_max(maxima + 1, tl.max(largest, 0))
    tl.store(factor, 1.0 / scale)


def constants_of(rank: int, base: torch.Tensor, small: torch.dtype) -> dict[str, Any]:
    """Return the compile-time constants of a kernel. RANK is at least 16, the smallest inner dimension of tensor cores.
    TYPE is float32 on a CPU, because Triton's interpreter cannot multiply 16-bit values. With 16-bit values, Hopper
    loads two tiles ahead (STAGES). Other GPUs were not measured, and some lack the shared memory."""
    TYPE = getattr(tl, str(base.dtype).removeprefix("torch.")) if base.is_cuda else tl.float32
    ahead = base.is_cuda and base.element_size() == 2 and torch.cuda.get_device_capability(base.device) == (9, 0)
    sizes = {"RANK": max(16, triton.next_power_of_2(rank)), "STAGES": 3 if ahead else 1, **TILE}
    return sizes | {"TYPE": TYPE, "LIMIT": torch.finfo(small).max}


@torch.library.custom_op("ftbench::gate_and_cast", mutates_args=())
def gate_and_cast(
    base: torch.Tensor, mid: torch.Tensor, b: torch.Tensor, a: torch.Tensor, maxima: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return three tensors: gated = silu(gate) * up in 8 bits (tokens, inner), the factor that undoes the scale of the
    8-bit values, and gated @ a' (tokens, down_rank). The module docstring defines base, mid, b and a. `base` must be
    contiguous. `maxima` and `dtype` have the same meaning as in `cast_by_last`."""
    tokens, columns, rank, down = len(base), base.shape[1] // 2, mid.shape[1], len(a)
    constants = constants_of(max(rank, down), base, dtype)
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
    """Return five tensors: the gradients of gate and up side by side in 8 bits (tokens, 2 * inner), the factor that
    undoes the scale of these 8-bit values, and the gradients of mid, b and a (see the module docstring). The gradient
    of gated is dout + thin @ a, where dout (tokens, inner) comes from the frozen weight of down_proj. `base` must be
    contiguous. mid, b, thin and a may have any row stride."""
    tokens, columns, rank, down = len(base), base.shape[1] // 2, mid.shape[1], len(a)
    constants = constants_of(max(rank, down), base, dtype)
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

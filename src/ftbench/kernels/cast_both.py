"""Cast a matrix to 8 bits, and also write its transposed copy. The kernel reads each value once and writes it twice.

torch.compile would join such a cast with the computation before it. With the norm of the queries, the joined kernel
wrote single bytes of the copy in separate places, and needed 1.9 ms instead of 0.05 ms (8,192 tokens of Qwen3-8B, H200,
torch 2.11). A custom operation prevents this.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor

from ftbench.kernels.delayed_cast import shortened

TILE = {"ROWS": 128, "COLUMNS": 64, "num_warps": 8}


@triton.jit
def _cast_both(
    x: tensor, small: tensor, turned: tensor, scale: tensor, tokens: tensor, columns: tensor, LIMIT: constexpr,
    ROWS: constexpr, COLUMNS: constexpr,
) -> None:  # fmt: skip
    """Write one tile of x * scale to `small` (tokens, columns), and to `turned` (columns, tokens)."""
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    mask = (row < tokens) & (column < columns)
    values = tl.load(x + row * columns + column, mask=mask, other=0.0).to(tl.float32)
    cast = shortened(values, tl.load(scale), LIMIT).to(small.dtype.element_ty)
    tl.store(small + row * columns + column, cast, mask=mask)
    tl.store(turned + tl.trans(column * tokens + row), tl.trans(cast), mask=tl.trans(mask))


@torch.library.custom_op("ftbench::cast_both_ways", mutates_args=())
def cast_both_ways(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x * scale in 8 bits, clamped to the limits of `dtype`, and its transposed copy. x is (tokens, columns),
    and `scale` is a tensor with one float32 number."""
    x, (tokens, columns) = x.contiguous(), x.shape
    small, turned = x.new_empty(tokens, columns, dtype=dtype), x.new_empty(columns, tokens, dtype=dtype)
    grid = (triton.cdiv(columns, TILE["COLUMNS"]), triton.cdiv(tokens, TILE["ROWS"]))
    _cast_both[grid](x, small, turned, scale, tokens, columns, LIMIT=torch.finfo(dtype).max, **TILE)
    return small, turned


cast_both_ways.register_fake(
    lambda x, scale, dtype: (x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[::-1], dtype=dtype))
)  # fmt: skip

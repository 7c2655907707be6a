"""Cast a matrix to 8 bits and write its transposed copy. The kernel reads each value once.

torch.compile would join such a cast with the computation before it. With the norms in the backward pass, the joined
kernel wrote single bytes of the copy in separate places, and needed 1.9 ms per layer of Qwen3-8B (H200, torch 2.11). A
custom operation prevents this.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor

from ftbench.kernels.delayed_cast import shortened

TILE = {"ROWS": 128, "COLUMNS": 64, "num_warps": 8}


@triton.jit
def _cast_layouts(
    x: tensor, small: tensor, transposed: tensor, scale: tensor, tokens: tensor, columns: tensor, LIMIT: constexpr,
    BOTH: constexpr, ROWS: constexpr, COLUMNS: constexpr,
) -> None:  # fmt: skip
    """Write one tile of x * scale to `transposed` (columns, tokens), and if BOTH, to `small` (tokens, columns)."""
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    mask = (row < tokens) & (column < columns)
    values = tl.load(x + row * columns + column, mask=mask, other=0.0).to(tl.float32)
    cast = shortened(values, tl.load(scale), LIMIT).to(transposed.dtype.element_ty)
    if BOTH:
        tl.store(small + row * columns + column, cast, mask=mask)
    tl.store(transposed + tl.trans(column * tokens + row), tl.trans(cast), mask=tl.trans(mask))


@torch.library.custom_op("ftbench::cast_layouts", mutates_args=())
def cast_layouts(
    x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, both: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x * scale in 8 bits, clamped to the limits of `dtype`, and its transposed copy. x is (tokens, columns) in
    16 bits, and `scale` is a tensor with one float32 number. Without `both`, the first result is an empty tensor."""
    assert x.element_size() == 2, "with 32-bit values, Triton 3.6 writes wrong copies"
    (tokens, columns), (small, transposed) = x.shape, _empty(x, dtype, both)
    grid = (triton.cdiv(columns, TILE["COLUMNS"]), triton.cdiv(tokens, TILE["ROWS"]))
    given = (x.contiguous(), small, transposed, scale, tokens, columns)
    _cast_layouts[grid](*given, LIMIT=torch.finfo(dtype).max, BOTH=both, **TILE)
    return small, transposed


def _empty(x: torch.Tensor, dtype: torch.dtype, both: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape if both else 0, dtype=dtype), x.new_empty(x.shape[::-1], dtype=dtype)


cast_layouts.register_fake(lambda x, scale, dtype, both: _empty(x, dtype, both))

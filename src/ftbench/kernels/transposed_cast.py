"""Cast a matrix to 8 bits and write its transposed copy. The kernel reads each value once.

torch.compile would join such a cast with the computation before it. With the norms in the backward pass, the joined
kernel wrote single bytes of the copy in separate places, and needed 1.9 ms instead of 0.05 ms (8,192 tokens of
Qwen3-8B, H200, torch 2.11). Custom operations prevent this.
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
    BOTH: constexpr, ROWS: constexpr, COLUMNS: constexpr,
) -> None:  # fmt: skip
    """Write one tile of x * scale to `turned` (columns, tokens), and if BOTH, to `small` (tokens, columns)."""
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    mask = (row < tokens) & (column < columns)
    values = tl.load(x + row * columns + column, mask=mask, other=0.0).to(tl.float32)
    cast = shortened(values, tl.load(scale), LIMIT).to(turned.dtype.element_ty)
    if BOTH:
        tl.store(small + row * columns + column, cast, mask=mask)
    tl.store(turned + tl.trans(column * tokens + row), tl.trans(cast), mask=tl.trans(mask))


def _launch(x: torch.Tensor, small: torch.Tensor | None, turned: torch.Tensor, scale: torch.Tensor) -> None:
    (tokens, columns), limit = x.shape, torch.finfo(turned.dtype).max
    grid = (triton.cdiv(columns, TILE["COLUMNS"]), triton.cdiv(tokens, TILE["ROWS"]))
    given = (x.contiguous(), turned if small is None else small, turned, scale, tokens, columns)
    _cast_both[grid](*given, LIMIT=limit, BOTH=small is not None, **TILE)


@torch.library.custom_op("ftbench::cast_both_ways", mutates_args=())
def cast_both_ways(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x * scale in 8 bits, clamped to the limits of `dtype`, and its transposed copy. x is (tokens, columns)
    in 16 bits, and `scale` is a tensor with one float32 number."""
    small, turned = x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[::-1], dtype=dtype)
    _launch(x, small, turned, scale)
    return small, turned


cast_both_ways.register_fake(
    lambda x, scale, dtype: (x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[::-1], dtype=dtype))
)  # fmt: skip


@torch.library.custom_op("ftbench::cast_turned", mutates_args=())
def cast_turned(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return only the transposed copy of `cast_both_ways`."""
    turned = x.new_empty(x.shape[::-1], dtype=dtype)
    _launch(x, None, turned, scale)
    return turned


cast_turned.register_fake(lambda x, scale, dtype: x.new_empty(x.shape[::-1], dtype=dtype))

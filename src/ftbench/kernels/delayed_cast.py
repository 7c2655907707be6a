"""Cast tensors to 8 bits. Compute the scale from the largest magnitude of the previous step ("delayed scaling").

A pass reads or writes the 16-bit tensor once. A cast that first finds the current maximum needs 2.5 passes: it reads
the values twice and writes half as many bytes. This cast reads them once and needs 1.5 passes. Values up to twice the
previous maximum fit. Larger values are clamped to the largest 8-bit number. The kernel is always launched twice, so
the host does not wait for a result. In the first step, the second launch casts with the maximum that the first launch
found. In later steps, the second launch returns immediately.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor

BLOCK, PROGRAMS = 4096, 1056  # few programs, because each ends with an atomic operation on one number
ROOM = constexpr(2.0)
SMALLEST = constexpr(1e-12)


@triton.jit
def scale_to(known: tensor, seen: tensor, LIMIT: constexpr) -> tensor:
    """Return the scale of the cast: LIMIT divided by the expected maximum. `known` is the maximum magnitude of the
    previous step, or 0 in the first step. `seen` points to the maximum of the current step."""
    largest = tl.where(known > 0, known * ROOM, tl.load(seen))
    return LIMIT / tl.maximum(largest, SMALLEST)


@triton.jit
def shortened(values: tensor, scale: tensor, LIMIT: constexpr) -> tensor:
    """Multiply values by `scale` and clamp them to [-LIMIT, LIMIT], the range of the 8-bit type."""
    return tl.minimum(tl.maximum(values * scale, -LIMIT), LIMIT)


@triton.jit
def _cast_to_fp8(
    x: tensor, small: tensor, factor: tensor, maxima: tensor, size: tensor, LIMIT: constexpr, AGAIN: constexpr,
    BLOCK: constexpr,
) -> None:  # fmt: skip
    """Write x in 8 bits to `small`, the factor that undoes the scale to `factor`, and the largest magnitude to
    maxima[1]. With n programs, a program handles every n-th block of x."""
    known = tl.load(maxima)
    if (known > 0) & AGAIN:
        return
    scale = scale_to(known, maxima + 1, LIMIT)
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, size, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(values))
        tl.store(small + at, shortened(values, scale, LIMIT).to(small.dtype.element_ty), mask=at < size)
    tl.atomic_max(maxima + 1, tl.max(largest, 0))
    tl.store(factor, 1.0 / scale)


# `maxima` is mutated, but not declared so: torch.compile would copy it, because the maxima of all layers are views of
# one tensor. This is safe: maxima[1] is first read in the next step, and a repeated update gives the same value.
@torch.library.custom_op("ftbench::cast_by_last", mutates_args=())
def cast_by_last(x: torch.Tensor, maxima: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x in 8 bits and the factor that undoes its scale. `maxima` (2,) contains the largest magnitudes in the
    previous step (0 if unknown) and in the current step. The second one is updated."""
    x = x.contiguous()
    small, factor = torch.empty_like(x, dtype=dtype), maxima.new_empty(())
    grid = (min(triton.cdiv(x.numel(), BLOCK), PROGRAMS),)
    for again in (False, True):
        limit = torch.finfo(dtype).max
        _cast_to_fp8[grid](x, small, factor, maxima, x.numel(), LIMIT=limit, AGAIN=again, BLOCK=BLOCK, num_warps=8)
    return small, factor


cast_by_last.register_fake(lambda x, maxima, dtype: (x.new_empty(x.shape, dtype=dtype), maxima.new_empty(())))


class Maxima:
    """Keeps the largest magnitudes of each layer. The shape of `values` is (layers, 2, 2): layer, input or gradient,
    previous or current step. They are not saved in checkpoints, so a resumed run starts with zeros."""

    def __init__(self, layers: int, device: Any) -> None:
        self.values = torch.zeros(layers, 2, 2, device=device)
        self.trained = False

    def next_pass(self, model: torch.nn.Module, *_: Any) -> None:
        """Start a forward pass with the maxima of the last training pass. Values seen in evaluation are discarded.
        Recomputed layers and the backward pass use the same scales."""
        # `.data` hides this write from autograd, which may still need the maxima for the backward pass of an earlier
        # forward pass. Example: the reference model runs between the two passes of the policy.
        known, seen = self.values.data.unbind(-1)
        if self.trained:
            known.copy_(torch.where((seen > 0) & seen.isfinite(), seen, known))
        seen.zero_()
        self.trained = model.training

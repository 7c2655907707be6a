"""Cast tensors to 8 bits. Compute the scale from the largest magnitude of the previous step ("delayed scaling").

A pass reads or writes the 16-bit tensor once. This cast needs 1.5 passes: it reads the values once and writes them in 8
bits (half a pass). A cast that first finds the current maximum needs 2.5 passes, because it reads the values twice. The
scale leaves room for inputs up to twice the previous maximum, and for gradients (8 bits with a wider range) up to 16
times. Larger values are clamped. The kernel is always launched twice, so the host does not wait for a result. In the
first step, the first launch finds the maximum, and the second launch casts with this maximum. In later steps, the
second launch returns immediately.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor

BLOCK, PROGRAMS = 4096, 1056  # few programs, because each ends with an atomic operation on one number
ROOM, GRADIENT_ROOM = constexpr(2.0), constexpr(16.0)
INPUT_LIMIT = constexpr(448.0)  # largest float8_e4m3fn. Gradients are float8_e5m2, with a limit of 57,344
SMALLEST = constexpr(1e-12)


@triton.jit
def scale_to(known: tensor, seen: tensor, LIMIT: constexpr) -> tensor:
    """Return the scale of the cast: LIMIT / (room * known). `known` is the maximum magnitude in the previous step. If
    it is 0 (first step), return LIMIT / maximum. `seen` points to the maximum of the current step."""
    room: constexpr = GRADIENT_ROOM if LIMIT > INPUT_LIMIT else ROOM
    largest = tl.where(known > 0, known * room, tl.load(seen))
    return LIMIT / tl.maximum(largest, SMALLEST)


@triton.jit
def shortened(values: tensor, scale: tensor, LIMIT: constexpr, CLAMP: constexpr = True) -> tensor:
    """Return values * scale, clamped to the range of the 8-bit type if CLAMP. A GPU's conversion also clamps them."""
    return tl.minimum(tl.maximum(values * scale, -LIMIT), LIMIT) if CLAMP else values * scale


@triton.jit
def _cast_to_fp8(
    x: tensor, small: tensor, factor: tensor, maxima: tensor, size: tensor, LIMIT: constexpr, AGAIN: constexpr,
    BLOCK: constexpr,
) -> None:  # fmt: skip
    """Write x * scale in 8 bits to `small`, 1 / scale to `factor`, and max(abs(x)) to maxima[1]. With n programs, each
    program handles every n-th block of x."""
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


# `mutates_args` omits `maxima`, because torch.compile would copy it: the maxima of all layers are views of one tensor.
# This is safe: maxima[1] is first read in the next step, and a repeated update gives the same value.
@torch.library.custom_op("ftbench::cast_by_last", mutates_args=())
def cast_by_last(x: torch.Tensor, maxima: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x * scale in 8 bits and the factor 1 / scale. The scale depends on maxima[0], the largest magnitude of x
    in the previous step (0 if unknown). maxima[1] is set to the largest magnitude of x in the current step."""
    x = x.contiguous()
    small, factor = torch.empty_like(x, dtype=dtype), maxima.new_empty(())
    grid = (min(triton.cdiv(x.numel(), BLOCK), PROGRAMS),)
    for again in (False, True):
        limit = torch.finfo(dtype).max
        _cast_to_fp8[grid](x, small, factor, maxima, x.numel(), LIMIT=limit, AGAIN=again, BLOCK=BLOCK, num_warps=8)
    return small, factor


cast_by_last.register_fake(lambda x, maxima, dtype: (x.new_empty(x.shape, dtype=dtype), maxima.new_empty(())))


class Maxima:
    """Stores the largest magnitudes of each layer. `values` is (layers, 2, 2). The axes are layer, input or gradient,
    and previous (0) or current (1) step. Checkpoints do not contain `values`, so a resumed run starts with zeros."""

    def __init__(self, layers: int, device: Any) -> None:
        self.values = torch.zeros(layers, 2, 2, device=device)

    def next_pass(self, model: torch.nn.Module, *_: Any) -> None:
        """Start a forward pass. If the last pass was a training pass, copy `values[..., 1]` to `values[..., 0]`. Then
        set `values[..., 1]` to 0. All scales stay the same until the next forward pass."""
        # `.data` hides this write from autograd, which may still need the maxima for the backward pass of an earlier
        # forward pass. Example: the reference model runs between the two passes of the policy.
        known, seen = self.values.data.unbind(-1)
        known.copy_(torch.where((seen > 0) & seen.isfinite(), seen, known))
        seen.zero_()

    def end_pass(self, model: torch.nn.Module, *_: Any) -> None:
        """Discard the maxima of an evaluation."""
        if not model.training:
            self.values.data[..., 1].zero_()

"""Run an AdamW step with one kernel per parameter.

The kernel reads the weight, the gradient and two moments once, and writes the weight and both moments once. If all
tensors have 16 bits, it moves (4 + 3) * 2 = 14 bytes per weight. The kernel also multiplies the gradient by the
clipping factor. Clipping in a separate kernel would read and write the gradient once more. The kernel needs no
temporary memory. torchao's step copies 8-bit moments to two float32 tensors: 4.6 GiB for the head of Qwen3-8B.

bfloat16 weights and second moments are rounded stochastically. Most updates of a weight are smaller than half of its
last bit, and the second moment decays by 0.1 % per step. Rounding to the nearest value would discard these changes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor

BLOCK = 2048
SCALED = constexpr(256)  # values per scale of an 8-bit moment (torchao)
_A, _B = constexpr(0x7FEB352D), constexpr(0x846CA68B)  # multipliers of lowbias32 (C. Wellons, Hash Functions, 2018)


@triton.jit
def _hash(x: tensor) -> tensor:
    """Return a pseudorandom 32-bit integer for each 32-bit integer in x."""
    x = (x ^ (x >> 16)) * tl.full((), _A, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full((), _B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def _rounded(values: tensor, bits: tensor, to: constexpr) -> tensor:
    """Return float32 `values` in the dtype `to`. For bfloat16, round stochastically: add 16 random `bits` to the last
    16 bits, then clear the last 16 bits. Keep NaN unchanged, because the addition can turn a GPU's NaN into -0."""
    if to == tl.bfloat16:
        drawn = (values.to(tl.uint32, bitcast=True) + bits) & tl.full((), 0xFFFF0000, tl.uint32)
        values = tl.where(values == values, drawn.to(tl.float32, bitcast=True), values)
    return values.to(to)


@triton.jit
def _load(moment: tensor, scale: tensor, numbers: tensor, at: tensor, mask: tensor) -> tensor:
    """Return a moment in float32: numbers[code] * scale for an 8-bit moment. For other moments, `scale` is None."""
    values = tl.load(moment + at, mask=mask, other=0)
    if scale is None:
        values = values.to(tl.float32)
    else:
        values = tl.load(numbers + values.to(tl.int32)) * tl.load(scale + at // SCALED, mask=mask, other=0.0)
    return values


@triton.jit
def _store_codes(
    values: tensor, codes: tensor, scale: tensor, numbers: tensor, at: tensor, size: tensor, BLOCK: constexpr
) -> None:
    """Store a float32 moment in 8 bits, with the scales and codes of torchao's `quantize_8bit_with_qmap`: a binary
    search in the 256 ascending `numbers`, then the nearer of two neighbors."""
    ROWS: constexpr = BLOCK // SCALED
    largest = tl.maximum(tl.max(tl.abs(tl.reshape(values, (ROWS, SCALED))), 1), 1e-12)
    x = tl.reshape(tl.reshape(values, (ROWS, SCALED)) / largest[:, None], (BLOCK,))
    code = tl.zeros((BLOCK,), tl.int32)
    for bit in tl.static_range(8):
        higher = code + (128 >> bit)
        code = tl.where(x >= tl.load(numbers + higher), higher, code)
    above = tl.minimum(code + 1, 255)
    low, high = tl.load(numbers + code), tl.load(numbers + above)
    tl.store(codes + at, tl.where(x - low >= (high - low) * 0.5, above, code).to(tl.uint8), mask=at < size)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tl.store(scale + row, largest, mask=row * SCALED < size)


@triton.jit(do_not_specialize=["seed"])
def _adamw(
    weight: tensor, gradient: tensor, first: tensor, scale1: tensor, numbers1: tensor, second: tensor, scale2: tensor,
    numbers2: tensor, factor: tensor, size: tensor, seed: tensor, lr: tensor, decay: tensor, fresh1: tensor,
    fresh2: tensor, root: tensor, eps: tensor, BLOCK: constexpr,
) -> None:  # fmt: skip
    """Update one parameter in place, with g = factor * gradient:
      first += fresh1 * (g - first), second += fresh2 * (g * g - second),
      weight = decay * weight - lr * first / (root * sqrt(second) + eps), with the constants
      fresh1 = 1 - beta1, fresh2 = 1 - beta2, root = 1 / sqrt(1 - beta2**step),
      lr = learning rate / (1 - beta1**step), decay = 1 - learning rate * weight decay.
    The constants are computed in float64, because 1 - beta has only four exact digits in float32."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    p = tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(gradient + at, mask=mask, other=0.0).to(tl.float32) * tl.load(factor)
    m = _load(first, scale1, numbers1, at, mask)
    v = _load(second, scale2, numbers2, at, mask)
    m += fresh1 * (g - m)
    v += fresh2 * (g * g - v)
    p = p * decay - lr * m / (tl.sqrt(v) * root + eps)
    bits = _hash(at.to(tl.uint32) ^ seed.to(tl.uint32))
    tl.store(weight + at, _rounded(p, bits & 0xFFFF, weight.dtype.element_ty), mask=mask)
    if scale1 is None:
        tl.store(first + at, m.to(first.dtype.element_ty), mask=mask)
        tl.store(second + at, _rounded(v, bits >> 16, second.dtype.element_ty), mask=mask)
    else:
        _store_codes(m, first, scale1, numbers1, at, size, BLOCK)
        _store_codes(v, second, scale2, numbers2, at, size, BLOCK)


def _parts(moment: Any) -> tuple[torch.Tensor, Any, Any]:
    """Return (values, scales, table of codes). Scales and table are None for a moment that is not in 8 bits."""
    return (moment.codes, moment.scale, moment.qmap) if hasattr(moment, "qmap") else (moment, None, None)


def adamw_step(
    weight: torch.Tensor, gradient: torch.Tensor, first: Any, second: Any, factor: torch.Tensor, step: int, seed: int,
    group: dict[str, Any],
) -> None:  # fmt: skip
    """Update a contiguous weight and its moments `first` and `second` in place, as torch.optim.AdamW does. The moments
    are tensors or torchao's 8-bit states. `factor` is a tensor with one number that multiplies the gradient. `step`
    counts optimizer steps from 1. `seed` is a 32-bit integer that differs for each call. `group` has lr, betas,
    weight_decay and eps, as in torch.optim.AdamW."""
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    numbers = (
        lr / (1 - beta1**step), 1 - lr * group["weight_decay"], 1 - beta1, 1 - beta2, (1 - beta2**step) ** -0.5,
        group["eps"],
    )  # fmt: skip
    moments = [part for moment in (first, second) for part in _parts(moment)]
    given = (weight, gradient, *moments, factor, weight.numel(), seed)
    _adamw[(triton.cdiv(weight.numel(), BLOCK),)](*given, *numbers, BLOCK=BLOCK, num_warps=8)

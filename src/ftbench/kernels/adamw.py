"""Run an AdamW step with one kernel per parameter.

The kernel reads weight, gradient and two moments once, and writes weight and moments once. If all tensors have 16 bits,
it moves 14 bytes per weight. The kernel also multiplies the gradients by the clipping factor. A separate clipping
operation would read and write the gradients once more.

bfloat16 weights and second moments are rounded stochastically. Most updates of a weight are smaller than half of its
last bit. The second moment decays by 0.1 % per step. Rounding to the nearest value would lose both changes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor

BLOCK = 2048
_A, _B = constexpr(0x7FEB352D), constexpr(0x846CA68B)  # multipliers of lowbias32 (C. Wellons, Hash Functions, 2018)


@triton.jit
def _hash(x: tensor) -> tensor:
    """Return pseudorandom 32-bit integers, one for each 32-bit integer in x."""
    x = (x ^ (x >> 16)) * tl.full((), _A, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full((), _B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def _rounded(values: tensor, bits: tensor, to: constexpr) -> tensor:
    """Convert float32 values to another type. Round to bfloat16 stochastically, with 16 random bits per value. Keep
    NaN unchanged: adding 1 or more to a GPU's NaN (0x7FFFFFFF) would give -0."""
    if to == tl.bfloat16:
        drawn = (values.to(tl.uint32, bitcast=True) + bits) & tl.full((), 0xFFFF0000, tl.uint32)
        values = tl.where(values == values, drawn.to(tl.float32, bitcast=True), values)
    return values.to(to)


@triton.jit(do_not_specialize=["seed"])
def _adamw(
    weight: tensor, gradient: tensor, first: tensor, second: tensor, factor: tensor, size: tensor, seed: tensor,
    lr: tensor, decay: tensor, fresh1: tensor, fresh2: tensor, root: tensor, eps: tensor, BLOCK: constexpr,
) -> None:  # fmt: skip
    """Update a parameter in place. `lr` is the learning rate divided by the bias correction of the first moment.
    `decay` is 1 - learning rate * weight decay. `fresh1` and `fresh2` are 1 - beta, computed in float64, because in
    float32 only four digits are exact. `root` is 1 / sqrt(bias correction of the second moment)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < size
    p = tl.load(weight + at, mask=there, other=0.0).to(tl.float32)
    g = tl.load(gradient + at, mask=there, other=0.0).to(tl.float32) * tl.load(factor)
    m = tl.load(first + at, mask=there, other=0.0).to(tl.float32)
    v = tl.load(second + at, mask=there, other=0.0).to(tl.float32)
    m += fresh1 * (g - m)
    v += fresh2 * (g * g - v)
    p = p * decay - lr * m / (tl.sqrt(v) * root + eps)
    bits = _hash(at.to(tl.uint32) ^ seed.to(tl.uint32))
    tl.store(weight + at, _rounded(p, bits & 0xFFFF, weight.dtype.element_ty), mask=there)
    tl.store(first + at, m.to(first.dtype.element_ty), mask=there)
    tl.store(second + at, _rounded(v, bits >> 16, second.dtype.element_ty), mask=there)


def adamw_step(
    weight: torch.Tensor, gradient: torch.Tensor, first: torch.Tensor, second: torch.Tensor, factor: torch.Tensor,
    step: int, seed: int, group: dict[str, Any],
) -> None:  # fmt: skip
    """Update a contiguous parameter in place. `step` is the number of the optimizer step (first: 1). `factor` is a
    tensor with one number, which multiplies the gradient. `seed` is a 32-bit integer that differs for each call.
    `group` has lr, betas, weight_decay and eps, as in torch.optim.AdamW."""
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    numbers = (
        lr / (1 - beta1**step), 1 - lr * group["weight_decay"], 1 - beta1, 1 - beta2, (1 - beta2**step) ** -0.5,
        group["eps"],
    )  # fmt: skip
    given = (weight, gradient, first, second, factor, weight.numel(), seed)
    _adamw[(triton.cdiv(weight.numel(), BLOCK),)](*given, *numbers, BLOCK=BLOCK, num_warps=8)

"""A step of AdamW in one kernel a parameter: weight, gradient and two moments read, weight and moments written, each
once: 14 bytes a weight where all are in 16 bits. The factor that clips the gradients is read by the kernel, where a
pass of its own would read and write them all.

What is stored in 16 bits is rounded up or down at random, by how near each is: the weight, whose update is mostly below
half of its last bit, and the second moment, which decays by a thousandth a step and would stand still.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor

BLOCK = 2048
_A, _B = constexpr(0x7FEB352D), constexpr(0x846CA68B)  # of lowbias32 (C. Wellons, Prospecting for Hash Functions, 2018)


@triton.jit
def _hash(x: tensor) -> tensor:
    """Return 32 bits that look drawn, of 32 bits."""
    x = (x ^ (x >> 16)) * tl.full((), _A, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full((), _B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def _rounded(values: tensor, bits: tensor, to: constexpr) -> tensor:
    """Return float32 in another type; in bfloat16 each up or down by 16 random bits. What is not a number stays so: a
    GPU's has all bits set (0x7FFFFFFF), and one more would make it -0."""
    if to == tl.bfloat16:
        drawn = (values.to(tl.uint32, bitcast=True) + bits) & tl.full((), 0xFFFF0000, tl.uint32)
        values = tl.where(values == values, drawn.to(tl.float32, bitcast=True), values)
    return values.to(to)


@triton.jit(do_not_specialize=["seed"])
def _adamw(
    weight: tensor, gradient: tensor, first: tensor, second: tensor, factor: tensor, size: tensor, seed: tensor,
    lr: tensor, decay: tensor, fresh1: tensor, fresh2: tensor, root: tensor, eps: tensor, BLOCK: constexpr,
) -> None:  # fmt: skip
    """Change a parameter in place. `lr` is the rate over the first moment's correction, `decay` what is left of the
    weight, `fresh1` and `fresh2` the parts of a moment that are of this step (1 - beta: of a beta in 32 bits only four
    digits would be left of it), `root` one over the root of the second moment's correction."""
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
    """Change a dense parameter by its gradient times `factor` (a number on the device), the `step`th time. `seed`: 32
    bits, other ones each time; `group` has lr, betas, weight_decay and eps as torch.optim.AdamW."""
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    numbers = (
        lr / (1 - beta1**step), 1 - lr * group["weight_decay"], 1 - beta1, 1 - beta2, (1 - beta2**step) ** -0.5,
        group["eps"],
    )  # fmt: skip
    given = (weight, gradient, first, second, factor, weight.numel(), seed)
    _adamw[(triton.cdiv(weight.numel(), BLOCK),)](*given, *numbers, BLOCK=BLOCK, num_warps=8)

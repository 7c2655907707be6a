"""Emulate fp8 by rounding the inputs of matrix products to 8 bits.

`ftbench parity` compares fp8 with this emulation. Layer inputs and weights are rounded to E4M3, and gradients to E5M2
(P. Micikevicius et al., arXiv 2209.05433). Each tensor has one scale, computed from its maximum. A factor for all
scales gives other rounding errors of the same size. The products are computed in 32 bits.
"""

from functools import partial
from typing import Any

import torch

from ftbench.worker.optimizations.fp8 import wanted

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2


def apply(model: Any, factor: float = 1.0) -> None:
    """Round the inputs of products in all layers that fp8 recipes compute in 8 bits. `factor` multiplies all scales."""
    for name in wanted(model):
        module = model.get_submodule(name)
        module.forward = partial(_product, module, factor)


def _product(layer: Any, factor: float, x: torch.Tensor) -> torch.Tensor:
    if torch.is_autocast_enabled(x.device.type):  # F.linear casts its input too
        x = x.to(torch.get_autocast_dtype(x.device.type))
    made: torch.Tensor = _Product.apply(x, layer.weight, factor)
    return made if layer.bias is None else made + layer.bias.to(made.dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        with torch.autocast(x.device.type, enabled=False):
            return (rounded(x, FORWARD, factor) @ rounded(weight, FORWARD, factor).t()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (dy,), (x, weight) = gradients, ctx.saved_tensors
        with torch.autocast(dy.device.type, enabled=False):
            small = rounded(dy, BACKWARD, ctx.factor)
            dx = (small @ rounded(weight, FORWARD, ctx.factor)).to(dy.dtype)
            if x is None:
                return dx, None, None
            x = rounded(x, FORWARD, ctx.factor).flatten(0, -2)
            return dx, (small.flatten(0, -2).t() @ x).to(weight.dtype), None


def rounded(values: torch.Tensor, dtype: torch.dtype, factor: float = 1.0) -> torch.Tensor:
    """Return the values in float32 after rounding to an 8-bit `dtype`. The scale maps the largest absolute value to
    `factor` times the largest number of `dtype`."""
    scale = factor * torch.finfo(dtype).max / values.detach().abs().amax().float().clamp(min=1e-12)
    return (values.detach().float() * scale).to(dtype).float() / scale

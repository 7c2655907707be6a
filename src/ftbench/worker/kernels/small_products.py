"""Products with frozen weights in 8 bits: alone, with what adapters add, and of a whole MLP."""

from __future__ import annotations

from typing import Any

import torch

from ftbench.worker.kernels.adapter_products import add_product, split_gradients

WEIGHT = torch.float8_e4m3fn
ROWWISE, DELAYED = "rowwise", "tensorwise-delayed"
FAST = ("tensorwise-fast", DELAYED)
# Of torchao's recipes. `tensorwise-fast` is tensorwise with sums of fewer bits in the gradient's product, too, and
# `tensorwise-delayed` is that with inputs and gradients scaled by the step before (`kernels/delayed_cast.py`).
GRADIENT = dict.fromkeys(("tensorwise", *FAST), torch.float8_e5m2) | {ROWWISE: torch.float8_e4m3fn}
SMALLEST = 1e-12  # torchao.float8.float8_utils.EPS: no division by zero


def cast(
    values: torch.Tensor, dtype: torch.dtype, recipe: str, largest: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows x columns in 8 bits, and the factor by which a product with it is multiplied: one, or one a row
    (rows x 1). As torchao's hp_tensor_to_float8_dynamic; rowwise factors are powers of two there too. `largest` is
    that of the values, or of others that share their factor."""
    if largest is None:
        largest = values.abs().amax(1, keepdim=True) if recipe == ROWWISE else values.abs().amax()
    limit = torch.finfo(dtype).max
    scale = (limit / largest.double().clamp(min=SMALLEST)).float()
    if recipe == ROWWISE:
        scale = scale.log2().floor().exp2()
    return (values.float() * scale).clamp(-limit, limit).to(dtype), scale.reciprocal()


def _cast(
    values: torch.Tensor, dtype: torch.dtype, recipe: str, maxima: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if maxima is None:
        return cast(values, dtype, recipe)
    from ftbench.worker.kernels.delayed_cast import cast_by_last  # needs triton

    made: tuple[torch.Tensor, torch.Tensor] = cast_by_last(values, maxima, dtype)
    return made


def multiply(
    x: torch.Tensor, weight: torch.Tensor, factor: torch.Tensor, recipe: str, maxima: torch.Tensor | None,
    short: Any = None,
) -> torch.Tensor:  # fmt: skip
    """Return tokens x in → tokens x out, of a weight in 8 bits, out x in. `maxima`: those of the input and of the
    gradient, where they give the scales; `short`: x as it is cast, if there."""
    small, scale = short or _cast(x, WEIGHT, recipe, None if maxima is None else maxima[0])
    return torch._scaled_mm(small, weight.t(), scale, factor.t(), out_dtype=_out(x, recipe), use_fast_accum=True)


def multiply_back(
    dy: torch.Tensor, turned: torch.Tensor, factor: torch.Tensor, recipe: str, maxima: torch.Tensor | None,
    short: Any = None,
) -> torch.Tensor:  # fmt: skip
    """Return the gradient of `multiply`'s input, of the transposed weight, in x out. It adds up in 32 bits (torchao:
    use_fast_accum only in the forward pass), but for the recipes in FAST. `short`: dy as it is cast, if there."""
    small, scale = short or _cast(dy, GRADIENT[recipe], recipe, None if maxima is None else maxima[1])
    factors = (torch.ones_like(factor[0, 0]),) * 2 if recipe == ROWWISE else (scale, factor)
    dx = torch._scaled_mm(small, turned.t(), *factors, out_dtype=_out(dy, recipe), use_fast_accum=recipe in FAST)
    if recipe == ROWWISE:  # torchao: the product by rows is slow with 32-bit sums, so it is scaled after
        dx = dx * (scale * factor.t())
    return dx.to(dy.dtype)


class Product(torch.autograd.Function):
    """tokens x in → tokens x out with a frozen weight in 8 bits and its transpose, for the gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, factor: torch.Tensor, turned: torch.Tensor,
        turned_factor: torch.Tensor, recipe: str, maxima: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(turned, turned_factor, maxima)
        ctx.recipe = recipe
        return multiply(x, weight, factor, recipe, maxima)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        turned, factor, maxima = ctx.saved_tensors
        (dy,) = gradients
        dx = multiply_back(dy, turned, factor, ctx.recipe, maxima) if ctx.needs_input_grad[0] else None
        return dx, None, None, None, None, None, None


def _saved(x: torch.Tensor, mid: torch.Tensor, given: Any) -> list[Any]:
    """Return what `_adapted_back` reads."""
    return [x, mid, *given[2:4], given[5], *given[6:8], *given[9:]]


def _adapted_back(
    dy: torch.Tensor, saved: Any, recipe: str, scales: Any, short: Any = None, wanted: bool = True
) -> list[Any]:
    """Return the gradients of all that `AdaptedProduct` takes; `short`: dy in 8 bits and its factor, if there."""
    x, mid, turned, factor, maxima, a, b, *adapters = saved
    dx, dmid = None, dy @ b
    if wanted:
        dx = multiply_back(dy, turned, factor, recipe, maxima, short)
        add_product(dx, dmid, a)
    return [dx, *[None] * 9, *split_gradients(dmid.t() @ x, dy.t() @ mid, scales, adapters)]


class AdaptedProduct(torch.autograd.Function):
    """`Product` of layers side by side, with what their adapters add, by one product with A and one with B each way,
    which adds to what the 8-bit product wrote: for what reads the sum by kernels of its own, so that no pass for the
    sum alone is left. `given` is what `Product` takes, A of all layers, (layers r) x in, s B of all, block by block,
    out x (layers r); then the scales, and A and B of each layer in turn for their gradients alone, as in `Beside`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *given: Any) -> torch.Tensor:
        weight, factor, _, _, ctx.recipe, maxima, a, b, ctx.scales, *_ = given
        mid = x @ a.t()
        ctx.save_for_backward(*_saved(x, mid, given))
        made = multiply(x, weight, factor, ctx.recipe, maxima)
        add_product(made, mid, b.t())
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        wanted = ctx.needs_input_grad[0]
        return tuple(_adapted_back(gradients[0], ctx.saved_tensors, ctx.recipe, ctx.scales, None, wanted))


class GatedMlp(torch.autograd.Function):
    """An MLP: `AdaptedProduct` of gate and up, silu(gate) * up, `AdaptedProduct` of that. What is between is computed
    by kernels that add the adapters' part themselves and hand over 8 bits (`kernels/adapted_swiglu.py`). `given` are
    both products', `count` the first one's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, count: int, *given: Any) -> torch.Tensor:
        from ftbench.worker.kernels.adapted_swiglu import gate_and_cast  # needs triton

        first, second = given[:count], given[count:]
        weight, factor, _, _, ctx.recipe, maxima, a, b, ctx.scales, *_ = first
        of_down, down_factor, _, _, _, down_maxima, down_a, down_b, ctx.down_scales, *_ = second
        mid, base = x @ a.t(), multiply(x, weight, factor, ctx.recipe, maxima)
        gated, *short = gate_and_cast(base, mid, b, down_maxima[0], WEIGHT)
        down_mid = gated @ down_a.t()
        saved = _saved(x, mid, first)
        ctx.count = len(saved)
        ctx.save_for_backward(base, *saved, *_saved(gated, down_mid, second))
        made = multiply(gated, of_down, down_factor, ctx.recipe, down_maxima, short)
        add_product(made, down_mid, down_b.t())
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        from ftbench.worker.kernels.adapted_swiglu import gate_backward_and_cast

        base, *saved = ctx.saved_tensors
        first, second = saved[: ctx.count], saved[ctx.count :]
        dgated, *of_down = _adapted_back(gradients[0], second, ctx.recipe, ctx.down_scales)
        _, mid, _, _, maxima, _, b, *_ = first
        dy, *short = gate_backward_and_cast(dgated, base, mid, b, maxima[1], GRADIENT[ctx.recipe])
        dx, *of_first = _adapted_back(dy, first, ctx.recipe, ctx.scales, short)
        return dx, None, *of_first, *of_down


def _out(like: torch.Tensor, recipe: str) -> torch.dtype:
    """Return the dtype of a product: by rows there is bfloat16 only (torch._scaled_mm)."""
    return torch.bfloat16 if recipe == ROWWISE else like.dtype

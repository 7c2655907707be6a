"""Compute products with frozen 8-bit weights: without adapters, with adapters, and for a complete MLP."""

from typing import Any

import torch

from ftbench.kernels.adapter_products import add_product, split_gradients

WEIGHT = torch.float8_e4m3fn
DELAYED = "tensorwise-delayed"
FAST = ("tensorwise-fast", DELAYED)
# torchao's recipe `tensorwise` and two of our own. `tensorwise-fast` uses sums of fewer bits in the gradient's product
# too. `tensorwise-delayed` also scales inputs and gradients by the previous step's maxima (`kernels/delayed_cast.py`).
GRADIENT = torch.float8_e5m2
SMALLEST = 1e-12  # torchao.float8.float8_utils.EPS: no division by zero


def cast(
    values: torch.Tensor, dtype: torch.dtype, largest: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast a matrix to 8 bits. Return the cast matrix and the number that undoes its scale. The result equals
    torchao's hp_tensor_to_float8_dynamic. `largest` is the maximum of the values, or of several tensors that share a
    factor."""
    limit, largest = torch.finfo(dtype).max, values.abs().amax() if largest is None else largest
    scale = (limit / largest.double().clamp(min=SMALLEST)).float()
    return (values.float() * scale).clamp(-limit, limit).to(dtype), scale.reciprocal()


def _cast(values: torch.Tensor, dtype: torch.dtype, maxima: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    if maxima is None:
        return cast(values, dtype)
    from ftbench.kernels.delayed_cast import cast_by_last  # needs triton

    made: tuple[torch.Tensor, torch.Tensor] = cast_by_last(values, maxima, dtype)
    return made


def multiply(
    x: torch.Tensor, weight: torch.Tensor, factor: torch.Tensor, maxima: torch.Tensor | None, short: Any = None
) -> torch.Tensor:
    """Multiply tokens x in by an 8-bit weight (out x in). Return tokens x out. `maxima` has the maxima of the input
    and of the gradient (None unless scales are delayed). `short` is x after its cast, with its factor. In this case,
    only the dtype of x is used."""
    small, scale = short or _cast(x, WEIGHT, None if maxima is None else maxima[0])
    return torch._scaled_mm(small, weight.t(), scale, factor, out_dtype=x.dtype, use_fast_accum=True)


def multiply_back(
    dy: torch.Tensor, turned: torch.Tensor, factor: torch.Tensor, recipe: str, maxima: torch.Tensor | None,
    short: Any = None,
) -> torch.Tensor:  # fmt: skip
    """Return the gradient of `multiply`'s input. `turned` is the transposed weight (in x out). Sums have 32 bits,
    except for the recipes in FAST. torchao's recipes only use fast accumulation in the forward pass. `short` is dy
    after its cast, with its factor. In this case, only the dtype of dy is used."""
    small, scale = short or _cast(dy, GRADIENT, None if maxima is None else maxima[1])
    return torch._scaled_mm(small, turned.t(), scale, factor, out_dtype=dy.dtype, use_fast_accum=recipe in FAST)


class Product(torch.autograd.Function):
    """Multiply tokens x in by a frozen 8-bit weight. The gradient uses its transposed copy."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, factor: torch.Tensor, turned: torch.Tensor,
        turned_factor: torch.Tensor, recipe: str, maxima: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(turned, turned_factor, maxima)
        ctx.recipe = recipe
        return multiply(x, weight, factor, maxima)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        turned, factor, maxima = ctx.saved_tensors
        (dy,) = gradients
        dx = multiply_back(dy, turned, factor, ctx.recipe, maxima) if ctx.needs_input_grad[0] else None
        return dx, None, None, None, None, None, None


class AdaptedProduct(torch.autograd.Function):
    """Compute `Product` of several layers and add the products of their adapters in place. Forward and backward have
    one product with A and one with B each. The sum needs no separate pass if custom kernels read the result.

    `given` are the arguments of `Product`, A of all layers ((layers r) x in), s B of all layers (block diagonal,
    out x (layers r)), the scales, and A and B of each layer in turn. The separate A and B are not read: autograd needs
    them to return their gradients.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *given: Any) -> torch.Tensor:
        weight, factor, turned, turned_factor, ctx.recipe, maxima, a, b, ctx.scales, *adapters = given
        mid = x @ a.t()
        ctx.save_for_backward(x, mid, turned, turned_factor, maxima, a, b, *adapters)
        made = multiply(x, weight, factor, maxima)
        add_product(made, mid, b.t())
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, mid, turned, factor, maxima, a, b, *adapters = ctx.saved_tensors
        (dy,) = gradients
        dx, dmid = None, dy @ b
        if ctx.needs_input_grad[0]:
            dx = multiply_back(dy, turned, factor, ctx.recipe, maxima)
            add_product(dx, dmid, a)
        return dx, *[None] * 9, *split_gradients(dmid.t() @ x, dy.t() @ mid, ctx.scales, adapters)


class GatedMlp(torch.autograd.Function):
    """Compute an MLP: `AdaptedProduct` of gate and up, silu(gate) * up, and `AdaptedProduct` of down. The
    intermediate values are written in 8 bits only, by kernels that also compute the adapters' products
    (`kernels/adapted_swiglu.py`). `given` are the arguments of both products; the first `count` of them belong to
    the first product."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, count: int, *given: Any) -> torch.Tensor:
        from ftbench.kernels.adapted_swiglu import gate_and_cast  # needs triton

        weight, factor, turned, turned_factor, ctx.recipe, maxima, a, b, *first = given[:count]
        down, down_factor, down_turned, down_turned_factor, _, down_maxima, down_a, down_b, *second = given[count:]
        mid, base = x @ a.t(), multiply(x, weight, factor, maxima)
        *short, down_mid = gate_and_cast(base, mid, b, down_a, down_maxima[0], WEIGHT)
        ctx.scales, ctx.down_scales, ctx.count = first[0], second[0], len(first) - 1
        of_first, of_down = (turned, turned_factor, maxima, a, b), (down_turned, down_turned_factor, down_maxima)
        ctx.save_for_backward(x, base, mid, down_mid, *of_first, *of_down, down_a, down_b, *first[1:], *second[1:])
        made = multiply(base, down, down_factor, down_maxima, short)
        add_product(made, down_mid, down_b.t())
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        from ftbench.kernels.adapted_swiglu import gate_gradients

        x, base, mid, down_mid, turned, factor, maxima, a, b, *saved = ctx.saved_tensors
        down_turned, down_factor, down_maxima, down_a, down_b, *adapters = saved
        (dy,) = gradients
        dgated, thin = multiply_back(dy, down_turned, down_factor, ctx.recipe, down_maxima), dy @ down_b
        given = (dgated, base, mid, b, thin, down_a, maxima[1], GRADIENT)
        *short, dmid, db, down_da = gate_gradients(*given)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = multiply_back(dy, turned, factor, ctx.recipe, maxima, short)
            add_product(dx, dmid, a)
        of_first = split_gradients(dmid.t() @ x, db, ctx.scales, adapters[: ctx.count])
        of_down = split_gradients(down_da, dy.t() @ down_mid, ctx.down_scales, adapters[ctx.count :])
        return dx, None, *[None] * 9, *of_first, *[None] * 9, *of_down

"""Multiply activations by weights in 8 bits: in one layer, in layers with LoRA adapters, and in a complete MLP."""

from typing import Any

import torch

from ftbench.kernels.adapter_products import add_product, split_gradients

WEIGHT = torch.float8_e4m3fn
DELAYED = "tensorwise-delayed"
FAST = ("tensorwise-fast", DELAYED)
# The recipes are torchao's `tensorwise` and two of ftbench. `tensorwise-fast` uses fast accumulation also in the
# backward pass. `tensorwise-delayed` also scales by the maxima of the previous step (`kernels/delayed_cast.py`).
GRADIENT = torch.float8_e5m2
SMALLEST = 1e-12  # torchao.float8.float8_utils.EPS: no division by zero


def cast(
    values: torch.Tensor, dtype: torch.dtype, largest: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values * scale in 8 bits, and the factor 1 / scale. scale = limit / largest, where `limit` is the largest
    number of `dtype`. `largest` is the maximum magnitude of the values, or of several tensors that share a factor. So
    values * scale exceeds the limit at most by a rounding error, and the conversion to 8 bits rounds it down to the
    limit. torchao's hp_tensor_to_float8_dynamic gives the same values."""
    scale = scale_of(values.abs().amax() if largest is None else largest, dtype)
    return (values.float() * scale).to(dtype), scale.reciprocal()


def scale_of(largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (torch.finfo(dtype).max / largest.double().clamp(min=SMALLEST)).float()


def cast_layouts(
    values: torch.Tensor, dtype: torch.dtype, by_kernel: bool, largest: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `values` (rows, columns) in 8 bits, their transposed copy, and the factor, as `cast`. If `largest` is
    known, the values were cast before, and the first result can be empty."""
    if not by_kernel:
        small, factor = cast(values, dtype, largest)
        return small, small.t().contiguous(), factor
    from ftbench.kernels import transposed_cast  # needs triton

    scale = scale_of(values.abs().amax() if largest is None else largest, dtype)
    return *transposed_cast.cast_layouts(values, scale, dtype, largest is None), scale.reciprocal()


def _cast(values: torch.Tensor, dtype: torch.dtype, maxima: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    if maxima is None:
        return cast(values, dtype)
    from ftbench.kernels.delayed_cast import cast_by_last  # needs triton

    made: tuple[torch.Tensor, torch.Tensor] = cast_by_last(values, maxima, dtype)
    return made


def multiply(
    x: torch.Tensor, weight: torch.Tensor, factor: torch.Tensor, maxima: torch.Tensor | None, short: Any = None
) -> torch.Tensor:
    """Return x @ (factor * weight)' (tokens, out) for x: (tokens, in) and an 8-bit `weight` (out, in). `maxima` stores
    the maxima of x and of the gradient for delayed scaling, or is None. If x is already cast, `short` is (x in 8 bits,
    its factor). Then only the dtype of the argument x is read."""
    small, scale = short or _cast(x, WEIGHT, None if maxima is None else maxima[0])
    return torch._scaled_mm(small, weight.t(), scale, factor, out_dtype=x.dtype, use_fast_accum=True)


def multiply_back(
    dy: torch.Tensor, turned: torch.Tensor, factor: torch.Tensor, recipe: str, maxima: torch.Tensor | None,
    short: Any = None,
) -> torch.Tensor:  # fmt: skip
    """Return dx = dy @ (factor * turned)' (tokens, in), the gradient of x in `multiply`, for dy: (tokens, out).
    `turned` (in, out) is the transposed 8-bit weight. The recipes in FAST use fast accumulation. If dy is already cast,
    `short` is (dy in 8 bits, its factor). Then only the dtype of the argument dy is read."""
    small, scale = short or _cast(dy, GRADIENT, None if maxima is None else maxima[1])
    return torch._scaled_mm(small, turned.t(), scale, factor, out_dtype=dy.dtype, use_fast_accum=recipe in FAST)


class Product(torch.autograd.Function):
    """Return x @ (factor * weight)' (tokens, out) for x: (tokens, in) and a frozen 8-bit `weight` (out, in). `turned`
    (in, out) is the transposed copy of `weight`, and `turned_factor` is its factor."""

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


class TrainedProduct(torch.autograd.Function):
    """Return x @ weight' (tokens, out) for x: (tokens, in) and a trained 16-bit `weight` (out, in). The three products
    are in 8 bits. 8-bit products on Hopper need operands that are contiguous along the inner dimension. So the backward
    pass also needs the transposed x, weight and dy. If `by_kernel`, a Triton kernel makes those of x and dy."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, recipe: str, by_kernel: bool) -> torch.Tensor:
        largest, of_weight = x.abs().amax(), weight.abs().amax()
        ctx.save_for_backward(x, weight, largest, of_weight)
        ctx.recipe, ctx.by_kernel = recipe, by_kernel
        return multiply(x, *cast(weight, WEIGHT, of_weight), None, cast(x, WEIGHT, largest))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight, largest, of_weight = ctx.saved_tensors
        (dy,) = gradients
        small, transposed, factor = cast_layouts(dy, GRADIENT, ctx.by_kernel)
        dx = None
        if ctx.needs_input_grad[0]:
            w, w_factor = cast(weight.t(), WEIGHT, of_weight)
            dx = multiply_back(dy, w.contiguous(), w_factor, ctx.recipe, None, (small, factor))
        _, transposed_x, x_factor = cast_layouts(x, WEIGHT, ctx.by_kernel, largest)
        options = {"out_dtype": weight.dtype, "use_fast_accum": ctx.recipe in FAST}
        return dx, torch._scaled_mm(transposed, transposed_x.t(), factor, x_factor, **options), None, None


class AdaptedProduct(torch.autograd.Function):
    """Return x @ weight' + (x @ a') @ b' (tokens, out) for several 8-bit layers with the same input and their adapters.

    `given` are the arguments of `Product` after x, then `a`, `b`, the scales, and A and B of each layer. `a` (ranks,
    in) has the rows of all A. `b` (out, ranks) is block diagonal with blocks s * B, where s is the scale of LoRA.
    `ranks` is the sum of ranks. A and B receive the gradients, but their values are read from `a` and `b`.
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
    """Return the output of an MLP: `AdaptedProduct` for gate_proj and up_proj, then silu(gate) * up, then
    `AdaptedProduct` for down_proj. The kernels of `kernels/adapted_swiglu.py` also compute adapter products. They write
    silu(gate) * up and the gradients of gate and up only in 8 bits. `given[:count]` are the arguments of the first
    AdaptedProduct after x, and `given[count:]` are the arguments of the second AdaptedProduct after x."""

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

"""Products with the frozen base layers in 8-bit floats, their weights cast once. Adapters and output head stay.

torchao's recipes of the same names (Float8LinearConfig, torchao 0.17) scale and cast a weight in every forward pass and
again in the backward pass: 2 x (read for the maximum, read, write half), 5 bytes a weight twice a step. A frozen weight
never changes: it is cast when training is set up, once for each pass, and the 16-bit one is dropped. Hopper's products
in 8 bits take both operands along the inner dimension (cuBLASLt: TN only), so each pass needs a layout of its own and
the two together are as large as the 16-bit weight was.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from ftbench.spec.experiment import Experiment
from ftbench.worker.kernels.adapter_products import add_product, siblings, split_gradients
from ftbench.worker.kernels.te_linear import RECIPES, TeLinear
from ftbench.worker.model.parts import base_model

MULTIPLE = 16  # torch._scaled_mm takes matrices whose sides are multiples of 16
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


class Fp8Linear(torch.nn.Module):
    """A frozen linear layer whose weight is in 8 bits."""

    factor: torch.Tensor
    turned: torch.Tensor
    turned_factor: torch.Tensor
    maxima: torch.Tensor | None

    def __init__(self, base: torch.nn.Linear, recipe: str, largest: torch.Tensor | None = None) -> None:
        """Cast a layer's weight; `largest` is the largest value of those that share its factor."""
        super().__init__()
        self.in_features, self.out_features, self.recipe = base.in_features, base.out_features, recipe
        weight = base.weight.data
        small, factor = cast(weight, WEIGHT, recipe, largest)
        turned, turned_factor = cast(weight.t(), WEIGHT, recipe, largest)
        self.weight = torch.nn.Parameter(small, requires_grad=False)
        self.bias = base.bias
        for name, value in (("factor", factor), ("turned", turned.contiguous()), ("turned_factor", turned_factor)):
            self.register_buffer(name, value, persistent=False)
        self.register_buffer("maxima", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled(x.device.type):  # as F.linear would
            x = x.to(torch.get_autocast_dtype(x.device.type))
        flat = x.reshape(-1, self.in_features)
        made = Product.apply(flat, *self.operands())
        made = made.view(*x.shape[:-1], self.out_features).to(x.dtype)
        return made if self.bias is None else made + self.bias.to(made.dtype)

    def operands(self) -> tuple[Any, ...]:
        """Return what a product takes besides its input."""
        return self.weight, self.factor, self.turned, self.turned_factor, self.recipe, self.maxima

    def forward_in_16_bits(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product with the weight as it is after the cast, for a few rows: 8-bit products want many."""
        weight = (self.weight.float() * self.factor).to(x.dtype)
        return torch.nn.functional.linear(x, weight, self.bias)


def _wanted(module: Any, name: str) -> bool:
    frozen = not any(parameter.requires_grad for parameter in module.parameters())
    fits = isinstance(module, torch.nn.Linear) and module.in_features % MULTIPLE == module.out_features % MULTIPLE == 0
    return fits and frozen and "lm_head" not in name and "lora_" not in name


def join(layers: list[Any]) -> Any:
    """Return one layer whose product is that of layers which share a factor, side by side; their weights become views
    of its: of one layer itself. None where they share no factor, or are no layers in 8 bits."""
    first = layers[0]
    if len(layers) == 1:
        return first if type(first) is Fp8Linear else None
    alike = all(type(layer) is Fp8Linear and (layer.bias is None) == (first.bias is None) for layer in layers)
    if not alike or first.recipe == ROWWISE:
        return None
    if any(not torch.equal(layer.factor, first.factor) for layer in layers):
        return None
    joined = copy.copy(first)
    joined._parameters, joined._buffers = dict(first._parameters), dict(first._buffers)
    sizes = [layer.out_features for layer in layers]
    joined.out_features = sum(sizes)
    joined.weight = torch.nn.Parameter(torch.cat([layer.weight.data for layer in layers]), requires_grad=False)
    joined.turned = torch.cat([layer.turned for layer in layers], 1)
    if first.bias is not None:
        joined.bias = torch.nn.Parameter(torch.cat([layer.bias for layer in layers]), requires_grad=False)
    parts = zip(layers, joined.weight.data.split(sizes), joined.turned.split(sizes, 1), strict=True)
    for layer, weight, turned in parts:
        layer.weight.data, layer.turned = weight, turned
    return joined


def apply(model: Any, spec: Experiment) -> None:
    recipe = spec.optimizations.fp8
    if recipe in RECIPES:
        for name in _wanted_names(model):
            _replace(model, name, TeLinear(model.get_submodule(name), recipe))
        return
    groups: dict[Any, list[str]] = {}  # layers of one input share a factor, so that one product may have all of them
    for name in _wanted_names(model):
        groups.setdefault(siblings(name), []).append(name)
    for names in groups.values():  # by name: modules would keep every 16-bit weight until the last one is cast
        weights = [model.get_submodule(name).weight.abs().amax() for name in names if recipe != ROWWISE]
        largest = torch.stack(weights).amax() if weights else None
        for name in names:
            _replace(model, name, Fp8Linear(model.get_submodule(name), recipe, largest))
    if recipe == DELAYED:
        _keep_maxima(model)


def _keep_maxima(model: Any) -> None:
    """Give each layer its part of what is kept from step to step."""
    from ftbench.worker.kernels.delayed_cast import Maxima  # needs triton

    small = [module for module in model.modules() if type(module) is Fp8Linear]
    maxima = Maxima(len(small), small[0].weight.device)
    for layer, own in zip(small, maxima.values, strict=True):
        layer.maxima = own
    base_model(model).register_forward_pre_hook(maxima.next_pass)


def _wanted_names(model: Any) -> list[str]:
    return [name for name, module in model.named_modules() if _wanted(module, name)]


def _replace(model: Any, name: str, module: torch.nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, module)


def applied(model: Any, spec: Experiment) -> dict[str, Any]:
    return {"fp8_layers": layers(model)}


def layers(model: Any) -> int:
    """Count how many layers multiply in 8 bits."""
    return sum(map(multiplies_in_8_bits, model.modules()))


def multiplies_in_8_bits(module: Any) -> bool:
    return isinstance(module, (Fp8Linear, TeLinear))


def verify(model: Any, spec: Experiment) -> list[str]:
    recipe = spec.optimizations.fp8
    if recipe == "off":
        return []
    left = [name for name, module in model.named_modules() if type(module) is torch.nn.Linear and _wanted(module, name)]
    sentences = [f"optimizations.fp8 is {recipe} and {left[0]} still multiplies in 16 bits"] if left else []
    return sentences if layers(model) else [*sentences, "optimizations.fp8 is on and no layer multiplies in 8 bits"]

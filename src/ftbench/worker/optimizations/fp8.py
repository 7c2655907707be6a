"""Compute the matrix products of decoder layers with 8-bit floats. Adapters and the head stay in 16 bits.

Trained layers (method full) become a TrainedFp8Linear. It keeps 16-bit weights, and casts both operands of the forward
product and of the two backward products. Frozen layers become an Fp8Linear.

Frozen weights never change. So ftbench casts them once, before training, and frees the 16-bit weights. It stores each
8-bit weight and its transposed copy, because 8-bit products on Hopper need both operands contiguous along the inner
dimension (cuBLASLt: TN only). Together, the two copies need the memory of the 16-bit weight.
"""

import copy
from typing import Any

import torch

from ftbench.core.stats import grouped_by
from ftbench.kernels.adapter_products import siblings
from ftbench.kernels.optional_triton import triton
from ftbench.kernels.small_products import DELAYED, WEIGHT, Product, TrainedProduct, cast
from ftbench.spec.experiment import Experiment
from ftbench.spec.optimizations.compute import MEASURED
from ftbench.worker.model.parts import base_model, decoder_layers

MULTIPLE = 16  # torch._scaled_mm needs matrices with sides divisible by 16


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Return x (..., in) as (tokens, in), in the dtype that F.linear would use."""
    on = torch.is_autocast_enabled(x.device.type)
    return x.reshape(-1, x.shape[-1]).to(torch.get_autocast_dtype(x.device.type) if on else x.dtype)


class Fp8Linear(torch.nn.Module):
    """A frozen linear layer with an 8-bit weight."""

    factor: torch.Tensor
    turned: torch.Tensor
    turned_factor: torch.Tensor
    maxima: torch.Tensor | None

    def __init__(self, base: torch.nn.Linear, recipe: str, largest: torch.Tensor | None = None) -> None:
        """Cast the weight of `base`. If layers share a scale, `largest` is the maximum magnitude of their weights."""
        super().__init__()
        self.in_features, self.out_features, self.recipe = base.in_features, base.out_features, recipe
        weight = base.weight.data
        small, factor = cast(weight, WEIGHT, largest)
        turned, turned_factor = cast(weight.t(), WEIGHT, largest)
        self.weight = torch.nn.Parameter(small, requires_grad=False)
        self.bias = base.bias
        for name, value in (("factor", factor), ("turned", turned.contiguous()), ("turned_factor", turned_factor)):
            self.register_buffer(name, value, persistent=False)
        self.register_buffer("maxima", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = Product.apply(_rows(x), *self.operands()).view(*x.shape[:-1], self.out_features)
        return made if self.bias is None else made + self.bias.to(made.dtype)

    def operands(self) -> tuple[Any, ...]:
        """Return the arguments of `small_products.Product` after x."""
        return self.weight, self.factor, self.turned, self.turned_factor, self.recipe, self.maxima


class TrainedFp8Linear(torch.nn.Linear):
    """A linear layer that trains its 16-bit weight with 8-bit products."""

    recipe: str
    by_kernel: bool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = _rows(x)
        tokens = len(flat)
        if extra := -tokens % MULTIPLE:  # the inner size of the weight gradient is the number of tokens
            flat = torch.nn.functional.pad(flat, (0, 0, 0, extra))
        made = TrainedProduct.apply(flat, self.weight, self.recipe, self.by_kernel)
        made = (made[:tokens] if extra else made).view(*x.shape[:-1], self.out_features)
        return made if self.bias is None else made + self.bias.to(made.dtype)


def train_in_8_bits(layer: torch.nn.Linear, recipe: str) -> None:
    """Make `layer` a TrainedFp8Linear. The kernel for transposed casts was tested only on the GPUs of MEASURED. With
    32-bit values, it wrote wrong copies there (Triton 3.6; a similar error: triton-lang/triton issue 11111)."""
    layer.__class__, layer.recipe = TrainedFp8Linear, recipe
    tested = triton is not None and layer.weight.is_cuda and torch.cuda.get_device_capability() == MEASURED
    layer.by_kernel = tested and layer.weight.dtype != torch.float32


def wanted(model: Any) -> list[str]:
    """Return the names of the linear layers that fp8 computes in 8 bits: frozen layers, and trained layers of the
    decoder. Their sizes are divisible by 16. The head and adapters are not included."""
    decoder = {id(part) for layer in decoder_layers(model) for part in layer.modules()}
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and module.in_features % MULTIPLE == module.out_features % MULTIPLE == 0
        and (id(module) in decoder or not _is_trained(module))
        and "lm_head" not in name
        and "lora_" not in name
    ]


def _is_trained(module: torch.nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def join(layers: list[Any]) -> Any:
    """Return one 8-bit layer that computes the outputs of all `layers` side by side. The weights of `layers` become
    views of the new weight. Return a single 8-bit layer unchanged. Return None if a layer is not in 8 bits, the scale
    factors differ, or only some layers have a bias."""
    first = layers[0]
    if len(layers) == 1:
        return first if type(first) is Fp8Linear else None
    alike = all(type(layer) is Fp8Linear and (layer.bias is None) == (first.bias is None) for layer in layers)
    if not alike or any(not torch.equal(layer.factor, first.factor) for layer in layers):
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
    names = wanted(model)
    frozen = [name for name in names if not _is_trained(model.get_submodule(name))]
    for name in {*names} - {*frozen}:
        train_in_8_bits(model.get_submodule(name), recipe)
    groups = grouped_by(frozen, siblings)  # layers with the same input share a scale (see `join`)
    for names in groups.values():  # names, because references to modules would keep all 16-bit weights in memory
        largest = torch.stack([model.get_submodule(name).weight.abs().amax() for name in names]).amax()
        for name in names:
            model.set_submodule(name, Fp8Linear(model.get_submodule(name), recipe, largest))
    if recipe == DELAYED:
        _keep_maxima(model)


def _keep_maxima(model: Any) -> None:
    """Create the maxima for delayed scaling, and give each 8-bit layer a view of its own maxima."""
    from ftbench.kernels.delayed_cast import Maxima  # needs triton

    small = [module for module in model.modules() if type(module) is Fp8Linear]
    maxima = Maxima(len(small), small[0].weight.device)
    for layer, layer_maxima in zip(small, maxima.values, strict=True):
        layer.maxima = layer_maxima
    base_model(model).register_forward_pre_hook(maxima.next_pass)
    base_model(model).register_forward_hook(maxima.end_pass)


def applied(model: Any, spec: Experiment) -> dict[str, Any]:
    return {"fp8_layers": layers(model)}


def layers(model: Any) -> int:
    """Return the number of layers that multiply in 8 bits."""
    return sum(isinstance(module, (Fp8Linear, TrainedFp8Linear)) for module in model.modules())


def verify(model: Any, spec: Experiment) -> list[str]:
    recipe = spec.optimizations.fp8
    if recipe == "off":
        return []
    left = [name for name in wanted(model) if type(model.get_submodule(name)) is torch.nn.Linear]
    sentences = [f"optimizations.fp8 is {recipe} and {left[0]} still multiplies in 16 bits"] if left else []
    return sentences if layers(model) else [*sentences, "optimizations.fp8 is on and no layer multiplies in 8 bits"]

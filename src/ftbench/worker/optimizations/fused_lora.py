"""Compute base layers and LoRA adapters together, for all layers that read the same input. This reads and writes fewer
activations than peft (`kernels/adapter_products.py` has a table). The parameters stay in peft's modules."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper

from ftbench.core.stats import grouped_by
from ftbench.errors import SpecError
from ftbench.kernels import mixins
from ftbench.kernels.adapter_copies import AdapterCopies, Copy
from ftbench.kernels.adapter_products import ALIGNED, AdaptersOnly, Augmented, siblings
from ftbench.kernels.expert_products import group_experts
from ftbench.kernels.four_bit_weights import tensors_of
from ftbench.kernels.small_products import AdaptedProduct, GatedMlp
from ftbench.spec.experiment import Experiment
from ftbench.worker.model.parts import base_model
from ftbench.worker.optimizations import fp8

ADAPTER = "default"  # peft's name of the only adapter
MOST = 32  # maximum sum of ranks in a group that uses the kernels of `kernels/adapted_swiglu.py`


class AdapterGroup(torch.nn.Module):
    """Linear layers with adapters that read the same input. The first call with a new input computes the outputs of all
    layers. The group has no parameters. Before each forward pass, the adapters' values are copied from peft's modules
    to `a` (A of all layers) and `b` (s * B of all layers, where s is the scale of LoRA)."""

    a: torch.Tensor
    b: torch.Tensor

    def __init__(self, layers: list[Any]) -> None:
        super().__init__()
        self.layers = tuple(layers)  # torch does not register modules in a tuple; peft's model already has them
        self.sizes = [layer.out_features for layer in layers]
        self.scales = [layer.scaling[ADAPTER] for layer in layers]
        self.rank = layers[0].r[ADAPTER]
        self.width = layers[0].in_features
        self.columns = 0  # extra columns in the input and output of a product
        self.ready: dict[int, torch.Tensor] = {}
        self.read: torch.Tensor | None = None

    def output(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Return the output of layer `index` for x. The first call with a new x computes the outputs of all layers."""
        if self.read is not x or index not in self.ready:
            self.read, self.ready = x, dict(enumerate(self.outputs(x)))
        output = self.ready.pop(index)
        if not self.ready:
            self.read = None
        return output

    def outputs(self, x: torch.Tensor) -> list[torch.Tensor]:
        raise NotImplementedError

    def holds(self, layers: Sequence[Any]) -> bool:
        """Return whether the group has exactly these layers in this order, and no layer has a bias."""
        biases = (layer.get_base_layer().bias for layer in self.layers)
        return self.layers == tuple(layers) and all(bias is None for bias in biases)

    def gated(self, x: torch.Tensor, down: Any) -> torch.Tensor | None:
        """Return the output of an MLP. This group is gate_proj and up_proj, and `down` is the group of down_proj.
        Return None if `GatedMlp` does not support these two groups."""
        return None

    def is_on(self) -> bool:
        """Return whether all adapters are active and not merged."""
        return not any(layer.disable_adapters or layer.merged for layer in self.layers)

    def factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `a` and `b`."""
        return self.a, self.b

    def copies(self) -> Iterator[Copy]:
        """Return the copies from peft's modules to `a` and `b`."""
        return iter(())

    def adapters(self) -> Iterator[torch.Tensor]:
        for layer in self.layers:
            yield layer.lora_A[ADAPTER].weight
            yield layer.lora_B[ADAPTER].weight


class AugmentedGroup(AdapterGroup):
    """An AdapterGroup with one matrix for base layers and adapters. The base weights are views of this matrix."""

    weight: torch.Tensor

    def __init__(self, layers: list[Any]) -> None:
        super().__init__(layers)
        self.columns = -(-self.rank * len(layers) // ALIGNED) * ALIGNED
        self.join([layer.get_base_layer() for layer in layers])

    def join(self, bases: list[Any]) -> None:
        """Create the matrix. The weights of the base layers become views of it."""
        out, columns = sum(self.sizes), self.columns
        self.register_buffer("weight", bases[0].weight.new_zeros(out + columns, self.width + columns), persistent=False)
        for base, rows in zip(bases, self.weight[:out].split(self.sizes), strict=True):
            rows[:, : self.width].copy_(base.weight.data)
            base.weight.data = rows[:, : self.width]

    def factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `a` and `b`, which are views of the matrix. `model.to` can replace the matrix and the adapters, and
        then `AdapterCopies` calls `copies` again."""
        out = sum(self.sizes)
        return self.weight[out:, : self.width], self.weight[:out, self.width :]

    def parts(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors from which `adapter_products.weight_of` makes the matrix."""
        return (self.weight,)

    def copies(self) -> Iterator[Copy]:
        a, b = self.factors()
        for index, (layer, rows) in enumerate(zip(self.layers, b.split(self.sizes), strict=True)):
            rank = slice(index * self.rank, (index + 1) * self.rank)
            yield a[rank], layer.lora_A[ADAPTER].weight, 1.0
            yield rows[:, rank], layer.lora_B[ADAPTER].weight, self.scales[index]

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layers' outputs side by side, followed by `self.columns` zero columns. x is (tokens, width), or
        (tokens, width + self.columns) with extra columns that this call overwrites."""
        parts = self.parts()
        return Augmented.apply(x.to(parts[0].dtype), len(parts), *parts, self.scales, *self.adapters())

    def outputs(self, x: torch.Tensor) -> list[torch.Tensor]:
        outputs = self.product(x.reshape(-1, self.width))
        *parts, _ = outputs.view(*x.shape[:-1], -1).split([*self.sizes, self.columns], -1)
        biases = [layer.get_base_layer().bias for layer in self.layers]
        return [part if bias is None else part + bias for part, bias in zip(parts, biases, strict=True)]


class FourBitGroup(AugmentedGroup):
    """An AugmentedGroup of 4-bit layers. Each pass dequantizes its matrix, so only A and B are stored in 16 bits."""

    def join(self, bases: list[Any]) -> None:
        options = {"dtype": bases[0].compute_dtype, "device": bases[0].weight.device}
        self.register_buffer("a", torch.zeros(self.columns, self.width, **options), persistent=False)
        self.register_buffer("b", torch.zeros(sum(self.sizes), self.columns, **options), persistent=False)
        self.quantized = tuple(each for base in bases for each in tensors_of(base.weight) or ())

    factors = AdapterGroup.factors

    def parts(self) -> tuple[torch.Tensor, ...]:
        return *self.factors(), *self.quantized


class AdaptersOnlyGroup(AdapterGroup):
    """An AdapterGroup that computes all adapters together and adds the results to the outputs of the base layers. It
    also computes the products of 8-bit base layers together."""

    blocks: torch.Tensor

    def __init__(self, layers: list[Any], dtype: torch.dtype) -> None:
        super().__init__(layers)
        options = {"dtype": dtype, "device": layers[0].lora_A[ADAPTER].weight.device}
        self.register_buffer("a", torch.zeros(len(layers) * self.rank, self.width, **options), persistent=False)
        self.register_buffer("b", torch.zeros(sum(self.sizes), self.rank, **options), persistent=False)
        self.register_buffer("blocks", torch.zeros(sum(self.sizes), len(self.a), **options), persistent=False)
        # in a tuple, because torch must not register the layer's parameters here
        self.joined = (fp8.join([layer.get_base_layer() for layer in layers]),)

    def copies(self) -> Iterator[Copy]:
        rows = (self.a.split(self.rank), self.b.split(self.sizes), self.blocks.split(self.sizes))
        for index, (layer, scale, a, b, wide) in enumerate(zip(self.layers, self.scales, *rows, strict=True)):
            yield a, layer.lora_A[ADAPTER].weight, 1.0
            for target in (b, wide[:, index * self.rank : (index + 1) * self.rank]):
                yield target, layer.lora_B[ADAPTER].weight, scale

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layers' outputs side by side, (tokens, sum of output widths), for x: (tokens, width)."""
        return AdaptedProduct.apply(x.to(self.a.dtype), *self.operands())

    def operands(self) -> tuple[Any, ...]:
        """Return the arguments of `AdaptedProduct` after x."""
        return *self.joined[0].operands(), self.a, self.blocks, self.scales, *self.adapters()

    def gated(self, x: torch.Tensor, down: Any) -> torch.Tensor | None:
        if self.joined[0].maxima is None or not isinstance(down, AdaptersOnlyGroup):
            return None
        if max(len(self.a), len(down.a)) > MOST:
            return None
        first = self.operands()
        outputs: torch.Tensor = GatedMlp.apply(x.to(self.a.dtype), len(first), *first, *down.operands())
        return outputs

    def is_on(self) -> bool:
        return self.joined[0] is not None and super().is_on()

    def holds(self, layers: Sequence[Any]) -> bool:
        return self.joined[0] is not None and super().holds(layers)

    def outputs(self, x: torch.Tensor) -> list[torch.Tensor]:
        a, b = self.factors()
        rows = x.reshape(-1, self.width).to(a.dtype)
        added = AdaptersOnly.apply(rows, a, b, self.sizes, self.scales, *self.adapters())
        (joined,) = self.joined
        outputs = joined(x).split(self.sizes, -1) if joined else [layer.get_base_layer()(x) for layer in self.layers]
        pairs = zip(outputs, added, strict=True)  # the sum has the dtype of the base layer, as in peft
        return [(base + part.view(*x.shape[:-1], -1)).to(base.dtype) for base, part in pairs]


class ShardedGroup(AdaptersOnlyGroup):
    """An AdapterGroup for sharded layers. Their weights are gathered only while the decoder layer computes. So this
    group reads the adapters in each forward pass, without copies."""

    def __init__(self, layers: list[Any]) -> None:
        AdapterGroup.__init__(self, layers)
        self.joined = (None,)

    copies = AdapterGroup.copies

    def factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = [*self.adapters()][::2], [*self.adapters()][1::2]
        scaled = [b.detach() * scale for b, scale in zip(second, self.scales, strict=True)]
        return torch.cat([a.detach() for a in first]), torch.cat(scaled)


class _Fused:
    """Mixin for peft's class of an adapted layer. The forward pass returns the layer's output from its AdapterGroup."""

    group: AdapterGroup
    place_in_group: int

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.disable_adapters or self.merged:  # type: ignore[attr-defined]
            return super().forward(x, *args, **kwargs)  # type: ignore[misc]
        return self.group.output(self.place_in_group, x)


def apply(model: Any, spec: Experiment) -> None:
    """Replace the forward passes of adapted layers and fused experts. Raise SpecError for DoRA and similar variants."""
    group_experts(model)
    groups = []
    for layers in grouped(adapted(model)):
        groups.append(_group(layers, spec))
        for index, layer in enumerate(layers):
            mixins.add(_Fused, layer)
            layer.group, layer.place_in_group = groups[-1], index

    copies = AdapterCopies(lambda: [each for group in groups for each in group.copies()])
    base_model(model).register_forward_pre_hook(lambda *_: copies())  # runs before the image encoder too


def _group(layers: list[Any], spec: Experiment) -> AdapterGroup:
    if spec.launch.sharded:
        return ShardedGroup(layers)
    products = torch.bfloat16 if spec.train.precision == "bf16" else torch.float32
    bases = [layer.get_base_layer() for layer in layers]
    if not spec.optimizations.weight_offload:
        if all(type(base) is torch.nn.Linear for base in bases) and bases[0].weight.dtype == products:
            return AugmentedGroup(layers)
        # `upcast` makes inputs of 4-bit layers float32. `lean` saves memory only without the extra columns
        same = getattr(torch, spec.model.dtype) == products and not getattr(spec.method, "upcast", True)
        four_bit = (getattr(base, "compute_dtype", None) == products and tensors_of(base.weight) for base in bases)
        if same and spec.optimizations.compile in (True, "dynamic") and all(four_bit):
            return FourBitGroup(layers)
    return AdaptersOnlyGroup(layers, products)


def adapted(model: Any) -> dict[str, Any]:
    """Return the linear layers with LoRA adapters by name, without fused experts. Raise SpecError for LoRA variants."""
    from peft.tuners.lora import LoraLayer

    adapters = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer) and not isinstance(module, ParamWrapper)
    }
    for name, module in adapters.items():
        if not hasattr(module, "lora_A") or ADAPTER not in module.lora_A or module.lora_variant:
            raise SpecError(f"optimizations.fused_lora does not support the adapter of {name}: set it to off")
    return adapters


def grouped(layers: dict[str, Any]) -> list[list[Any]]:
    """Return lists of layers that read the same input, in model order. Other layers are in lists with one element."""
    kinds = {name: (siblings(name), each.in_features, type(each.get_base_layer())) for name, each in layers.items()}
    return [[layers[name] for name in names] for names in grouped_by(kinds, kinds.__getitem__).values()]


def applied(model: Any, spec: Experiment) -> dict[str, Any]:
    """Return the number of layers with fused adapters."""
    return {"fused_lora_layers": sum(isinstance(module, _Fused) for module in model.modules())}


def verify(model: Any, spec: Experiment) -> list[str]:
    """Return an error message if an adapted layer is not in a group."""
    if not spec.optimizations.fused_lora:
        return []
    left = [name for name, module in adapted(model).items() if not isinstance(module, _Fused)]
    left += [name for name, module in model.named_modules() if type(module) is ParamWrapper]
    return [f"optimizations.fused_lora is on, but {left[0]} still uses peft's forward pass"] if left else []

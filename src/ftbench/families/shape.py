"""The shape of a model: its layers with their linear layers, norms and experts. Sizes are numbers of elements."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ftbench.core import pipeline
from ftbench.families.vision import VisionShape

MXFP4_BITS = 4 + 8 / 32  # bits per value: 4, and a scale of 8 bits for each 32 values (OCP Microscaling 1.0)
# plain: the weight multiplies the normalized input in the dtype of the input. float: the weight multiplies in float32.
# centred: a LayerNorm in Python code and float32, which saves its centered input twice.
NormKind = Literal["plain", "float", "centred"]
# softmax: float32 probabilities of all experts. chosen: probabilities of the chosen experts only.
RouterKind = Literal["softmax", "chosen"]
PARTS = ("embedding", "attention", "mlp", "experts", "router", "norm", "head")


@dataclass(frozen=True, slots=True)
class Linear:
    """One `nn.Linear` of a decoder layer. `name` is the last part of its module name, such as `q_proj`.

    `reads` names the input. Linear layers with the same input share one saved tensor."""

    name: str
    inputs: int
    outputs: int
    reads: str
    part: Literal["attention", "mlp"]
    bias: bool = False

    @property
    def parameters(self) -> int:
        return self.inputs * self.outputs + (self.outputs if self.bias else 0)


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm of `width` elements per token. Each of the `groups` (heads) is normalized separately with the same weight.

    `position` names the input: the residual `stream`, queries or keys of each `head`, or (`after`) the output of
    attention or MLP."""

    width: int
    groups: int = 1
    position: Literal["stream", "after", "head"] = "stream"

    @property
    def parameters(self) -> int:
        return self.width // self.groups


@dataclass(frozen=True, slots=True)
class Experts:
    """Fused experts of a layer: `count` experts, each a gated MLP of width `inner`. Each token uses `active` experts.

    `clamped` means that the experts have gpt_oss's gate function. With `float_weights`, routing weights multiply the
    outputs in float32. `biases` is the number of biases of one expert, and `router_biases` the number of biases of the
    router."""

    count: int
    active: int
    inner: int
    router: RouterKind = "softmax"
    clamped: bool = False
    float_weights: bool = False
    biases: int = 0
    router_biases: int = 0


@dataclass(frozen=True)
class Layer:
    """One decoder layer.

    `inner` is the width of the gated MLP, or 0. `fused_values` is the width of a tensor that contains queries, keys and
    values. This tensor stays in memory because attention saves the values. `others` counts the parameters of attention
    outside linear layers (sinks)."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    linears: tuple[Linear, ...]
    norms: tuple[Norm, ...]
    norm_kind: NormKind = "plain"
    window: int | None = None
    experts: Experts | None = None
    sinks: bool = False
    fused_values: int = 0
    softcap: bool = False
    others: int = 0

    @cached_property
    def query(self) -> int:
        """Width of the queries of one token."""
        return self.heads * self.head_dim

    @cached_property
    def key(self) -> int:
        """Width of the keys of one token."""
        return self.kv_heads * self.head_dim

    @cached_property
    def head_norms(self) -> tuple[Norm, ...]:
        return tuple(norm for norm in self.norms if norm.position == "head")

    @cached_property
    def parameters(self) -> dict[str, int]:
        """The number of parameters of each part of the layer."""
        moe = self.experts
        per_expert = 3 * self.hidden * moe.inner + moe.biases if moe else 0
        return {
            "attention": sum(each.parameters for each in self.linears if each.part == "attention") + self.others,
            "mlp": sum(each.parameters for each in self.linears if each.part == "mlp"),
            "experts": moe.count * per_expert if moe else 0,
            "router": moe.count * self.hidden + moe.router_biases if moe else 0,
            "norm": sum(norm.parameters for norm in self.norms),
        }

    @property
    def router_biases(self) -> int:
        return self.experts.router_biases if self.experts else 0

    @property
    def expert_matrices(self) -> int:
        """The number of parameters in the experts' matrices, without biases."""
        return 3 * self.hidden * self.experts.inner * self.experts.count if self.experts else 0

    def reached(self, targets: frozenset[str]) -> tuple[Linear, ...]:
        """Return the linear layers with a name in `targets`. These layers get adapters."""
        return tuple(each for each in self.linears if each.name in targets)


@dataclass(frozen=True, eq=False)
class ModelShape:
    """The shape of a decoder with its `layers` in order. Objects are compared by identity.

    `vocab` is the size of the vocabulary. `tied` means that embedding and LM head share a weight. `vision` is the image
    encoder. With `softcap`, a tanh limits the logits. `head_parts` is the number of GPUs that split the head. `words`
    is the number of embedding parameters. None means `vocab * hidden`; pipeline stages may have another number."""

    family: str
    hidden: int
    vocab: int
    tied: bool
    layers: tuple[Layer, ...]
    vision: VisionShape | None = None
    softcap: bool = False
    head_parts: int = 1
    words: int | None = None

    @cached_property
    def kinds(self) -> tuple[tuple[Layer, int], ...]:
        """The distinct layers, each with the number of its occurrences: ((layer, number), ...)."""
        return tuple(Counter(self.layers).items())

    def summed(self, count: Callable[[Layer], int]) -> int:
        """Return the sum of `count(layer)` over all layers."""
        return sum(layers * count(layer) for layer, layers in self.kinds)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The index in `kinds` of each layer."""
        indices = {layer: index for index, (layer, _) in enumerate(self.kinds)}
        return tuple(indices[layer] for layer in self.layers)

    @cached_property
    def parameters(self) -> dict[str, int]:
        """The number of parameters of each part of the model. A head that shares the embedding's weight counts as 0."""
        words = self.vocab * self.hidden if self.words is None else self.words
        head = self.vocab * self.hidden // self.head_parts
        parts = {part: sum(layer.parameters[part] * count for layer, count in self.kinds) for part in PARTS[1:6]}
        final = parts.pop("norm") + (self.hidden if self.vocab else 0)
        return {"embedding": head if self.tied else words, **parts, "norm": final, "head": 0 if self.tied else head}

    @cached_property
    def total(self) -> int:
        return sum(self.parameters.values()) + (self.vision.total if self.vision else 0)

    @cached_property
    def has_sinks(self) -> bool:
        return any(layer.sinks for layer, _ in self.kinds)

    @cached_property
    def has_experts(self) -> bool:
        return any(layer.experts for layer, _ in self.kinds)

    @cached_property
    def linear_parameters(self) -> int:
        """The number of parameters that 4-bit methods quantize: matrices of linear layers, without fused experts."""
        return self.summed(lambda layer: sum(linear.inputs * linear.outputs for linear in layer.linears))

    @cached_property
    def expert_matrices(self) -> int:
        return self.summed(lambda layer: layer.expert_matrices)

    @cached_property
    def largest_layer(self) -> int:
        """The number of parameters in the largest layer."""
        return max(sum(layer.parameters.values()) for layer, _ in self.kinds)

    @cached_property
    def costs(self) -> list[int]:
        """The number of parameters that one token uses: one value for each layer, then one value for the LM head."""
        sizes = (sum(layer.parameters.values()) for layer in self.layers)
        idle = (layer.expert_matrices * (each.count - each.active) // each.count if (each := layer.experts) else 0
                for layer in self.layers)  # fmt: skip
        return [*(size - unused for size, unused in zip(sizes, idle, strict=True)), self.vocab * self.hidden]

    def split(self, stages: int) -> tuple[int, ...]:
        """Return the number of layers of each pipeline stage. All stages take about the same time."""
        words = self.vocab * self.hidden
        sizes = [words, *(sum(layer.parameters.values()) for layer in self.layers), words]
        return pipeline.balanced(self.costs, sizes, stages)

    def weight_bytes(self, width: float, mxfp4: bool = False) -> float:
        """Return the bytes of all weights if a weight takes `width` bytes.

        With `mxfp4`, the experts' matrices take 4.25 bits per value, as in the published gpt-oss. Biases do not
        change."""
        packed = self.expert_matrices if mxfp4 else 0
        return (self.total - packed) * width + packed * MXFP4_BITS / 8

"""The shape of a model: its layers with linear layers, norms and experts, in elements."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ftbench.core import pipeline
from ftbench.families.vision import VisionShape

MXFP4_BITS = 4 + 8 / 32  # a value of 4 bits, and 8 bits of scale for 32 of them (OCP Microscaling 1.0)
# plain: the weight multiplies the normalized input in its type. float: in float32. centred: a LayerNorm in float32,
# written out, so that its centred input is saved twice.
NormKind = Literal["plain", "float", "centred"]
# softmax: probabilities of all experts in float32. chosen: only of the chosen ones.
RouterKind = Literal["softmax", "chosen"]
PARTS = ("embedding", "attention", "mlp", "experts", "router", "norm", "head")


@dataclass(frozen=True, slots=True)
class Linear:
    """One `nn.Linear` of a decoder layer, named by the last part of its name.

    `reads` names its input. Layers with the same input share its saved copy."""

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
    """A norm over `width` elements per token in `groups`, each with its own scale. Heads share one weight.

    `position` names its input: the residual stream, each `head` of a product's output, or (`after`) the output of
    attention or MLP."""

    width: int
    groups: int = 1
    position: Literal["stream", "after", "head"] = "stream"

    @property
    def parameters(self) -> int:
        return self.width // self.groups


@dataclass(frozen=True, slots=True)
class Experts:
    """Fused experts: `count` experts with gated products of width `inner`. Each token uses `active` of them.

    `clamped` is gpt_oss's gate function. With `float_weights` the outputs are multiplied in float32. `biases` are those
    of one expert, `router_biases` those of the router.
    """

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

    `inner` is the width of its gated MLP, 0 without one. `fused_values` are the elements per token of a fused
    product. It stays in memory because attention saves the values, which are a part of it. `others` counts
    parameters of attention outside linear layers (sinks)."""

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
        """Parameters by part, without embedding and head."""
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
        """Parameters of the experts' matrices, without biases."""
        return 3 * self.hidden * self.experts.inner * self.experts.count if self.experts else 0

    def reached(self, targets: frozenset[str]) -> tuple[Linear, ...]:
        """Return the linear layers with a name in `targets`, which get adapters."""
        return tuple(each for each in self.linears if each.name in targets)


@dataclass(frozen=True, eq=False)
class ModelShape:
    """A decoder with its `layers` in order. Compared by identity.

    `vocab` is the size of the vocabulary. Embedding and head may share a weight (`tied`). `vision` is the image
    encoder. With `softcap` the logits pass a tanh. The head is one of `head_parts` if several GPUs split it. `words` is
    the size of the embedding if the head has another size, as in the stages of a pipeline."""

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
        """The distinct layers and the number of each."""
        return tuple(Counter(self.layers).items())

    def summed(self, count: Callable[[Layer], int]) -> int:
        """Return a sum over all layers."""
        return sum(layers * count(layer) for layer, layers in self.kinds)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The index into `kinds` of each layer."""
        indices = {layer: index for index, (layer, _) in enumerate(self.kinds)}
        return tuple(indices[layer] for layer in self.layers)

    @cached_property
    def parameters(self) -> dict[str, int]:
        """Parameters by part; a tied head counts 0."""
        words = self.vocab * self.hidden if self.words is None else self.words
        head = self.vocab * self.hidden // self.head_parts
        parts = {part: sum(layer.parameters[part] * count for layer, count in self.kinds) for part in PARTS[1:6]}
        final = parts.pop("norm") + (self.hidden if self.vocab else 0)
        return {"embedding": head if self.tied else words, **parts, "norm": final, "head": 0 if self.tied else head}

    @cached_property
    def total(self) -> int:
        return sum(self.parameters.values()) + (self.vision.total if self.vision else 0)

    @cached_property
    def linear_names(self) -> frozenset[str]:
        """The names of the linear layers, which a method's targets are compared with."""
        return frozenset(linear.name for layer, _ in self.kinds for linear in layer.linears)

    @cached_property
    def has_sinks(self) -> bool:
        return any(layer.sinks for layer, _ in self.kinds)

    @cached_property
    def has_experts(self) -> bool:
        return any(layer.experts for layer, _ in self.kinds)

    @cached_property
    def linear_parameters(self) -> int:
        """Parameters of linear layers that 4-bit storage covers, without biases and fused experts."""
        return self.summed(lambda layer: sum(linear.inputs * linear.outputs for linear in layer.linears))

    @cached_property
    def expert_matrices(self) -> int:
        return self.summed(lambda layer: layer.expert_matrices)

    @cached_property
    def largest_layer(self) -> int:
        """Parameters of the largest layer."""
        return max(sum(layer.parameters.values()) for layer, _ in self.kinds)

    @cached_property
    def costs(self) -> list[int]:
        """The parameters that multiply a token, for each layer and then for the head."""
        sizes = (sum(layer.parameters.values()) for layer in self.layers)
        idle = (layer.expert_matrices * (each.count - each.active) // each.count if (each := layer.experts) else 0
                for layer in self.layers)  # fmt: skip
        return [*(size - unused for size, unused in zip(sizes, idle, strict=True)), self.vocab * self.hidden]

    def split(self, stages: int) -> tuple[int, ...]:
        """Return the number of layers of equally slow stages."""
        words = self.vocab * self.hidden
        sizes = [words, *(sum(layer.parameters.values()) for layer in self.layers), words]
        return pipeline.balanced(self.costs, sizes, stages)

    def weight_bytes(self, width: float, mxfp4: bool = False) -> float:
        """Return the bytes of all weights with `width` bytes each.

        With `mxfp4` the experts' matrices take 4.25 bits per value, as gpt-oss is published; their biases do not."""
        packed = self.expert_matrices if mxfp4 else 0
        return (self.total - packed) * width + packed * MXFP4_BITS / 8

"""What a token passes through in a model that is only known by its config.json: the worker counts the same on the live
model (`worker/applied.py`), and a test holds the two against each other on committed runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ftbench.core.architectures import architectures, parameter_count
from ftbench.core.flops import MatmulShape
from ftbench.errors import SpecError
from ftbench.spec.experiment import Experiment
from ftbench.spec.methods import PROJECTIONS


@dataclass(frozen=True, slots=True)
class Linears:
    """A decoder layer's linear layers as one token uses them: how many, and the sums of their input and output
    widths."""

    count: int
    inputs: int
    outputs: int


@dataclass(frozen=True, slots=True)
class Shape:
    """A model with a method on it. `linears` are those of one layer, `adapted` the ones among them with adapters.
    Widths are in elements: `inner` of the gated product (of all experts a token visits), `attention` and `keys` of all
    heads. `quantisable` are the parameters that 4-bit storage reaches: fused expert matrices stay as they are.
    `experts` are a layer's, `expert_parameters` all experts' of all layers, `expert_matmul` those that a token uses."""

    matmul: MatmulShape
    layers: int
    hidden: int
    inner: int
    heads: int
    attention: int
    keys: int
    vocabulary: int
    linears: Linears
    adapted: Linears
    parameters: int
    trained: int
    quantisable: int
    experts: int
    expert_parameters: int
    expert_matmul: int


def config_of(spec: Experiment, config: dict[str, Any] | None = None) -> dict[str, Any]:
    """The model's configuration: what was given, or the table's. Raises SpecError for a model that is in neither."""
    found = config or architectures().get(spec.model.id)
    if found is None:
        raise SpecError(f"no shape is known for {spec.model.id}: give --config with its config.json")
    return {**found, **found.get("text_config", {})}


def shape_of(spec: Experiment, config: dict[str, Any] | None = None) -> Shape:
    """Raises SpecError for a model whose shape is not known."""
    found = config_of(spec, config)
    hidden, layers = found["hidden_size"], found["num_hidden_layers"]
    heads = found["num_attention_heads"]
    keys = found.get("num_key_value_heads") or heads
    head_dim = found.get("head_dim") or hidden // heads
    width, key_width = heads * head_dim, keys * head_dim
    experts = found.get("num_experts") or found.get("num_local_experts") or 0
    visited = found["num_experts_per_tok"] if experts else 1
    inner = visited * (found.get("moe_intermediate_size") or found["intermediate_size"] if experts else
                       found["intermediate_size"])  # fmt: skip
    matrices = {
        "q_proj": (hidden, width), "k_proj": (hidden, key_width), "v_proj": (hidden, key_width),
        "o_proj": (width, hidden), "gate_proj": (hidden, inner), "up_proj": (hidden, inner),
        "down_proj": (inner, hidden),
    }  # fmt: skip
    attention = [matrices[name] for name in PROJECTIONS[:4]]
    adapted = _adapted(spec, matrices, bool(experts))
    counted = parameter_count(found)
    base = sum(a * b for a, b in matrices.values()) + (hidden * experts if experts else 0)
    head = found["vocab_size"] * hidden
    full = spec.method.name == "full"
    rank = getattr(spec.method, "rank", 0)
    adapters = layers * rank * sum(a + b for a, b in adapted)
    total = sum(counted.values())
    return Shape(
        MatmulShape(layers * base, layers * base if full else 0, head, head if full else 0, adapters,
                    (width,) * layers, _windows(found, layers)),
        layers, hidden, inner, heads, width, key_width, found["vocab_size"],
        _summed([*attention, *(matrices[name] for name in PROJECTIONS[4:])]), _summed(adapted),
        total, total if full else adapters,
        counted["attention"] + counted["mlp"],
        experts, counted["experts"], layers * 3 * hidden * inner if experts else 0,
    )  # fmt: skip


def _adapted(spec: Experiment, matrices: dict[str, tuple[int, int]], experts: bool) -> list[tuple[int, int]]:
    """Experts are fused matrices: a name reaches none of them, `method.experts` does."""
    targets = getattr(spec.method, "targets", ())
    names = PROJECTIONS if targets == "all-linear" else [name.rsplit(".", 1)[-1] for name in targets]
    reached = PROJECTIONS[:4] if experts and not getattr(spec.method, "experts", False) else PROJECTIONS
    return [matrices[name] for name in reached if name in names]


def _summed(matrices: list[tuple[int, int]]) -> Linears:
    return Linears(len(matrices), sum(a for a, _ in matrices), sum(b for _, b in matrices))


def _windows(config: dict[str, Any], layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer: of every other one in gpt-oss, else as `use_sliding_window` says."""
    window = config.get("sliding_window")
    if not window or config.get("use_sliding_window") is False:
        return (None,) * layers
    kinds = config.get("layer_types")
    if kinds is None:
        alternate = config["model_type"] == "gpt_oss"
        return tuple(None if alternate and place % 2 else window for place in range(layers))
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)

"""What a token passes through in a model that is only known by its config.json, with a method on it: the worker counts
the same on the live model (`worker/applied.py`), and a test holds the two against each other on committed runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftbench.core.architectures import architectures
from ftbench.core.flops import MatmulShape
from ftbench.estimate.memory.model import ModelShape
from ftbench.estimate.workload.shapes import shape_of
from ftbench.spec.experiment import Experiment, Model
from ftbench.spec.methods import PROJECTIONS
from ftbench.spec.reading import read_config


@dataclass(frozen=True, slots=True)
class Linears:
    """A decoder layer's linear layers as one token uses them: how many, and the sums of their input and output
    widths."""

    count: int
    inputs: int
    outputs: int


@dataclass(frozen=True, slots=True)
class Adapted:
    """A model with a method on it. `linears` are those of one layer, `adapters` the ones among them with adapters.
    `quantisable` are the parameters that 4-bit storage reaches: fused expert matrices stay as they are. A token uses
    `expert_matmul` of the experts' parameters."""

    model: ModelShape
    matmul: MatmulShape
    linears: Linears
    adapters: Linears
    trained: int
    quantisable: int
    expert_matmul: int

    @property
    def inner(self) -> int:
        """Width of the gated product, of all experts that a token visits."""
        return self.model.inner * max(1, self.model.active)


def adapted(spec: Experiment, config: dict[str, Any] | None = None) -> Adapted:
    """Raises SpecError for a model whose shape is not known."""
    model = shape_of(spec.model, config)
    full = spec.method.name == "full"
    matrices = _matrices(model)
    reached = _reached(spec, matrices, model)
    adapters = model.layers * getattr(spec.method, "rank", 0) * sum(a + b for a, b in reached)
    experts = model.layers * 3 * model.hidden * model.inner * model.active
    base = model.layers * (sum(a * b for a, b in matrices.values()) + model.hidden * model.experts)
    head = model.vocab * model.hidden
    windows = _windows(_config(spec.model, config), model)
    return Adapted(
        model=model,
        matmul=MatmulShape(base, base if full else 0, head, head if full else 0, adapters,
                           (model.query,) * model.layers, windows),
        linears=_summed(list(matrices.values())),
        adapters=_summed(reached),
        trained=model.total if full else adapters,
        quantisable=model.parameters["attention"] + model.parameters["mlp"],
        expert_matmul=experts,
    )  # fmt: skip


def _matrices(model: ModelShape) -> dict[str, tuple[int, int]]:
    """The inputs and outputs of a layer's projections as one token uses them."""
    hidden, inner = model.hidden, model.inner * max(1, model.active)
    return {
        "q_proj": (hidden, model.query), "k_proj": (hidden, model.key), "v_proj": (hidden, model.key),
        "o_proj": (model.query, hidden), "gate_proj": (hidden, inner), "up_proj": (hidden, inner),
        "down_proj": (inner, hidden),
    }  # fmt: skip


def _reached(spec: Experiment, matrices: dict[str, tuple[int, int]], model: ModelShape) -> list[tuple[int, int]]:
    """Experts are fused matrices: a name reaches none of them, `method.experts` does."""
    targets = getattr(spec.method, "targets", ())
    names = PROJECTIONS if targets == "all-linear" else [name.rsplit(".", 1)[-1] for name in targets]
    there = PROJECTIONS[:4] if model.experts and not getattr(spec.method, "experts", False) else PROJECTIONS
    return [matrices[name] for name in there if name in names]


def _summed(matrices: list[tuple[int, int]]) -> Linears:
    return Linears(len(matrices), sum(a for a, _ in matrices), sum(b for _, b in matrices))


def _config(model: Model, config: dict[str, Any] | None) -> dict[str, Any]:
    found = config or (read_config(Path(model.path)) if model.path else architectures()[model.id])
    return {**found, **(found.get("text_config") or {})}


def _windows(config: dict[str, Any], model: ModelShape) -> tuple[int | None, ...]:
    """The sliding window of each layer: of every other one in gpt-oss, else as `use_sliding_window` says."""
    window = config.get("sliding_window")
    if not window or config.get("use_sliding_window") is False:
        return (None,) * model.layers
    kinds = config.get("layer_types")
    if kinds is None:
        alternate = model.family == "gpt_oss"
        return tuple(None if alternate and place % 2 else window for place in range(model.layers))
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)

"""How several GPUs share one training: the part of the model and of the batch on each."""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import get_args

from ftbench.estimate.workload.batches import Batch
from ftbench.estimate.workload.largest import BatchShape
from ftbench.families.shape import Experts, Layer, Linear, ModelShape, Norm
from ftbench.spec.experiment import Experiment, Launch

STRATEGIES: tuple[str, ...] = tuple(
    name for name in get_args(Launch.model_fields["strategy"].annotation) if not name.startswith("pp")
)

# transformers' tensor parallel plans (base_model_tp_plan): split by outputs, and split by inputs.
_BY_OUTPUTS = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
_BY_INPUTS = {"o_proj", "down_proj"}
MESH = 2  # GPUs that share a matrix under tp+fsdp by default
_SEQUENCE = {"cp": "fsdp", "ulysses": "zero3"}  # how strategies that split sequences shard states


@dataclass(frozen=True, slots=True)
class Sharding:
    """How several GPUs share one training.

    `states` shards weights, gradients and optimizer state over the `holders` (none, ddp, fsdp, zero1, zero2, zero3),
    and `offload` moves some of them to the host. The products of each layer are split into `tensor` parts, the experts
    into `experts`, and each sequence into `sequence`. `data` is the number of different batches per step."""

    gpus: int = 1
    name: str = "none"
    states: str = "none"
    offload: str = "none"
    tensor: int = 1
    experts: int = 1
    sequence: int = 1

    @property
    def data(self) -> int:
        return self.gpus // (self.tensor * self.experts * self.sequence)

    @property
    def holders(self) -> int:
        """The number of GPUs that shard the states of one model part."""
        return self.gpus // (self.tensor * self.experts)


SINGLE = Sharding()


def sharding_of(launch: Launch) -> Sharding:
    """Return what a strategy shards: `tp`, `ep`, `cp` and `ulysses` their own part, all others the batch."""
    gpus, strategy = launch.gpus, launch.strategy
    if gpus == 1:
        return SINGLE
    if launch.tp is not None:
        return Sharding(gpus, strategy, "fsdp", tensor=launch.tp)
    if strategy in ("tp", "ep"):
        return Sharding(gpus, strategy, tensor=gpus if strategy == "tp" else 1, experts=gpus if strategy == "ep" else 1)
    states = _SEQUENCE.get(strategy, strategy)
    return Sharding(gpus, strategy, states, launch.offload, sequence=gpus if strategy in _SEQUENCE else 1)


def on_gpus(spec: Experiment, gpus: int, strategy: str, offload: str = "none") -> Experiment:
    """Return the spec on this number of GPUs. Whether it can be launched is checked by `incompatibilities`."""
    tp = spec.launch.tp or MESH if strategy == "tp+fsdp" else None
    nodes = min(spec.launch.nodes, ceil(gpus / max(1, spec.launch.gpus_of_node)))
    parts = {"gpus": gpus, "nodes": nodes, "strategy": strategy, "tp": tp, "offload": offload}
    return spec.model_copy(update={"launch": spec.launch.model_copy(update=parts)})


def shared_how(launch: Launch) -> str:
    """Return `fsdp`, or `fsdp, params offloaded`."""
    return launch.strategy + ("" if launch.offload == "none" else f", {launch.offload} offloaded")


def counts(most: int) -> list[int]:
    """Return the numbers of GPUs to consider: `most`, and the powers of two below it."""
    return sorted({most, *(2**power for power in range(most.bit_length()))})


def problem(model: ModelShape, launch: Launch) -> str | None:
    """Return why a model cannot be split like this, or None."""
    gpus, strategy = launch.tp or launch.gpus, launch.strategy
    if strategy == "ep" and not model.has_experts:
        return f"ep needs experts, and {model.family} has none"
    if launch.tp and not launch.is_mesh:
        return f"{strategy}: {launch.gpus} GPUs cannot form a mesh of {gpus} by two or more"
    keys = [layer.kv_heads for layer in model.layers]
    counts = {"tp": keys, "tp+fsdp": keys, "ulysses": [layer.heads for layer in model.layers],
              "ep": [layer.experts.count for layer in model.layers if layer.experts]}  # fmt: skip
    odd = [count for count in counts.get(strategy, []) if count % gpus]
    word = {"ulysses": "heads", "ep": "experts"}.get(strategy, "key heads")
    return f"{strategy}: {odd[0]} {word} do not divide by {gpus}" if odd else None


@lru_cache(maxsize=64)
def rank_model(model: ModelShape, sharding: Sharding) -> ModelShape:
    """Return the part of the model that one GPU computes: heads, columns and experts of each layer.

    Norms, embedding and unlisted layers are complete. The head is split, and with it an embedding that shares its
    weight."""
    if sharding.tensor == sharding.experts == 1:
        return model
    layers = {layer: _layer(layer, sharding) for layer, _ in model.kinds}
    return replace(model, layers=tuple(layers[layer] for layer in model.layers), head_parts=sharding.tensor)


def _layer(layer: Layer, sharding: Sharding) -> Layer:
    moe, parts = layer.experts, sharding.tensor
    kept = 0 if moe is None else layer.parameters["router"]
    local = None if moe is None else _experts(moe, sharding)
    cut = replace(
        layer, heads=_part(layer.heads, parts), kv_heads=_part(layer.kv_heads, parts), inner=_part(layer.inner, parts),
        linears=tuple(_linear(linear, parts) for linear in layer.linears),
        norms=tuple(_norm(norm, parts) for norm in layer.norms), experts=local,
        fused_values=_part(layer.fused_values, parts),
    )  # fmt: skip
    # every GPU routes among all experts
    return replace(cut, others=cut.others + kept - (cut.parameters["router"] if moe else 0))


def _linear(linear: Linear, parts: int) -> Linear:
    if linear.name in _BY_OUTPUTS:
        return replace(linear, outputs=_part(linear.outputs, parts))
    return replace(linear, inputs=_part(linear.inputs, parts)) if linear.name in _BY_INPUTS else linear


def _norm(norm: Norm, parts: int) -> Norm:
    """Return the norm of this GPU's heads. They share one weight, which every GPU has."""
    if norm.position != "head" or norm.groups == 1:
        return norm
    groups = _part(norm.groups, parts)
    return replace(norm, width=norm.parameters * groups, groups=groups)


def _experts(moe: Experts, sharding: Sharding) -> Experts:
    """Return this GPU's experts.

    The rows of other GPUs' experts stay in its tensors, masked out (transformers, grouped_mm_experts_forward)."""
    return replace(moe, count=_part(moe.count, sharding.experts), inner=_part(moe.inner, sharding.tensor))


def _part(count: int, parts: int) -> int:
    return ceil(count / parts)


def rank_shape(batch: BatchShape, sharding: Sharding) -> BatchShape:
    """Return what one GPU computes of a batch: its part of each sequence, padded to two equal halves per GPU."""
    if sharding.sequence == 1:
        return batch
    length = 2 * ceil(batch.length / (2 * sharding.sequence))
    return BatchShape(batch.rows, length, ceil(batch.labels / sharding.sequence))


def rank_batch(batch: Batch, sharding: Sharding) -> Batch:
    """Return the same of a mean micro-batch; a sequence's query and key pairs are divided evenly."""
    if (parts := sharding.sequence) == 1:
        return batch
    return replace(
        batch, samples=batch.samples / parts, positions=batch.positions / parts, real=batch.real / parts,
        labels=batch.labels / parts, square=batch.square / parts,
    )  # fmt: skip

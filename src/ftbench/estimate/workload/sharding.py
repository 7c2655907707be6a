"""Describe how several GPUs share a run: the part of the model and the part of the batch on each GPU."""

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil

from ftbench.core import pipeline
from ftbench.estimate.workload.batches import Batch
from ftbench.estimate.workload.largest import BatchShape
from ftbench.families.shape import Layer, Linear, ModelShape, Norm
from ftbench.spec.experiment import Experiment, Launch

# Tensor parallelism splits some linear layers by outputs, and others by inputs (transformers, base_model_tp_plan).
_BY_OUTPUTS = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
_BY_INPUTS = {"o_proj", "down_proj"}
MESH = 2  # default number of GPUs that share a matrix with tp+fsdp


@dataclass(frozen=True, slots=True)
class Sharding:
    """How several GPUs share a run.

    `states` (none, ddp, fsdp, zero1, zero2 or zero3) names the sharding of weights, gradients and optimizer state over
    `holders` GPUs. `offload` moves some of these states to the host. Four fields are numbers of parts: `tensor` (each
    matrix), `experts` (all experts), `sequence` (each sequence), and `pipeline` (all layers). `rank` is the pipeline
    rank of this GPU (None: the slowest rank). A pipeline splits each batch into `micro` micro-batches."""

    gpus: int = 1
    name: str = "none"
    states: str = "none"
    offload: str = "none"
    tensor: int = 1
    experts: int = 1
    sequence: int = 1
    pipeline: int = 1
    schedule: str = "1f1b"
    micro: int = 1
    split: tuple[int, ...] | None = None
    rank: int | None = None

    @property
    def bubble(self) -> float:
        """The share of a step in which a GPU of a pipeline waits for other GPUs."""
        return pipeline.bubble(self.schedule, self.pipeline, self.micro) if self.pipeline > 1 else 0.0

    @property
    def waiting(self) -> float:
        """The number of other micro-batches that have activations on a GPU while the GPU computes one micro-batch."""
        if self.pipeline == 1:
            return 0.0
        return pipeline.in_flight(self.schedule, self.pipeline, self.micro, self.rank or 0) - 1

    @property
    def holders(self) -> int:
        """The number of GPUs that train the same part of the model."""
        return self.gpus // (self.tensor * self.experts * self.pipeline)


SINGLE = Sharding()


def sharding_of(launch: Launch) -> Sharding:
    """Return the sharding for a `launch` section. `tp` splits matrices, `ep` experts, `cp` sequences, and `pp` layers.

    All other strategies split the batch."""
    gpus, strategy = launch.gpus, launch.strategy
    if gpus == 1:
        return SINGLE
    if launch.pp is not None:
        parts = strategy.split("+")
        states = "fsdp" if "fsdp" in parts else "ddp" if "ddp" in parts else "none"
        return Sharding(gpus, strategy, states, tensor=launch.tp or 1, pipeline=launch.pp, schedule=launch.schedule,
                        micro=launch.micro_batches or 1, split=launch.split)  # fmt: skip
    if launch.tp is not None:
        return Sharding(gpus, strategy, "fsdp", tensor=launch.tp)
    if strategy in ("tp", "ep"):
        return Sharding(gpus, strategy, tensor=gpus if strategy == "tp" else 1, experts=gpus if strategy == "ep" else 1)
    if strategy == "cp":
        return Sharding(gpus, strategy, "fsdp", launch.offload, sequence=gpus)
    return Sharding(gpus, strategy, strategy, launch.offload)


def on_gpus(spec: Experiment, gpus: int, strategy: str, offload: str = "none") -> Experiment:
    """Return the spec with another number of GPUs and another strategy, without a check for incompatibilities."""
    own, tp = spec.launch, spec.launch.tp or MESH if strategy == "tp+fsdp" else None
    nodes = min(spec.launch.nodes, ceil(gpus / max(1, spec.launch.gpus_of_node)))
    parts = {"gpus": gpus, "nodes": nodes, "strategy": strategy, "tp": tp, "offload": offload, "pp": None,
             "micro_batches": None, "split": None}  # fmt: skip
    if strategy.startswith("pp"):
        same = {key: getattr(own, key) for key in ("pp", "tp", "micro_batches", "split") if strategy == own.strategy}
        made = Launch.model_validate({"gpus": gpus, "strategy": strategy, "schedule": own.schedule, **same})
        parts |= {key: getattr(made, key) for key in ("pp", "tp", "micro_batches", "split")}
    return spec.model_copy(update={"launch": spec.launch.model_copy(update=parts)})


def shared_how(launch: Launch) -> str:
    """Return the strategy and its offloading as text: `fsdp`, or `fsdp, params offloaded`."""
    return str(launch.strategy) + ("" if launch.offload == "none" else f", {launch.offload} offloaded")


def can_use(spec: Experiment, gpus: int, strategy: str) -> bool:
    """Return whether a strategy can use this number of GPUs: `tp+fsdp` needs 4 or more, `pp+ddp` an even number."""
    with suppress(ValueError):
        return on_gpus(spec, gpus, strategy).launch.gpus >= 1 << len(strategy.split("+"))
    return False


def counts(most: int) -> list[int]:
    """Return the numbers of GPUs to compare: 1, 2, 4, 8, ... and `most`."""
    return sorted({most, *(2**power for power in range(most.bit_length()))})


@lru_cache(maxsize=64)
def rank_model(model: ModelShape, sharding: Sharding) -> ModelShape:
    """Return the part of the model that one GPU computes: some layers, attention heads, columns or experts.

    The LM head is split. Norms, the embedding, and linear layers outside the tensor-parallel plan are not split. An
    embedding that shares the weight of the head is split too."""
    if sharding.pipeline > 1:
        model = _stages_of(model, sharding)
    if sharding.tensor == sharding.experts == 1:
        return model
    layers = {layer: _layer(layer, sharding) for layer, _ in model.kinds}
    return replace(model, layers=tuple(layers[layer] for layer in model.layers), head_parts=sharding.tensor)


def _stages_of(model: ModelShape, sharding: Sharding) -> ModelShape:
    """Return the model part of one pipeline rank: layers, the embedding (first stage) and the LM head (last stage)."""
    split = sharding.split or model.split(sharding.pipeline * pipeline.parts(sharding.schedule))
    ranks = [
        pipeline.bounds(split, pipeline.of_rank(sharding.schedule, sharding.pipeline, rank))
        for rank in range(sharding.pipeline)
    ]
    slowest = max(ranks, key=lambda own: sum(model.costs[at] for at in own[0]) + own[2] * model.costs[-1])
    layers, first, last = slowest if sharding.rank is None else ranks[sharding.rank]
    words = model.vocab * model.hidden // (sharding.tensor if model.tied else 1)  # tp splits a tied embedding
    return replace(
        model,
        layers=tuple(model.layers[at] for at in layers),
        tied=model.tied and first and last,
        vocab=model.vocab if last else 0,
        words=words if first else 0,
    )


def _layer(layer: Layer, sharding: Sharding) -> Layer:
    moe, parts = layer.experts, sharding.tensor
    kept = 0 if moe is None else layer.parameters["router"]
    # Activations still have rows for the experts of other GPUs (masked: transformers, grouped_mm_experts_forward).
    local = moe and replace(moe, count=ceil(moe.count / sharding.experts), inner=ceil(moe.inner / parts))
    cut = replace(
        layer, heads=ceil(layer.heads / parts), kv_heads=ceil(layer.kv_heads / parts), inner=ceil(layer.inner / parts),
        linears=tuple(_linear(linear, parts) for linear in layer.linears),
        norms=tuple(_norm(norm, parts) for norm in layer.norms), experts=local,
        fused_values=ceil(layer.fused_values / parts),
    )  # fmt: skip
    # the router of each GPU still chooses among all experts
    return replace(cut, others=cut.others + kept - (cut.parameters["router"] if moe else 0))


def _linear(linear: Linear, parts: int) -> Linear:
    if linear.name in _BY_OUTPUTS:
        return replace(linear, outputs=ceil(linear.outputs / parts))
    return replace(linear, inputs=ceil(linear.inputs / parts)) if linear.name in _BY_INPUTS else linear


def _norm(norm: Norm, parts: int) -> Norm:
    """Return the norm for the attention heads of this GPU. The weight is not split, because all heads share it."""
    if norm.position != "head" or norm.groups == 1:
        return norm
    groups = ceil(norm.groups / parts)
    return replace(norm, width=norm.parameters * groups, groups=groups)


def rank_shape(batch: BatchShape, sharding: Sharding) -> BatchShape:
    """Return the shape of the batch part on one GPU. With `cp`, a GPU has two equal parts of each sequence."""
    if (micro := sharding.micro) > 1:  # a packed batch is one row of samples
        rows, length = (batch.rows // micro, batch.length) if batch.rows >= micro else (1, ceil(batch.length / micro))
        return BatchShape(rows, length, ceil(batch.labels / micro))
    if sharding.sequence == 1:
        return batch
    length = 2 * ceil(batch.length / (2 * sharding.sequence))
    return BatchShape(batch.rows, length, ceil(batch.labels / sharding.sequence))


def rank_batch(batch: Batch, sharding: Sharding) -> Batch:
    """Return the part of a mean micro-batch on one GPU. With `cp`, GPUs split tokens and query-key pairs equally."""
    if (parts := sharding.sequence) == 1:
        return batch
    return replace(
        batch, samples=batch.samples / parts, positions=batch.positions / parts, real=batch.real / parts,
        labels=batch.labels / parts, square=batch.square / parts,
    )  # fmt: skip

"""Compute the memory of one GPU in bytes if several GPUs share a run.

Sources: Rajbhandari et al. 2020 (ZeRO, sections 5 and 6); DeepSpeed 0.19 (`step` in runtime/zero/stage_1_and_2.py and
stage3.py, and its estimators of model states); torch's fully_shard (FSDP2) as configured by accelerate 1.15, which
keeps trained weights in float32; DistributedDataParallel."""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from ftbench.estimate.memory import weights
from ftbench.estimate.workload.plan import TrainingPlan
from ftbench.estimate.workload.sharding import Sharding
from ftbench.families.shape import ModelShape

FLOAT = 4
LIVE = 10**9  # elements that ZeRO-3 gathers with its default prefetching (stage3_max_live_parameters)
SUB_GROUP = 10**9  # elements that ZeRO-3 updates at a time (DeepSpeed's default, sub_group_size)


@dataclass(frozen=True, slots=True)
class Share:
    """The shares of weights, gradients and optimizer state on one GPU, from 0 to 1.

    A share is 1 without sharding, and 0 if the tensors are in host memory. `keeper` is the library that stores the
    tensors. With `buckets`, the gradients are views of DDP's buckets (gradient_as_bucket_view). With `pipelined`,
    weights and gradients stay unsharded between micro-batches (torch, backward_maybe_with_nosync)."""

    weights: float
    gradients: float
    optimizer: float
    keeper: Literal["torch", "deepspeed", "fsdp"] = "torch"
    buckets: bool = False
    pipelined: bool = False

    @property
    def gathered(self) -> bool:
        """Whether weights are sharded. Then the full weights of a layer exist only while the layer computes."""
        return self.weights < 1

    @property
    def holds_gradients(self) -> bool:
        """Whether a permanent buffer holds the gradients: DDP's buckets, DeepSpeed's grad_partitions_flat_buffer."""
        return self.buckets or (self.gathered and self.keeper == "deepspeed")


def share(sharding: Sharding) -> Share:
    """Return the shares of weights, gradients and optimizer state that one GPU holds.

    DDP shards nothing. ZeRO-1 shards the optimizer state. ZeRO-2 also shards the gradients. ZeRO-3 and FSDP also shard
    the weights. Offloading moves the optimizer state and the gradients to host memory. With `params`, offloading also
    moves the weights."""
    states, offload, part = sharding.states, sharding.offload, 1 / sharding.holders
    if states == "fsdp":
        part = 0.0 if offload == "params" else part
        return Share(part, part, part, "fsdp", pipelined=sharding.pipeline > 1 and part > 0)
    if not states.startswith("zero"):
        return Share(1.0, 1.0, 1.0, buckets=states == "ddp" and sharding.gpus > 1)
    stage = int(states.removeprefix("zero"))
    whole = 1.0 if stage < 3 else 0.0 if offload == "params" else part
    if offload != "none":
        return Share(whole, 1.0 if stage == 1 else 0.0, 0.0, "deepspeed")
    return Share(whole, part if stage >= 2 else 1.0, part, "deepspeed")


def kept_as(plan: TrainingPlan, part: Share) -> TrainingPlan:
    """Return the plan with the dtypes in which the strategy stores weights and adapters.

    DeepSpeed casts the model to 16 bits if products use 16 bits. Under FSDP, accelerate casts trained weights to
    float32 and gathers them in 16 bits, except with torchao's optimizers (worker/model/loading.py)."""
    if part.keeper == "torch" or not plan.autocast:
        return plan
    if part.keeper == "fsdp":
        return replace(plan, weight=FLOAT if plan.in_32_bits else plan.weight)
    narrow = min(plan.weight, plan.compute)
    upcast = plan.upcast if plan.quantised else narrow
    return replace(plan, weight=narrow, upcast=upcast, adapter=min(plan.adapter, plan.compute))


def computed_as(plan: TrainingPlan, part: Share) -> TrainingPlan:
    """Return the plan with the dtypes of weights and adapters during computation.

    DeepSpeed's weights and FSDP's gathered weights have 16 bits. Therefore adapters do not cast their input."""
    if part.keeper == "torch" or not plan.autocast:
        return plan
    upcast = plan.upcast if plan.quantised else plan.compute
    return replace(plan, weight=plan.compute, upcast=upcast, adapter=min(plan.adapter, plan.compute))


def optimizer_state(model: ModelShape, plan: TrainingPlan, part: Share) -> float:
    """Return the bytes of the optimizer state on one GPU, including DeepSpeed's float32 copies of 16-bit weights.

    `plan` comes from `kept_as`."""
    name, count, width, embedding = weights.kept_by(model, plan)
    if part.keeper != "deepspeed" or not plan.autocast:
        return weights.optimizer_state(name, count, width, embedding) * part.optimizer
    return (FLOAT * count + weights.optimizer_state(name, count, FLOAT, embedding)) * part.optimizer


def update(model: ModelShape, plan: TrainingPlan, part: Share) -> tuple[float, float]:
    """Return the bytes of gradients and of temporary tensors at the memory peak of the optimizer step.

    DeepSpeed updates float32 copies of the weights. DeepSpeed first casts the gradients to float32 and frees the 16-bit
    gradients. ZeRO-3 casts one sub-group at a time and keeps all 16-bit gradients."""
    count, width = weights.trained(model, plan)
    gradients = count * width * part.gradients
    if part.keeper != "deepspeed" or not plan.autocast:
        return gradients, weights.optimizer_step(plan.optimizer, count, width) * part.optimizer
    if not part.optimizer:
        return gradients, 0.0
    held = count * part.optimizer
    updated = _sub_group(model, held) if part.gathered else held
    step = FLOAT * updated + weights.optimizer_step(plan.optimizer, updated, FLOAT)
    return width * held if part.holds_gradients else 0.0, max(step, (width + FLOAT) * updated)


def _sub_group(model: ModelShape, held: float) -> float:
    """Return the number of elements in the largest sub-group of ZeRO-3. The GPU updates `held` elements in total.

    DeepSpeed adds matrices to a sub-group until it has SUB_GROUP elements (stage3.py, _create_fp16_sub_groups). A large
    last matrix, such as the LM head, makes the sub-group larger."""
    if held <= SUB_GROUP:
        return held
    sizes = [model.parameters["embedding"]]
    for layer in model.layers:
        experts = layer.expert_matrices // 3  # gate and up are one tensor
        sizes += [*(linear.parameters for linear in layer.linears), 2 * experts, experts]
    most = current = 0.0
    for size in [*sizes, model.parameters["head"]]:
        current = size * held / model.total + (current if current < SUB_GROUP else 0.0)
        most = max(most, current)
    return most


class Gathered(NamedTuple):
    """Bytes of gathered weights at four times: in a layer's forward pass, in the loss, in a layer's backward pass, and
    at the end of the backward pass."""

    forward: float
    loss: float
    backward: float
    end: float


def gathered(model: ModelShape, plan: TrainingPlan, part: Share) -> Gathered:
    """Return the bytes of the weights that a sharded model gathers.

    accelerate makes one FSDP2 unit of the embedding, one of each layer, and one of the head with the last norm
    (fsdp2_prepare_model). In the forward pass, the weights of a unit exist twice: as parameters and in the receive
    buffer. The buffer is freed when the next unit arrives or the forward pass ends. In the backward pass, the next unit
    arrives while the current unit computes. During the loss, the head exists twice. ftbench's loss gathers the head
    separately, so the buffer of the last layer still exists. A head that shares the embedding's weight stays gathered
    until the backward pass ends. For trained units, the gradients and the buffers of the reduce-scatter are added."""
    if not part.gathered:
        return Gathered(0.0, 0.0, 0.0, 0.0)
    if part.keeper != "fsdp":
        return _gathered_by_zero(model, plan)
    largest, c = model.largest_layer, float(plan.compute)
    if part.pipelined:
        there = c * model.total
        return Gathered(there, there, there * (2 if plan.full else 1), there * (2 if plan.full else 1))
    embedding, head = model.parameters["embedding"], model.parameters["head"]
    kept = embedding if model.tied else 0
    by_itself = model.tied or (plan.loss == "chunked" and not plan.full)
    backward = max(4 * largest, largest + 2 * head, 0 if model.tied else 3 * embedding) if plan.full else 2 * largest
    return Gathered(
        c * (kept + 2 * largest), c * (kept + head + (largest if by_itself else head)), c * (kept + backward),
        c * (kept + backward),
    )  # fmt: skip


def _gathered_by_zero(model: ModelShape, plan: TrainingPlan) -> Gathered:
    """Return the bytes of the weights that ZeRO-3 gathers.

    Source: DeepSpeed 0.19, partitioned_param_coordinator.py, and traces of its fetches on the CPU. The head stays
    gathered from start to end, because trl's loss reads the weight of the head outside the head's forward pass. With
    gradient checkpointing, each layer is one unit (worker/parallel/zero.py). Then the head, the current layer and the
    next layer are gathered, and at the end of the backward pass also the embedding. Without gradient checkpointing,
    DeepSpeed gathers weights up to its prefetch limit (LIVE)."""
    largest, head = model.largest_layer, model.parameters["head"] or model.parameters["embedding"]
    embedding, c = 0 if model.tied else model.parameters["embedding"], float(plan.compute)
    there = head + 2 * largest if plan.checkpointing != "off" else max(head, min(LIVE, model.total))
    return Gathered(c * there, c * there, c * there, c * (head + embedding + (largest if there > head else 0)))


def free_in_other_streams(model: ModelShape, plan: TrainingPlan, sharding: Sharding, gradients: float) -> float:
    """Return the bytes of free blocks at the memory peak that the CUDA stream of the computation cannot use.

    Only the stream that allocated a block can use it again (torch, CUDACachingAllocator). FSDP2 allocates the buffers
    that receive weights in one stream and sharded gradients in another (foreach_all_gather, foreach_reduce). At the
    peak, the buffers of the embedding and of a layer are free, and so are the gradients of the previous step. The
    `gradients` that exist at the peak are subtracted."""
    part = share(sharding)
    if part.keeper == "deepspeed" and part.gathered:
        return _free_under_zero(model, plan, part) if plan.checkpointing != "off" else 0.0
    if part.keeper != "fsdp" or part.pipelined:
        return 0.0
    count, width = weights.trained(model, kept_as(plan, part))
    received = plan.compute * (model.parameters["embedding"] + model.largest_layer)
    return max(0.0, count * width * part.gradients - gradients) + received


def _free_under_zero(model: ModelShape, plan: TrainingPlan, part: Share) -> float:
    """Return the bytes of blocks that ZeRO-3 with gradient checkpointing keeps free at the memory peak.

    In the stream that gathers weights, these are a receive buffer, two layers that the GPU has not computed yet
    (worker/parallel/zero.py, AHEAD), and the embedding. Gradients of the head and of three layers wait for the stream
    that reduces them. The optimizer needs a float32 tensor of a sub-group, for which other free blocks are too small.
    Two runs reserved 133.0 and 50.0 GiB (results/*/two-gpus/zero3-*), and the estimates are 134.6 and 48.2 GiB."""
    layers = 3.0 * model.largest_layer
    free = plan.compute * (layers + model.parameters["embedding"])
    if plan.full:
        updated = _sub_group(model, weights.trained(model, plan)[0] * part.optimizer) if part.optimizer else 0.0
        free += plan.compute * (layers + model.parameters["head"]) + FLOAT * updated
    return free


def offloaded(model: ModelShape, plan: TrainingPlan, sharding: Sharding) -> float:
    """Return the host memory in bytes that the offloaded states of all GPUs need.

    The states are the optimizer state, and the float32 weights and gradients of trained parameters. With `params`, the
    16-bit weights are added. Full fine-tuning with FSDP does not store 16-bit weights."""
    if sharding.offload == "none":
        return 0.0
    name, count, _, embedding = weights.kept_by(model, plan)
    states = 2 * FLOAT * count + weights.optimizer_state(name, count, FLOAT, embedding)
    only_states = sharding.offload == "optimizer" or (sharding.states == "fsdp" and plan.full)
    return states + (0 if only_states else model.weight_bytes(plan.compute))

"""What one of several GPUs holds. All in bytes.

Sources: Rajbhandari et al. 2020 (ZeRO, sections 5 and 6); DeepSpeed 0.19 (runtime/zero/stage_1_and_2.py and stage3.py,
`step`, and their estimators of model states); torch's fully_shard (FSDP2) as accelerate 1.15 sets it up, which keeps
what is trained in float32; DistributedDataParallel.
"""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from ftbench.estimate.memory import weights
from ftbench.estimate.workload.plan import TrainingPlan
from ftbench.estimate.workload.sharding import Sharding
from ftbench.families.shape import ModelShape

FLOAT = 4
LIVE = 10**9  # elements that ZeRO-3 has gathered, where it fetches ahead by its default (stage3_max_live_parameters)
SUB_GROUP = 10**9  # elements of a GPU's part beside which ZeRO-3 updates no more (DeepSpeed's default, sub_group_size)


@dataclass(frozen=True, slots=True)
class Share:
    """The parts of weights, gradients and optimizer state that one GPU holds, 1 for all, 0 where they wait in host
    memory. `keeper` is whose copies of them there are. `buckets` says that DDP copies gradients, too."""

    weights: float
    gradients: float
    optimizer: float
    keeper: Literal["torch", "deepspeed", "fsdp"] = "torch"
    buckets: bool = False

    @property
    def gathered(self) -> bool:
        """Whether a layer's weights are only whole while it computes."""
        return self.weights < 1

    @property
    def holds_gradients(self) -> bool:
        """Whether gradients have a place of their own that stays (DeepSpeed, grad_partitions_flat_buffer)."""
        return self.gathered and self.keeper == "deepspeed"


def share(sharding: Sharding) -> Share:
    """Return what one GPU holds: ZeRO-1 divides the optimizer state, ZeRO-2 the gradients too, ZeRO-3 and FSDP the
    weights too; DDP nothing. What is offloaded is in host memory: the optimizer's state with the gradients that it
    waits for, and the weights too."""
    states, offload, part = sharding.states, sharding.offload, 1 / sharding.holders
    if states == "fsdp":
        return Share(0.0, 0.0, 0.0, "fsdp") if offload == "params" else Share(part, part, part, "fsdp")
    if not states.startswith("zero"):
        return Share(1.0, 1.0, 1.0, buckets=states == "ddp" and sharding.gpus > 1)
    stage = int(states.removeprefix("zero"))
    whole = 1.0 if stage < 3 else 0.0 if offload == "params" else part
    if offload != "none":
        return Share(whole, 1.0 if stage == 1 else 0.0, 0.0, "deepspeed")
    return Share(whole, part if stage >= 2 else 1.0, part, "deepspeed")


def kept_as(plan: TrainingPlan, part: Share) -> TrainingPlan:
    """Return the plan with the types in which the strategy keeps weights and adapters. DeepSpeed casts the whole
    model to 16 bits where products are; accelerate casts what FSDP trains to float32, and gathers it in 16 bits."""
    if part.keeper == "torch" or not plan.autocast:
        return plan
    if part.keeper == "fsdp":
        return replace(plan, weight=FLOAT if plan.full else plan.weight)
    narrow = min(plan.weight, plan.compute)
    upcast = plan.upcast if plan.quantised else narrow
    return replace(plan, weight=narrow, upcast=upcast, adapter=min(plan.adapter, plan.compute))


def computed_as(plan: TrainingPlan, part: Share) -> TrainingPlan:
    """Return the plan with the types in which weights and adapters are while they compute: DeepSpeed's and what FSDP
    gathers is in 16 bits, so no adapter casts its input."""
    if part.keeper == "torch" or not plan.autocast:
        return plan
    narrow = plan.compute
    upcast = plan.upcast if plan.quantised else narrow
    return replace(plan, weight=narrow, upcast=upcast, adapter=min(plan.adapter, narrow))


def _has_masters(plan: TrainingPlan, part: Share) -> bool:
    """Return whether DeepSpeed trains float32 copies of weights of 16 bits."""
    return part.keeper == "deepspeed" and plan.autocast


def optimizer_state(model: ModelShape, plan: TrainingPlan, part: Share) -> float:
    """Return what the optimizer keeps on one GPU, its float32 copies included. `plan` is as `kept_as` made it."""
    name, count, width, embedding = weights.kept_by(model, plan)
    if not _has_masters(plan, part):
        return weights.optimizer_state(name, count, width, embedding) * part.optimizer
    return (FLOAT * count + weights.optimizer_state(name, count, FLOAT, embedding)) * part.optimizer


def update(model: ModelShape, plan: TrainingPlan, part: Share) -> tuple[float, float]:
    """Return the gradients that are there while the optimizer's step is at its most, and what it takes itself. Float32
    copies get gradients in float32, made of the others, which go; in ZeRO-3 a sub-group at a time, and none go."""
    count, width = weights.trained(model, plan)
    gradients = count * width * part.gradients
    if not _has_masters(plan, part):
        return gradients, weights.optimizer_step(plan.optimizer, count, width) * part.optimizer
    if not part.optimizer:
        return gradients, 0.0
    held = count * part.optimizer
    updated = _sub_group(model, held) if part.gathered else held
    step = FLOAT * updated + weights.optimizer_step(plan.optimizer, updated, FLOAT)
    return width * held if part.holds_gradients else 0.0, max(step, (width + FLOAT) * updated)


def _sub_group(model: ModelShape, held: float) -> float:
    """Return the elements of the largest sub-group: matrices in their order until they are SUB_GROUP or more
    (stage3.py, _create_fp16_sub_groups), the last of which may be a large one: the head."""
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
    """Weights that are whole for a while: beside a layer's forward pass, the loss, a layer's backward pass, the first
    layer's and the embedding's."""

    forward: float
    loss: float
    backward: float
    end: float


def gathered(model: ModelShape, plan: TrainingPlan, part: Share) -> Gathered:
    """Return what is gathered of weights that GPUs divide.

    FSDP2 as accelerate divides it (fsdp2_prepare_model): the embedding, each layer, and the head with the last norm are
    units. In the forward pass a unit is there twice, in its place and as it was received, which is freed when the next
    one comes or the pass ends; in the backward pass the next one comes meanwhile. So beside the loss there is the last
    layer as received with a head that our loss gathers by itself, or the head twice. A head that is the embedding stays
    from the first use to the end. Trained units are there as gradients, too, and as what is made of them to be
    summed."""
    if not part.gathered:
        return Gathered(0.0, 0.0, 0.0, 0.0)
    if part.keeper != "fsdp":
        return _gathered_by_zero(model, plan)
    largest, c = model.largest_layer, float(plan.compute)
    embedding, head = model.parameters["embedding"], model.parameters["head"]
    kept = embedding if model.tied else 0
    by_itself = model.tied or (plan.loss == "chunked" and not plan.full)
    backward = max(4 * largest, largest + 2 * head, 0 if model.tied else 3 * embedding) if plan.full else 2 * largest
    return Gathered(
        c * (kept + 2 * largest), c * (kept + head + (largest if by_itself else head)), c * (kept + backward),
        c * (kept + backward),
    )  # fmt: skip


def _gathered_by_zero(model: ModelShape, plan: TrainingPlan) -> Gathered:
    """Return what ZeRO-3 gathers (DeepSpeed 0.19, partitioned_param_coordinator.py; traces of its fetches on the CPU).
    The head is there from the first, since TRL's loss takes it without its own forward pass, and to the last, since
    what it makes has no gradient. Beside it are the layer at work and the next one, and in the end the embedding, where
    layers are gathered at once (worker/parallel/zero.py); of others as much as DeepSpeed fetches ahead."""
    largest, head = model.largest_layer, model.parameters["head"] or model.parameters["embedding"]
    embedding, c = 0 if model.tied else model.parameters["embedding"], float(plan.compute)
    there = head + 2 * largest if plan.checkpointing != "off" else max(head, min(LIVE, model.total))
    return Gathered(c * there, c * there, c * there, c * (head + embedding + (largest if there > head else 0)))


def offloaded(model: ModelShape, plan: TrainingPlan, sharding: Sharding) -> float:
    """Return what all GPUs together keep in host memory of what they divide: of trained parameters float32 weights and
    gradients with the optimizer's state; with `params` also weights in 16 bits, where those are others."""
    if sharding.offload == "none":
        return 0.0
    name, count, _, embedding = weights.kept_by(model, plan)
    states = 2 * FLOAT * count + weights.optimizer_state(name, count, FLOAT, embedding)
    alone = sharding.offload == "optimizer" or (sharding.states == "fsdp" and plan.full)
    return states + (0 if alone else model.weight_bytes(plan.compute))


def whole_gradient(model: ModelShape, plan: TrainingPlan, part: Share) -> float:
    """Return the gradient of a gathered embedding before ZeRO-3 divides it: with its weight the 4 bytes of the largest
    layer that DeepSpeed's estimator counts."""
    there = plan.full and part.gathered and part.keeper == "deepspeed"
    return float(plan.compute * model.parameters["embedding"]) if there else 0.0


def ddp_buckets(part: Share, trained_bytes: float) -> float:
    """Return DDP's flat copies of the gradients (gradient_as_bucket_view is off in accelerate)."""
    return trained_bytes if part.buckets else 0.0

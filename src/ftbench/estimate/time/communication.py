"""Estimate the communication between the GPUs of a run, and the waiting time of the GPUs.

The formulas count the bytes that one GPU sends in a ring of n GPUs, for a tensor of S bytes. An all-reduce sends
`2 * S * (n - 1) / n` bytes. An all-gather or reduce-scatter sends half as many (nccl-tests, PERFORMANCE.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from operator import add

from ftbench.core import pipeline
from ftbench.estimate.time.rates import Ceilings
from ftbench.estimate.workload.batches import Batch
from ftbench.estimate.workload.model import TrainableShape
from ftbench.estimate.workload.plan import TrainingPlan, plan_of
from ftbench.estimate.workload.sharding import Sharding, sharding_of
from ftbench.spec.experiment import Experiment

COMMUNICATION, OFFLOADED, BUBBLE = "communication", "offloaded", "bubble"  # the names of the terms
HALF, FLOAT = 2, 4  # bytes per element: 2 for gathered weights and activations, 4 for weights that FSDP trains
DDP_BUCKET = 25 * 2**20  # bytes of gradients per all-reduce (torch, bucket_cap_mb); the last bucket does not overlap
CALL_S = 20e-6  # seconds per collective
# Share of a step in which communication can overlap. DDP sends only in the backward pass (two thirds of the time). FSDP
# and ZeRO-3 fetch the next layer during computation.
_HIDES = {"ddp": 0.6}
_HIDES_GATHERED = 0.85
# NCCL's kernels slow down concurrent work by the first share. The second share is the wait for the slowest GPU. With
# these shares, LoRA with DDP on two GPUs has the efficiency that Exxact published (96 %, RTX PRO 6000, 2025).
_CONCURRENT, _SLOWEST = 0.15, 0.03
_IDLE = {"zero3": 0.08}  # share of a step in which the GPU waits for Python (results/*/two-gpus/zero3-*: 6 to 11 %)
_HOST_BYTES, _HOST_RATE = 28, 40e9  # memory traffic of AdamW on the CPU: bytes per parameter, bytes per second


@dataclass(frozen=True, slots=True)
class Traffic:
    """The communication of one GPU in an optimizer step, in bytes.

    `hidden` bytes can overlap with computation. The step waits for `waited` bytes and for `calls` collectives.
    Offloading copies `to_host` bytes, and the optimizer on the CPU reads and writes `on_host` bytes. To fill and empty
    communication buffers, the GPU reads and writes `copied` bytes."""

    hidden: float = 0.0
    waited: float = 0.0
    calls: float = 0.0
    to_host: float = 0.0
    on_host: float = 0.0
    copied: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*map(add, astuple(self), astuple(other)))


def traffic(spec: Experiment, shape: TrainableShape, batches: Sequence[Batch]) -> Traffic:
    """Return the communication of one GPU in an optimizer step.

    `shape` and `batches` describe the part of the model and the part of the batch on this GPU."""
    sharding = sharding_of(spec.launch)
    if sharding.gpus == 1:
        return Traffic()
    plan, passes = plan_of(spec, shape.model), spec.train.gradient_accumulation_steps
    positions = passes * sum(batch.weight * batch.positions for batch in batches)
    sent = _of_states(sharding, plan, shape, passes)
    # number of passes that all-reduce hidden states: forward, backward, and recomputation
    times = 2 + {"off": 0.0, "selective": 0.5}.get(plan.checkpointing, 1.0)
    for parts, calls in ((sharding.tensor, 2 * len(shape.model.layers)), (sharding.experts, shape.moe_layers)):
        each = 2 * (parts - 1) / parts * positions * shape.model.hidden * HALF
        sent += Traffic(waited=times * calls * each, calls=times * calls * passes) if parts > 1 else Traffic()
    if sharding.pipeline > 1:
        sent += _of_stages(sharding, shape, positions, passes)
    if (parts := sharding.sequence) > 1:  # GPUs send keys and values in a ring; in the backward pass also gradients
        each = sum(2 * layer.key for layer in shape.model.layers) * positions * HALF
        sent += Traffic(hidden=3 * (parts - 1) * each)
    return sent


def _of_states(sharding: Sharding, plan: TrainingPlan, shape: TrainableShape, passes: int) -> Traffic:
    """Return the communication of DDP, FSDP or ZeRO: gradients, and gathered weights."""
    ring, states = (sharding.holders - 1) / sharding.holders, sharding.states
    if states == "none":
        return Traffic()
    if states == "ddp":
        gradients = 2 * ring * shape.trained * (plan.weight if plan.full else plan.adapter)
        last = min(gradients, 2 * ring * DDP_BUCKET)
        return Traffic(gradients - last, last, 1)
    sixteen = ring * shape.trained * HALF
    host = _offloaded(sharding, plan, shape, passes)
    if states in ("zero1", "zero2"):  # overlap_comm is off; ZeRO-2 reduces after each micro-batch
        return host + Traffic(waited=sixteen * (1 + (passes if states == "zero2" else 1)), calls=2 * passes)
    weights, layers = ring * _sent_weights(plan, shape), len(shape.model.layers)
    first = weights / layers  # the first layer of each pass does not overlap with computation
    copy = _copied if states == "fsdp" else _copied_by_zero
    copied = copy(sharding, plan, shape, passes)
    return host + Traffic(passes * (2 * (weights - first) + sixteen), 2 * passes * first, 2 * passes, copied=copied)


def _copied(sharding: Sharding, plan: TrainingPlan, shape: TrainableShape, passes: int) -> float:
    """Return the bytes that FSDP2 moves to fill and empty its communication buffers (_fsdp_collectives.py).

    In the forward and backward pass, FSDP2 casts each shard into the send buffer, and copies each unit out of the
    receive buffer. FSDP2 also copies gradients into the send buffer, and casts received gradients."""
    count, trained, part = shape.model.weight_bytes(HALF) / HALF, shape.trained, 1 / sharding.holders
    kept = FLOAT if plan.in_32_bits else plan.weight
    gathered = count * (part * (kept + HALF) + 2 * HALF)
    return passes * (2 * gathered + trained * (2 * HALF + part * (HALF + FLOAT)))


def _sent_weights(plan: TrainingPlan, shape: TrainableShape) -> float:
    """Return the bytes of all weights in the format in which GPUs send them: 4-bit matrices stay packed."""
    packed = shape.model.linear_parameters if plan.quantised else 0
    return (shape.model.total - packed) * HALF + packed / 2


def _copied_by_zero(sharding: Sharding, plan: TrainingPlan, shape: TrainableShape, passes: int) -> float:
    """Return the bytes that ZeRO-3 moves outside matrix products (DeepSpeed 0.19, stage3.py).

    In the forward and backward pass, DeepSpeed copies each weight out of the receive buffer. It scales each gradient
    before the reduction, and copies its part. In the optimizer step, it computes the norm of its gradients, joins them,
    casts them to float32, scales them, and casts the updated weights to 16 bits."""
    weights, part = _sent_weights(plan, shape), shape.trained / sharding.holders
    updated = 0.0 if sharding.offload != "none" else part * (2 * (HALF + FLOAT) + 2 * HALF + (HALF + FLOAT) + 2 * FLOAT)
    return passes * (2 * weights * 2 + shape.trained * 2 * HALF + part * 2 * HALF) + updated


def _offloaded(sharding: Sharding, plan: TrainingPlan, shape: TrainableShape, passes: int) -> Traffic:
    if sharding.offload == "none":
        return Traffic()
    part = shape.trained / sharding.gpus
    weights = _sent_weights(plan, shape) / sharding.gpus if sharding.offload == "params" else 0.0
    return Traffic(to_host=2 * HALF * part + 2 * passes * weights, on_host=_HOST_BYTES * shape.trained)


def _of_stages(sharding: Sharding, shape: TrainableShape, positions: float, passes: int) -> Traffic:
    """Return the communication of a pipeline stage, which sends hidden states forward and their gradients back.

    Transfers overlap with computation, except for the first and last micro-batches of a pass."""
    sent = 2 * pipeline.parts(sharding.schedule) * positions * shape.model.hidden * HALF
    waited = sent * min(1.0, (sharding.pipeline - 1) / sharding.micro)
    return Traffic(sent - waited, waited, 2 * passes * (sharding.pipeline - 1))


def exposed_seconds(sent: Traffic, sharding: Sharding, limits: Ceilings, step_s: float, copying: float = 1.0) -> float:
    """Return the seconds per step in which a GPU waits for other GPUs. Offloading is not included.

    Args:
        sent: The communication of this GPU.
        sharding: How the GPUs share the work.
        limits: The rates of the links and the memory of this GPU.
        step_s: Seconds per step without waiting for other GPUs.
        copying: `measured time / ideal time` of eager copies. The ideal time uses the full memory bandwidth."""
    if sharding.gpus == 1:
        return 0.0
    hidden, room = sent.hidden / limits.network, _HIDES.get(sharding.states, _HIDES_GATHERED) * step_s
    late = max(0.0, hidden - room)
    slower = _CONCURRENT * min(hidden, room) + (_SLOWEST + _IDLE.get(sharding.states, 0.0)) * step_s
    waited = sent.waited / limits.network + sent.calls * CALL_S
    return late + slower + waited + copying * sent.copied / limits.memory


def offloaded_seconds(sent: Traffic, limits: Ceilings) -> float:
    """Return the seconds per step in which a GPU waits for copies to and from the host, and for the CPU optimizer."""
    return sent.to_host / limits.link + sent.on_host / _HOST_RATE

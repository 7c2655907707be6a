"""Communication between the GPUs of a run, and the time that they wait for it.

Bytes are counted as they leave one GPU in rings of n: an all-reduce sends each byte 2 (n - 1) / n times, an
all-gather or a reduce-scatter (n - 1) / n times (nccl-tests, PERFORMANCE.md)."""

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
HALF, FLOAT = 2, 4  # bytes of gathered weights and activations; of FSDP's trained weights
DDP_BUCKET = 25 * 2**20  # bytes of gradients per message (torch, bucket_cap_mb); the last one does not overlap
CALL_S = 20e-6  # seconds per collective
# Share of the device's time that hides communication. DDP sends only in the backward pass, two thirds of the time; FSDP
# and ZeRO-3 fetch the next layer during computation.
_HIDES = {"ddp": 0.6}
_HIDES_GATHERED = 0.85
# NCCL's kernels slow down concurrent work, and all GPUs wait for the slowest. Together this gives the 96 % of LoRA
# under DDP on two GPUs that Exxact published (RTX PRO 6000, 2025).
_CONCURRENT, _SLOWEST = 0.15, 0.03
_HOST_BYTES, _HOST_RATE = 28, 40e9  # AdamW on the host: bytes per parameter, and bytes per second


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that one GPU sends per optimizer step.

    `hidden` bytes overlap with computation if possible; the step waits for `waited` bytes and `calls` collectives.
    `to_host` are bytes of offloading, `on_host` bytes of the optimizer on the host. `copied` are bytes that the GPU
    reads and writes to move data in and out of communication buffers."""

    hidden: float = 0.0
    waited: float = 0.0
    calls: float = 0.0
    to_host: float = 0.0
    on_host: float = 0.0
    copied: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*map(add, astuple(self), astuple(other)))


def traffic(spec: Experiment, shape: TrainableShape, batches: Sequence[Batch]) -> Traffic:
    """Return the bytes that one GPU sends per step.

    `shape` and `batches` are its part of the model and of the batch."""
    sharding = sharding_of(spec.launch)
    if sharding.gpus == 1:
        return Traffic()
    plan, passes = plan_of(spec, shape.model), spec.train.gradient_accumulation_steps
    positions = passes * sum(batch.weight * batch.positions for batch in batches)
    sent = _of_states(sharding, plan, shape, passes)
    # all-reduces of hidden states: forward, backward, and again for recomputed layers
    times = 2 + {"off": 0.0, "selective": 0.5}.get(plan.checkpointing, 1.0)
    for parts, calls in ((sharding.tensor, 2 * len(shape.model.layers)), (sharding.experts, shape.moe_layers)):
        each = 2 * (parts - 1) / parts * positions * shape.model.hidden * HALF
        sent += Traffic(waited=times * calls * each, calls=times * calls * passes) if parts > 1 else Traffic()
    if sharding.pipeline > 1:
        sent += _of_stages(sharding, shape, positions, passes)
    if (parts := sharding.sequence) > 1:  # a ring passes keys and values on, in the backward pass with their gradients
        each = sum(2 * layer.key for layer in shape.model.layers) * positions * HALF
        sent += Traffic(hidden=3 * (parts - 1) * each)
    return sent


def _of_states(sharding: Sharding, plan: TrainingPlan, shape: TrainableShape, passes: int) -> Traffic:
    """Return the bytes of gradients and of gathered weights that a GPU sends."""
    ring, states = (sharding.holders - 1) / sharding.holders, sharding.states
    if states == "none":
        return Traffic()
    if states == "ddp":
        gradients = 2 * ring * shape.trained * (plan.weight if plan.full else plan.adapter)
        last = min(gradients, 2 * ring * DDP_BUCKET)
        return Traffic(gradients - last, last, 1)
    sixteen = ring * shape.trained * HALF
    host = _offloaded(sharding, shape, passes)
    if states in ("zero1", "zero2"):  # overlap_comm is off; ZeRO-2 reduces after each micro-batch
        return host + Traffic(waited=sixteen * (1 + (passes if states == "zero2" else 1)), calls=2 * passes)
    weights, layers = ring * shape.model.weight_bytes(HALF), len(shape.model.layers)
    first = weights / layers  # nothing overlaps with the first layer, forward and backward
    copied = passes * _copied(sharding, plan, shape) if states == "fsdp" else 0.0
    return host + Traffic(passes * (2 * (weights - first) + sixteen), 2 * passes * first, 2 * passes, copied=copied)


def _copied(sharding: Sharding, plan: TrainingPlan, shape: TrainableShape) -> float:
    """Return bytes that FSDP2 reads and writes for its collectives (_fsdp_collectives.py).

    Each shard is cast into the send buffer, and each unit is copied out of the receive buffer. This happens twice.
    Gradients are copied into the send buffer, and received ones are cast to the shard's type."""
    count, trained, part = shape.model.weight_bytes(HALF) / HALF, shape.trained, 1 / sharding.holders
    kept = FLOAT if plan.in_32_bits else plan.weight
    gathered = count * (part * (kept + HALF) + 2 * HALF)
    return 2 * gathered + trained * (2 * HALF + part * (HALF + FLOAT))


def _offloaded(sharding: Sharding, shape: TrainableShape, passes: int) -> Traffic:
    if sharding.offload == "none":
        return Traffic()
    part = shape.trained / sharding.gpus
    weights = shape.model.weight_bytes(HALF) / sharding.gpus if sharding.offload == "params" else 0.0
    return Traffic(to_host=2 * HALF * part + 2 * passes * weights, on_host=_HOST_BYTES * shape.trained)


def _of_stages(sharding: Sharding, shape: TrainableShape, positions: float, passes: int) -> Traffic:
    """Return the hidden states that a stage sends on, and their gradients that it sends back.

    They overlap with computation, except for the first and last micro-batches of a pass."""
    sent = 2 * pipeline.parts(sharding.schedule) * positions * shape.model.hidden * HALF
    waited = sent * min(1.0, (sharding.pipeline - 1) / sharding.micro)
    return Traffic(sent - waited, waited, 2 * passes * (sharding.pipeline - 1))


def exposed_seconds(
    sent: Traffic, sharding: Sharding, limits: Ceilings, device_s: float, copying: float = 1.0
) -> float:
    """Return the seconds per step in which a GPU waits for others, without offloading.

    Args:
        sent: Its traffic.
        sharding: How the GPUs share the work.
        limits: Rates of its links and memory.
        device_s: Seconds of its computation.
        copying: Time of an eager copy relative to the memory's bandwidth."""
    if sharding.gpus == 1:
        return 0.0
    hidden, room = sent.hidden / limits.network, _HIDES.get(sharding.states, _HIDES_GATHERED) * device_s
    late, slower = max(0.0, hidden - room), _CONCURRENT * min(hidden, room) + _SLOWEST * device_s
    waited = sent.waited / limits.network + sent.calls * CALL_S
    return late + slower + waited + copying * sent.copied / limits.memory


def offloaded_seconds(sent: Traffic, limits: Ceilings) -> float:
    """Return the seconds per step in which a GPU waits for host memory and for the optimizer on the host."""
    return sent.to_host / limits.link + sent.on_host / _HOST_RATE

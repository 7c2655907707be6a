"""What one decoder layer needs for a moment beyond what it saves, and what checkpoints keep of it. Notation and source
are those of `layer.py`."""

from ftbench.estimate.memory.layer import CHUNK, FLOAT, expert_copies, inside, kernel, mlp, norms, saved
from ftbench.estimate.workload.largest import BatchShape
from ftbench.estimate.workload.plan import TrainingPlan
from ftbench.families.shape import Layer

_MLP = {"gate_proj", "up_proj", "down_proj", "gate_up_proj"}


def checkpoint(hidden: int, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return the bytes that a checkpointed layer saves: its input (Chen et al. 2016). unsloth's own keeps it in host
    memory; so does `offload`, of which `phases` counts the ones on their way."""
    return 0.0 if plan.checkpointing == "unsloth" else float(plan.stream * hidden * batch.tokens)


def checkpoint_buffers(hidden: int, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return the bytes of all layers together: unsloth's own checkpointing copies inputs back into one of two buffers
    on the GPU, which stay, and leaves the last layer's input where it is (unsloth_zoo, gradient_checkpointing.py:
    GPU_BUFFERS, GPU_BUFFERS_B, LAST_GC_INDEX)."""
    return 3.0 * plan.stream * hidden * batch.tokens if plan.checkpointing == "unsloth" else 0.0


def mlp_peak(layer: Layer, plan: TrainingPlan, backward: bool = True) -> float:
    """Return the most that one layer's MLP needs at once beyond what is saved.

    Full: gradients of the product, of the activation and of up, less the product that is freed, and the stream.
    Float32 adapters: the product and its float32 copy as down reads it, and five times the stream's width. bfloat16
    adapters on a float32 stream: the gradient through the base, through the adapters, and their sum, less the freed
    input; forward the product and three of the stream's width, one of them cast. Compiled: the gradients alone (of
    fused adapters less the product, whose part in theirs is done before), and forward what down puts out, as the rest
    is saved; unsloth: two gradients, in place.
    """
    h, i, p, c = layer.hidden, layer.inner, plan.product, plan.compute
    if plan.unsloth:
        return c * (2 * i + 2 * h)
    if plan.fused == "augmented" and not plan.compiled:
        return c * (2 * i + 3 * h)
    if plan.full or not plan.targets & _MLP:
        return p * (2 if plan.full else 3) * i + plan.stream * h
    if plan.compiled:
        return c * ((2 if plan.fused != "off" else 3) * i + 3 * h) if backward else c * 2 * h
    if p > plan.adapter and not backward:
        return p * i + (plan.stream + c) * h
    if p > plan.adapter:
        return (3 * p - c) * i + plan.stream * h
    if plan.adapter > c:
        return (c + plan.adapter) * i + 5 * c * h
    return 2 * p * i + 3 * plan.stream * h


def unkept(layer: Layer, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return the bytes that the forward pass of a checkpointed layer needs at once, beside its input. Compiled: all
    that it would save, which a graph hands over at its end, and what adapters put out for gate and up, or what it puts
    out itself. Else the residual stream and its norm with the most of its MLP: gate, what up's base and its adapters
    put out and their sum (peft adds out of place); bases, adapters and sums of both (`beside`); both in one buffer with
    two tensors of the gate function (`augmented`); that, up and their product (no adapters, unsloth)."""
    h, i = plan.stream * layer.hidden, plan.product * layer.inner
    adapted = "up_proj" in plan.targets and not plan.unsloth
    if plan.compiled:
        beside = 2 * i if adapted and plan.fused != "augmented" else h
        return saved(layer, plan, batch) + (beside - h) * batch.tokens
    wide = {"off": 4, "beside": 6, "augmented": 4}[plan.fused] if adapted else 3
    return float((wide * i + 2 * h) * batch.tokens)


def experts_peak(layer: Layer, plan: TrainingPlan, backward: bool) -> float:
    """Return the most that one layer's experts need at once beyond what is saved: for each visited expert the gradient
    of the output spread out, and put back in order (3 h); gpt_oss's gate function needs 2 i besides. Where routing
    weights are float32 that gradient is, and that of its factor, and it is cast. What a shared expert saved that comes
    after them is gone by then."""
    moe = layer.experts
    if moe is None:
        return 0.0
    gone = mlp(layer, plan) if moe.shared_after and backward else 0.0
    if moe.float_weights and backward:
        return (moe.active * (3 * FLOAT + plan.compute) + plan.compute) * layer.hidden - gone
    return moe.active * plan.compute * (3 * layer.hidden + (2 * moe.inner if moe.clamped else 0)) - gone


def experts_again(layer: Layer, plan: TrainingPlan) -> float:
    """Return the same for a checkpointed layer. While its forward pass is done again there are the experts' inputs in
    their order where nothing saves them, their weighted outputs, the residual stream, what was normed of it, and the
    gradient that waits, which is spread out already (torch makes a layer again when a tensor of it is asked for first)
    unless a shared expert adds to the sum, which is in float32 and cast. In the backward pass what was saved is gone
    as soon as it is used."""
    moe, c, h = layer.experts, plan.compute, layer.hidden
    assert moe is not None
    weighted, shared = FLOAT if moe.float_weights else c, mlp(layer, plan) if moe.shared_after else 0.0
    inputs = 0 if plan.full or "experts" in plan.targets else c
    once = moe.active * (weighted + inputs) + (2 if plan.full else 3) * c
    once += FLOAT + c if layer.inner else moe.active * weighted
    gate = 2 * moe.inner * moe.active * c if moe.clamped else 0
    return max(once * h, (3 * moe.active * weighted + c) * h + gate) - shared


def attention_peak(layer: Layer, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return the most that one layer's attention needs at once beyond what is saved: gradients of queries, keys, values
    and output, and for eager attention those of the weights (float32 twice, less the cast ones that are freed; gpt_oss
    twice more in the product's type)."""
    c, scores, by = plan.compute, float(layer.heads * batch.length), kernel(layer, plan, batch)
    if by == "eager":
        return c * 2 * layer.query + scores * (2 * c if layer.sinks else 2 * FLOAT - c)
    spread = layer.query + layer.output if by in ("masked", "varlen") else layer.key + layer.value
    return c * (layer.query + layer.output + spread) + (FLOAT * layer.query if layer.head_norms else 0)


def ungraded(layer: Layer, plan: TrainingPlan) -> float:
    """Return the most that linear attention needs of a position where nobody asks for its gradient: ten float32 tensors
    of queries, keys and values, three squares of a chunk, the product that all are parts of, what is convolved, queries
    and keys for each head, and the residual stream. Softmax attention needs less than the loss does: 0."""
    if (net := layer.delta) is None:
        return 0.0
    a, b = net.value_heads * net.key_dim, net.value_heads * net.value_dim
    product = max(linear.outputs for linear in layer.linears if linear.part == "attention")
    parts = plan.compute * (product + net.convolved + 2 * a + b) + 3 * plan.stream * layer.hidden
    return FLOAT * (6 * a + 4 * b) + 3 * FLOAT * net.value_heads * CHUNK + parts


def dequantised(layer: Layer, plan: TrainingPlan) -> float:
    """Return the bytes of the largest matrix back in 16 bits: bitsandbytes dequantises it for its backward product
    (MatMul4Bit.backward), unsloth into a buffer that it keeps (fast_dequantize); gate and up of all experts in MXFP4
    (worker/model/mxfp4.py)."""
    if plan.mxfp4 and layer.experts:
        return float(plan.compute * layer.experts.count * 2 * layer.experts.inner * layer.hidden)
    if not plan.quantised or plan.mxfp4:
        return 0.0
    return float(plan.compute * max((each.inputs * each.outputs for each in layer.linears), default=0))


def fp8_casts(layer: Layer, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return the bytes of the widest input on its way to 8 bits: float32 twice, and itself
    (kernels/small_products.py, `cast`); a compiled layer writes the 8 bits alone."""
    if not plan.fp8 or layer.experts:
        return 0.0
    return float((1 if plan.compiled else 2 * FLOAT + 1) * layer.inner * batch.tokens)


def peak(layer: Layer, plan: TrainingPlan, batch: BatchShape, backward: bool, again: bool = False) -> float:
    """Return the bytes that one layer needs at its worst moment, in the forward or in the backward pass, beyond what it
    saves, or with `again` makes again: in its MLP, when a norm behind that saves nothing yet; in the backward pass of
    that norm (five float32 copies of its input, less what it gave); or in its attention, which comes to its turn when
    what the MLP saved is not there yet, or is gone."""
    if layer.experts:
        second = experts_again(layer, plan) if again else experts_peak(layer, plan, backward)
    else:
        second = mlp_peak(layer, plan, backward)
    if behind := [norm for norm in layer.norms if norm.position == "after"][-1:]:
        alone = (5 * FLOAT - plan.stream) * layer.hidden
        second = max(second, alone) if backward else second - norms(layer, plan, behind)
    each = max(second, attention_peak(layer, plan, batch) - inside(layer, plan)) * batch.tokens
    # the gradient of gate and up together, when the copy of down is gone
    copies = 0 if plan.mxfp4 or plan.fused != "off" else expert_copies(layer, plan) / 3
    bits = 0.0 if plan.unsloth else dequantised(layer, plan)
    return max(each, copies, each / 2 + max(bits, fp8_casts(layer, plan, batch)))  # in 16 bits, before sums

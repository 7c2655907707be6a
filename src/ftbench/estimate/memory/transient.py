"""Compute the bytes of a decoder layer's temporary tensors, and of the tensors that gradient checkpointing saves.

Functions with names that end in `_peak` return bytes per token. `layer.py` names the sources."""

from ftbench.estimate.memory.layer import FLOAT, expert_copies, inside, kernel, norms, saved
from ftbench.estimate.memory.weights import groups
from ftbench.estimate.workload.largest import BatchShape
from ftbench.estimate.workload.plan import TrainingPlan
from ftbench.families.shape import Layer

_MLP = {"gate_proj", "up_proj", "down_proj", "gate_up_proj"}


def checkpoint(hidden: int, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return the GPU bytes of one layer's checkpoint: the input of the layer for the batch (Chen et al. 2016).

    unsloth keeps checkpoints in host memory, so the result is 0. `offload` also keeps checkpoints in host memory, but
    up to two are on the GPU during copies. The result is the size of one, and phases.py multiplies it by two."""
    return 0.0 if plan.checkpointing == "unsloth" else float(plan.stream * hidden * batch.tokens)


def checkpoint_buffers(hidden: int, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return the GPU bytes that unsloth's gradient checkpointing needs for all layers together.

    unsloth copies layer inputs from host memory to two permanent GPU buffers in turn. The input of the last layer stays
    on the GPU (unsloth_zoo, gradient_checkpointing.py: GPU_BUFFERS, GPU_BUFFERS_B, LAST_GC_INDEX)."""
    return 3.0 * plan.stream * hidden * batch.tokens if plan.checkpointing == "unsloth" else 0.0


def mlp_peak(layer: Layer, plan: TrainingPlan, backward: bool = True) -> float:
    """Return the peak bytes per token of the temporary tensors in one layer's MLP, without saved tensors.

    z is silu(gate) * up, the input of down_proj. The tensors depend on the training plan:

    - Full training: the gradients of z, of silu(gate) and of up, and a tensor of the size of the residual stream. The
      freed z is subtracted.
    - Float32 adapters: z, a float32 copy of z for down_proj, and five tensors of the hidden size.
    - bfloat16 adapters, float32 residual stream, backward pass: the gradient of z through the base layer, the gradient
      of z through the adapters, and their sum. The freed z is subtracted. Forward pass: z, the residual stream, and a
      copy of the residual stream in the compute dtype.
    - Compiled layers: only gradients. With fused adapters, the gradient of z is freed earlier. Forward pass: only the
      output of down_proj, because the other tensors are saved.
    - unsloth: two gradients, computed in place."""
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
    """Return the peak bytes for the batch in the forward pass of a checkpointed layer, without the layer's input.

    A compiled layer returns all tensors for the backward pass at the end of its graph, so all of them exist together.
    If gate and up have separate adapter outputs, these are added. Otherwise, the layer's output is added. A layer
    without compile needs the residual stream, its normalized values, and these tensors of the MLP:

    - peft: the output of gate. For up, the output of the base layer, the output of the adapter, and their sum.
    - `separate`: for gate and for up, the base output, the adapter output, and their sum.
    - `augmented`: one buffer for gate and up, and two tensors of the gate function.
    - Without adapters, or unsloth: gate, up and silu(gate) * up."""
    h, i = plan.stream * layer.hidden, plan.product * layer.inner
    adapted = "up_proj" in plan.targets and not plan.unsloth
    if plan.compiled:
        outputs = 2 * i if adapted and plan.fused != "augmented" else h
        return saved(layer, plan, batch) + (outputs - h) * batch.tokens
    wide = {"off": 4, "separate": 6, "augmented": 4}[plan.fused] if adapted else 3
    return float((wide * i + 2 * h) * batch.tokens)


def experts_peak(layer: Layer, plan: TrainingPlan, backward: bool) -> float:
    """Return the peak bytes per token of the temporary tensors in one layer's experts, without saved tensors.

    Each active expert needs three tensors of the hidden size: the gradient of the expert's output, an expanded copy,
    and a reordered copy. gpt_oss's gate function adds two tensors of the expert's width. Float32 routing weights make
    the three tensors float32, and add a copy in the compute dtype."""
    moe = layer.experts
    if moe is None:
        return 0.0
    if moe.float_weights and backward:
        return (moe.active * (3 * FLOAT + plan.compute) + plan.compute) * layer.hidden
    return moe.active * plan.compute * (3 * layer.hidden + (2 * moe.inner if moe.clamped else 0))


def experts_again(layer: Layer, plan: TrainingPlan) -> float:
    """Return the peak bytes per token of the temporary tensors in one checkpointed layer's experts.

    The peak is in the recomputation or in the backward pass. The recomputation needs the reordered inputs (if they are
    not saved), the weighted outputs, the residual stream and its normalized values. torch starts the recomputation when
    the backward pass needs the first saved tensor. At that time, the gradient of the outputs already exists, with one
    copy per active expert. In the backward pass, each saved tensor is freed after its use."""
    moe, c, h = layer.experts, plan.compute, layer.hidden
    assert moe is not None
    weighted = FLOAT if moe.float_weights else c
    inputs = 0 if plan.full or "experts" in plan.targets else c
    once = moe.active * (weighted + inputs) + (2 if plan.full else 3) * c
    once += moe.active * weighted
    gate = 2 * moe.inner * moe.active * c if moe.clamped else 0
    return float(max(once * h, (3 * moe.active * weighted + c) * h + gate))


def attention_peak(layer: Layer, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return the peak bytes per token of the temporary tensors in one layer's attention, without saved tensors.

    The temporary tensors are the gradients of queries, keys, values and output. Eager attention needs two tensors with
    the width of the queries. It also needs two tensors with the size of the attention weights, in float32 (in the
    compute dtype for gpt_oss). The attention weights in the compute dtype are freed, so their bytes are subtracted."""
    c, scores, by = plan.compute, float(layer.heads * batch.length), kernel(layer, plan, batch)
    if by == "eager":
        return c * 2 * layer.query + scores * (2 * c if layer.sinks else 2 * FLOAT - c)
    spread = 2 * (layer.query if by in ("masked", "varlen") else layer.key)
    return c * (2 * layer.query + spread) + (FLOAT * layer.query if layer.head_norms else 0)


def dequantised(layer: Layer, plan: TrainingPlan) -> float:
    """Return the bytes of the largest dequantized matrix in 16 bits.

    bitsandbytes dequantizes a matrix in the backward pass (MatMul4Bit.backward). unsloth uses a permanent buffer
    instead (fast_dequantize). In MXFP4, the largest matrix is gate and up of all experts (worker/model/mxfp4.py).
    unsloth also keeps the dequantized down: four runs of gpt-oss needed both (results/h100/founding-text)."""
    if plan.packed_experts and layer.experts:
        matrices = 3 if plan.unsloth else 2
        return float(plan.compute * layer.experts.count * matrices * layer.experts.inner * layer.hidden)
    if not plan.quantised or plan.packed_experts:
        return 0.0
    sizes = [each.inputs * each.outputs for each in layer.linears]
    if plan.fused == "augmented":  # fused_lora dequantizes the matrices of a group together
        sizes += [(each.inputs + each.columns) * (each.outputs + each.columns) for each in groups(plan, layer)]
    return float(plan.compute * max(sizes, default=0))


def fp8_casts(layer: Layer, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return the peak bytes for the batch while the input of down_proj, a layer's widest input, is cast to 8 bits.

    Two float32 copies and the 8-bit result exist (kernels/small_products.py, `cast`). A compiled layer writes only the
    8-bit result. The weight gradient of a trained layer needs a second, transposed result."""
    if not plan.fp8 or layer.experts:
        return 0.0
    return float((1 + plan.full + (0 if plan.compiled else 2 * FLOAT)) * layer.inner * batch.tokens)


def peak(layer: Layer, plan: TrainingPlan, batch: BatchShape, backward: bool, again: bool = False) -> float:
    """Return the peak bytes of one layer's temporary tensors for the batch, without saved tensors.

    `again` means that the layer recomputes the saved tensors. The peak is the largest of five sizes:

    - The peak of the MLP or experts. In the forward pass, minus the tensors of a norm after the MLP, which runs later.
    - The backward pass of a norm after the MLP. Five float32 copies of its input exist, and its output is freed.
    - The peak of attention, minus the tensors that the MLP saves. At that time, the MLP's tensors do not exist.
    - The gradient of a copy of expert weights.
    - Half of the largest of the first three sizes, plus the largest dequantized matrix or the casts to 8 bits. With
      the dequantized experts of unsloth, the full size counts."""
    if layer.experts:
        second = experts_again(layer, plan) if again else experts_peak(layer, plan, backward)
    else:
        second = mlp_peak(layer, plan, backward)
    if after := [norm for norm in layer.norms if norm.position == "after"][-1:]:
        norm_peak = (5 * FLOAT - plan.stream) * layer.hidden
        second = max(second, norm_peak) if backward else second - norms(layer, plan, after)
    each = max(second, attention_peak(layer, plan, batch) - inside(layer, plan)) * batch.tokens
    # the gradient of the copy of gate and up of all experts; the copy of down is freed before
    copies = 0 if plan.packed_experts or plan.fused != "off" else expert_copies(layer, plan) / 3
    bits = 0.0 if plan.unsloth and not plan.packed_experts else dequantised(layer, plan)
    # half: at that time, tensors are in 16 bits and the gradients are not summed yet
    half = each if plan.unsloth and plan.packed_experts else each / 2
    return max(each, copies, half + max(bits, fp8_casts(layer, plan, batch)))

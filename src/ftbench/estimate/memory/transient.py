"""The temporary tensors of one decoder layer, and the tensors that gradient checkpointing saves. `layer.py` explains
the notation and the source."""

from ftbench.estimate.memory.layer import FLOAT, expert_copies, inside, kernel, norms, saved
from ftbench.estimate.workload.largest import BatchShape
from ftbench.estimate.workload.plan import TrainingPlan
from ftbench.families.shape import Layer

_MLP = {"gate_proj", "up_proj", "down_proj", "gate_up_proj"}


def checkpoint(hidden: int, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return the bytes that a checkpointed layer saves on the GPU. It saves only its input (Chen et al. 2016).

    unsloth's checkpointing and `offload` keep it in host memory. `phases` counts inputs that `offload` is copying.
    """
    return 0.0 if plan.checkpointing == "unsloth" else float(plan.stream * hidden * batch.tokens)


def checkpoint_buffers(hidden: int, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return the bytes on the GPU that unsloth's checkpointing needs for all layers together.

    unsloth copies inputs back into one of two permanent buffers on the GPU, and leaves the last layer's input on the
    GPU (unsloth_zoo, gradient_checkpointing.py: GPU_BUFFERS, GPU_BUFFERS_B, LAST_GC_INDEX)."""
    return 3.0 * plan.stream * hidden * batch.tokens if plan.checkpointing == "unsloth" else 0.0


def mlp_peak(layer: Layer, plan: TrainingPlan, backward: bool = True) -> float:
    """Return the peak bytes of the temporary tensors of one layer's MLP. Saved tensors are not included.

    - Full training: gradients of gate * up, of the activation and of up; the residual stream. gate * up is freed.
    - Float32 adapters: gate * up, its float32 copy for down, and five tensors of the size of the residual stream.
    - bfloat16 adapters with a float32 residual stream: the gradients through the base layer and through the adapters,
      and their sum. The input is freed. The forward pass holds gate * up and three copies of the residual stream, one
      of them cast.
    - Compiled layers: only the gradients. With fused adapters, the gradient of gate * up is freed earlier. The forward
      pass holds only the output of down, because all other tensors are saved.
    - unsloth: two gradients, which it computes in place."""
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
    """Return the peak bytes in the forward pass of a checkpointed layer, without its input.

    The graph of a compiled layer returns all tensors to save at its end, so they exist together. The adapter outputs of
    gate and up, or the layer's output, are added. Layers that are not compiled need the residual stream, its norm, and
    these tensors of the MLP:

    - peft: the output of gate; for up the outputs of base and adapter, and their sum (peft adds out of place).
    - `separate`: base outputs, adapter outputs and sums of gate and up.
    - `augmented`: one buffer for gate and up, and two tensors of the gate function.
    - No adapters, or unsloth: gate, up and their product."""
    h, i = plan.stream * layer.hidden, plan.product * layer.inner
    adapted = "up_proj" in plan.targets and not plan.unsloth
    if plan.compiled:
        outputs = 2 * i if adapted and plan.fused != "augmented" else h
        return saved(layer, plan, batch) + (outputs - h) * batch.tokens
    wide = {"off": 4, "separate": 6, "augmented": 4}[plan.fused] if adapted else 3
    return float((wide * i + 2 * h) * batch.tokens)


def experts_peak(layer: Layer, plan: TrainingPlan, backward: bool) -> float:
    """Return the peak bytes of the temporary tensors of one layer's experts. Saved tensors are not included.

    For each active expert, three tensors of h values per token exist: the gradient of the output, its expanded copy and
    its reordered copy. gpt_oss's gate function adds two tensors of i values. With float32 routing weights the three
    tensors are float32, and one of them is also cast to the compute type."""
    moe = layer.experts
    if moe is None:
        return 0.0
    if moe.float_weights and backward:
        return (moe.active * (3 * FLOAT + plan.compute) + plan.compute) * layer.hidden
    return moe.active * plan.compute * (3 * layer.hidden + (2 * moe.inner if moe.clamped else 0))


def experts_again(layer: Layer, plan: TrainingPlan) -> float:
    """Return the same as `experts_peak`, for a checkpointed layer. During recomputation, these tensors exist: the
    ordered inputs of the experts (if they are not saved), their weighted outputs, the residual stream, its norm, and
    the incoming gradient. This gradient is already expanded, because torch recomputes a layer at the first access to
    one of its tensors. In the backward pass, each saved tensor is freed after its use."""
    moe, c, h = layer.experts, plan.compute, layer.hidden
    assert moe is not None
    weighted = FLOAT if moe.float_weights else c
    inputs = 0 if plan.full or "experts" in plan.targets else c
    once = moe.active * (weighted + inputs) + (2 if plan.full else 3) * c
    once += moe.active * weighted
    gate = 2 * moe.inner * moe.active * c if moe.clamped else 0
    return float(max(once * h, (3 * moe.active * weighted + c) * h + gate))


def attention_peak(layer: Layer, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return the peak bytes of the temporary tensors of one layer's attention. Saved tensors are not included.

    These are the gradients of queries, keys, values and output. Eager attention adds two float32 copies of the
    attention weights, minus the freed casts. For gpt_oss, the two copies have the product's dtype."""
    c, scores, by = plan.compute, float(layer.heads * batch.length), kernel(layer, plan, batch)
    if by == "eager":
        return c * 2 * layer.query + scores * (2 * c if layer.sinks else 2 * FLOAT - c)
    spread = 2 * (layer.query if by in ("masked", "varlen") else layer.key)
    return c * (2 * layer.query + spread) + (FLOAT * layer.query if layer.head_norms else 0)


def dequantised(layer: Layer, plan: TrainingPlan) -> float:
    """Return the bytes of the largest dequantized matrix in 16 bits.

    bitsandbytes dequantizes this matrix for its backward product (MatMul4Bit.backward). unsloth dequantizes it into a
    permanent buffer (fast_dequantize). With MXFP4 the matrix is gate and up of all experts (worker/model/mxfp4.py)."""
    if plan.packed_experts and layer.experts:
        return float(plan.compute * layer.experts.count * 2 * layer.experts.inner * layer.hidden)
    if not plan.quantised or plan.packed_experts:
        return 0.0
    return float(plan.compute * max((each.inputs * each.outputs for each in layer.linears), default=0))


def fp8_casts(layer: Layer, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return the peak bytes while the widest input is cast to 8 bits: two float32 copies and the result.

    Source: kernels/small_products.py, `cast`. A compiled layer writes only the 8-bit result."""
    if not plan.fp8 or layer.experts:
        return 0.0
    return float((1 if plan.compiled else 2 * FLOAT + 1) * layer.inner * batch.tokens)


def peak(layer: Layer, plan: TrainingPlan, batch: BatchShape, backward: bool, again: bool = False) -> float:
    """Return the peak bytes of one layer's temporary tensors. Its saved tensors, and with `again` its recomputed
    tensors, are not included.

    The peak has three candidates. The first is in the MLP, before the norm that follows saves tensors. The second is in
    the backward pass of this norm, when five float32 copies of its input exist and its output is freed. The third is in
    attention, when the saved tensors of the MLP do not exist."""
    if layer.experts:
        second = experts_again(layer, plan) if again else experts_peak(layer, plan, backward)
    else:
        second = mlp_peak(layer, plan, backward)
    if after := [norm for norm in layer.norms if norm.position == "after"][-1:]:
        norm_peak = (5 * FLOAT - plan.stream) * layer.hidden
        second = max(second, norm_peak) if backward else second - norms(layer, plan, after)
    each = max(second, attention_peak(layer, plan, batch) - inside(layer, plan)) * batch.tokens
    # the gradient of gate and up together, after the copy of down is freed
    copies = 0 if plan.packed_experts or plan.fused != "off" else expert_copies(layer, plan) / 3
    bits = 0.0 if plan.unsloth and not plan.packed_experts else dequantised(layer, plan)
    return max(each, copies, each / 2 + max(bits, fp8_casts(layer, plan, batch)))  # in 16 bits, before they are summed

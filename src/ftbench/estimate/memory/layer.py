"""Compute the bytes that one decoder layer saves for the backward pass.

Functions return bytes per token of the batch, unless noted otherwise. Padding counts as tokens. Symbols: h is the
hidden size, i the width of the MLP or of one expert, and r the rank of the adapters. A "product" is the output of a
matrix multiplication. The formulas follow the tensors that autograd saves in the modules of transformers 5.17 under
peft 0.21 and autocast. They were read with torch.autograd.graph.saved_tensors_hooks. Other sources are named."""

from collections.abc import Sequence

from ftbench.estimate.memory.weights import groups
from ftbench.estimate.workload.largest import BatchShape
from ftbench.estimate.workload.model import expert_adapter
from ftbench.estimate.workload.plan import Attention, TrainingPlan
from ftbench.families.shape import Layer, Linear, Norm

FLOAT, INDEX = 4, 8  # bytes per element
_STREAM = ("input", "mlp input")  # the normalized residual stream that linear layers read
_PROJECTIONS = {"q_proj", "k_proj", "v_proj"}


def norms(layer: Layer, plan: TrainingPlan, of: Sequence[Norm] | None = None) -> float:
    """Return the bytes that norms save. A norm saves its input in float32 (4 h bytes) and a float32 scale (4 bytes).

    A trained norm also saves its normalized input, in the dtype in which the norm's weight multiplies it. A LayerNorm
    in Python code saves its centered input twice. Liger (LigerRMSNormFunction) and unsloth save the input without a
    cast to float32. ftbench's kernels do the same, and recompute the scale (kernels/rms_norm.py).

    Args:
        layer: The decoder layer.
        plan: The training plan.
        of: The norms to count. The default is all norms of the layer."""
    total = 0.0
    for norm in layer.norms if of is None else of:
        given = plan.product if norm.position == "head" else plan.stream
        if plan.norms_keep_inputs:
            total += given * norm.width + (0 if plan.triton else FLOAT * norm.groups)
            continue
        normed = (given if layer.norm_kind == "plain" else FLOAT) if plan.full else 0
        copies = 2 if layer.norm_kind == "centred" else 1
        total += (copies * FLOAT + normed) * norm.width + FLOAT * norm.groups
    return total


def saved_twice(layer: Layer, plan: TrainingPlan) -> float:
    """Return the bytes of the inputs that eager norms save twice. Two operations of a norm save its float32 input.

    trl's activation offloading moves the first saved tensor to host memory. The second saved tensor has the same
    storage and stays on the GPU (activation_offloading.py, deduplication of storages)."""
    if plan.norms_keep_inputs or plan.compiled:
        return 0.0
    return float(FLOAT * sum(norm.width for norm in layer.norms))


def adapter_input(plan: TrainingPlan, linear: Linear) -> float:
    """Return the bytes that the adapters of one matrix save: their input, and its product with A (r elements).

    peft casts the input to the dtype of the adapters, and autocast casts it back to the compute dtype. Therefore each
    matrix saves a separate copy. No copy is needed if the input already has the dtype of the adapters, as the input of
    o_proj in a quantized model."""
    shared = linear.reads == "attention" and plan.adapter == plan.compute
    copy = 0 if shared or plan.casts_nothing else plan.compute * linear.inputs
    return copy + plan.compute * plan.rank


def distinct(linears: Sequence[Linear]) -> int:
    """Return the sum of the widths of distinct inputs. The input of o_proj is not included: attention saves it."""
    return sum({each.reads: each.inputs for each in linears if each.reads != "attention"}.values())


def linear_inputs(layer: Layer, plan: TrainingPlan) -> float:
    """Return the bytes of the inputs that the layer's matrices save.

    Trained matrices save their input in the compute dtype. Matrices with the same input share one saved tensor, unless
    autocast casts a float32 input separately for each matrix. Frozen matrices save only the inputs of their adapters.
    unsloth (LoRA_QKV, LoRA_MLP) and fused_lora save one input for q, k and v, and one input for gate and up. 8-bit
    products do not save their inputs, because their backward pass reads only the transposed weight."""
    reached = layer.reached(plan.targets)
    if plan.unsloth:
        return plan.compute * (2 * layer.hidden + plan.rank * plan.adapted(layer))
    if plan.fused != "off":
        return fused_inputs(layer, plan)
    if plan.full:
        if not (plan.autocast and plan.stream > plan.compute):
            return plan.compute * distinct(layer.linears)
        cast = sum(each.inputs for each in layer.linears if each.reads in _STREAM)
        return plan.compute * (cast + distinct([each for each in layer.linears if each.reads not in _STREAM]))
    shared = plan.compute * distinct(reached) if plan.casts_nothing else 0
    return shared + sum(adapter_input(plan, each) for each in reached)


def fused_inputs(layer: Layer, plan: TrainingPlan) -> float:
    """Return the bytes of the inputs that fused_lora saves for its groups (kernels/adapter_products.py).

    `augmented` saves a buffer with a copy of the input and the input's product with A. `separate` saves the input in
    the compute dtype, and its product with A. The input of o_proj is not counted: attention already saves it."""
    if plan.fused == "augmented":
        return plan.compute * sum(group.inputs + group.columns for group in groups(plan, layer))
    widths = sum(group.inputs for group in groups(plan, layer) if group.reads != "attention")
    return plan.compute * (widths + plan.rank * plan.adapted(layer))


def fused_outputs(layer: Layer, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return the additional bytes that stay because the outputs of a group are views of one buffer.

    A buffer stays while one of its views is saved. Each buffer has extra columns (`Group.columns`) for the backward
    pass. The buffer of queries, keys and values also contains queries and keys before rotation. It stays if attention
    saves the values as a view. If attention saves a copy, because values are repeated for each query head, the buffer
    stays only for a compiled head norm or ftbench's kernel (kernels/rotary.py). Then its values are added too."""
    if plan.fused != "augmented":
        return 0.0
    copied = plan.triton or layer.sinks or repeats(layer, plan, batch)
    kept = plan.triton or (plan.compiled and layer.head_norms)
    freed = copied and not kept
    columns = sum(
        group.columns for group in groups(plan, layer)
        if group.outputs != layer.hidden and not (freed and group.reads == "input")
    )  # fmt: skip
    before = layer.query + layer.key + (layer.key if copied else 0)
    return plan.compute * (columns + (0 if freed or not plan.targets >= _PROJECTIONS else before))


def kernel(layer: Layer, plan: TrainingPlan, batch: BatchShape) -> Attention:
    """Return the name of a layer's attention kernel. `masked` is sdpa with a mask. sdpa needs a mask if the sliding
    window is shorter than a row of the batch."""
    slides = layer.window is not None and batch.length > layer.window and not plan.unsloth
    return "masked" if plan.attention == "sdpa" and slides else plan.attention


def repeats(layer: Layer, plan: TrainingPlan, batch: BatchShape) -> bool:
    """Return whether keys and values are repeated for each query head before attention."""
    repeating = kernel(layer, plan, batch) in ("masked", "varlen") and layer.kv_heads != layer.heads
    return repeating and not layer.sinks  # kernels/sink_attention.py


def attention(layer: Layer, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return the bytes that attention saves: queries, keys, values, output, and one float32 number per head.

    With a mask, sdpa repeats keys and values for each query head (transformers, use_gqa_in_sdpa). It saves a mask of
    rows x length x length elements in the compute dtype. varlen of torch 2.11 also repeats keys and values.
    Eager attention saves the attention weights (heads x length elements per token) in float32 and in the compute dtype.
    gpt_oss saves them only in the compute dtype, with one more element per head for the sink.
    unsloth keeps queries and keys both before and after rotation. If the values are a view of a wider product, the full
    product stays, unless the values are repeated."""
    c, scores, by = plan.compute, float(layer.heads * batch.length), kernel(layer, plan, batch)
    if by == "eager":
        output = layer.query if plan.full or plan.adapter == c else 0  # only if o reads it without a cast
        weights = c * (scores + layer.heads) + INDEX * layer.heads if layer.sinks else (FLOAT + c) * scores
        weights += 2 * c * scores if layer.softcap else 0
        return c * (3 * layer.query + output) + weights
    spread = 2 * layer.query
    if not repeats(layer, plan, batch):
        spread = 2 * layer.key + layer.fused_values
    mask = c * batch.length if by == "masked" else 0
    before = c * (layer.query + layer.key) if plan.unsloth else 0
    return c * (2 * layer.query + spread) + before + FLOAT * layer.heads + mask


def before_rotation(layer: Layer, plan: TrainingPlan) -> float:
    """Return the bytes of saved queries and keys before rotation. Those that `fused_outputs` counts are not included.

    A compiled head norm saves them and recomputes its output from them. ftbench's kernel always saves them. It also
    saves the values if one product computes queries, keys and values."""
    together = plan.fused == "augmented" and plan.targets >= _PROJECTIONS
    if together or not (layer.head_norms or plan.triton):
        return 0.0
    return plan.compute * (layer.query + layer.key + (layer.key if plan.joined else 0))


def mlp(layer: Layer, plan: TrainingPlan) -> float:
    """Return the bytes that a gated MLP saves: gate, the activation of gate, and up (3 i elements).

    The kernels of Liger, unsloth and ftbench recompute the activation and save 2 i elements."""
    return plan.product * (2 if plan.norms_keep_inputs else 3) * layer.inner


def experts(layer: Layer, plan: TrainingPlan) -> float:
    """Return the bytes that fused experts save through grouped products (transformers, grouped_mm_experts_forward).

    A token has `active` experts. For each of them, these tensors are saved: gate and up (2 i elements), the operands of
    the gate function, the output before the routing weight multiplies it (h elements), and indices. The operands are i
    elements for silu, and 4 i elements for gpt_oss's clamped function. Compiled layers recompute the operands. Trained
    experts also save the inputs of their two products (h + i elements)."""
    moe = layer.experts
    if moe is None:
        return 0.0
    h, i, c = layer.hidden, moe.inner, plan.compute
    inputs = h + i if plan.full or "experts" in plan.targets else 0
    gate = 0 if plan.compiled else 4 * i if moe.clamped else i
    return moe.active * (c * (2 * i + gate + h + inputs) + 3 * INDEX + 3)


def router(layer: Layer, plan: TrainingPlan) -> float:
    """Return the bytes that the router saves: float32 probabilities of all experts, and indices of the chosen experts.

    gpt_oss saves only the probabilities of the chosen experts. A trained router also saves its input, unless the
    layer's MLP already saves it."""
    moe = layer.experts
    if moe is None:
        return 0.0
    probabilities = plan.compute * moe.active if moe.router == "chosen" else FLOAT * moe.count
    own = plan.full and not layer.inner
    return probabilities + INDEX * moe.active + (plan.compute * layer.hidden if own else 0)


def inside(layer: Layer, plan: TrainingPlan) -> float:
    """Return the bytes that the MLP, the experts and the router of a layer save."""
    return (mlp(layer, plan) if layer.inner else 0.0) + experts(layer, plan) + router(layer, plan)


def expert_copies(layer: Layer, plan: TrainingPlan) -> float:
    """Return the bytes of the copies of expert weights in one layer. They do not depend on the number of tokens.

    In each forward pass, peft adds the product of A and B to a copy of the weights (ParamWrapper). autograd saves this
    copy, and the adapters in the compute dtype."""
    moe = layer.experts
    if moe is None or "experts" not in plan.targets:
        return 0.0
    adapters = plan.compute * plan.rank * expert_adapter(layer) * moe.count
    if plan.packed_experts or plan.fused != "off":  # two thin products (kernels/expert_products.py)
        return adapters
    return plan.weight * layer.expert_matrices + adapters


def compiled(layer: Layer, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return the bytes that a compiled layer saves.

    Inductor's partitioner recomputes norms, rotation and activation. The layer saves the residual stream and its
    normalized values twice: before attention and before the MLP. It saves queries and keys (see `before_rotation`),
    values, the output of attention, and a copy of this output if o_proj needs another dtype or layout. In the MLP, it
    saves gate, up and silu(gate) * up. Norms save float32 scales, but ftbench's kernels do not.
    With compile: lean, the layer also recomputes the normalized values and silu(gate) * up, unless they are in the
    buffers of `augmented`."""
    h, c = layer.hidden, plan.compute
    before = before_rotation(layer, plan)
    middle = c * 3 * layer.inner + experts(layer, plan) + router(layer, plan)
    scales = 0 if plan.triton else FLOAT * (2 + layer.heads + layer.kv_heads)
    between = float(c * plan.rank * plan.adapted(layer))  # inputs multiplied by A
    if plan.fused == "augmented":  # `augmented` keeps these inputs and outputs in wider buffers
        between = c * sum(group.columns for group in groups(plan, layer)) + fused_outputs(layer, plan, batch)
    copied = plan.fused == "augmented" or (plan.fused == "off" and plan.adapter != c)
    out = c * layer.query if plan.targets and copied else 0
    again = c * (2 * h + layer.inner) if plan.lean and plan.fused != "augmented" else 0
    normed = 1 if layer.experts and not layer.inner else 2  # nothing saves the input of frozen experts
    kept = (2 * plan.stream + normed * c) * h + before + attention(layer, plan, batch) + out + middle
    return kept + scales + between - again


def saved(layer: Layer, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return the bytes that one layer saves for the whole batch, without gradient checkpointing."""
    if plan.compiled:
        each = compiled(layer, plan, batch)
    else:
        each = norms(layer, plan) + linear_inputs(layer, plan) + attention(layer, plan, batch)
        each += inside(layer, plan) + fused_outputs(layer, plan, batch)
        each += before_rotation(layer, plan) if plan.triton and not layer.head_norms else 0
    if plan.whole_mlp and not plan.lean:  # silu(gate) * up is recomputed (kernels/adapted_swiglu.py)
        each -= plan.compute * layer.inner
    return each * batch.tokens + expert_copies(layer, plan)


def unsaved(layer: Layer, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return the bytes that the first layer does not save if the embedding is frozen.

    The tensors before the first adapter do not need a gradient."""
    if plan.full or plan.checkpointing != "off" or plan.compiled:
        return 0.0
    before = [linear for linear in layer.reached(plan.targets) if linear.part == "attention"]
    ahead = [norm for norm in layer.norms[:1] if norm.position == "stream"]
    each = 0.0
    if all(linear.reads.startswith("attention") for linear in before):
        ahead += [norm for norm in layer.norms if norm.position == "head"]
        each += attention(layer, plan, batch)
    return (each + norms(layer, plan, ahead)) * batch.tokens

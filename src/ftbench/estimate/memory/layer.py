"""Compute the bytes that one decoder layer saves for the backward pass.

Bytes per position of the batch, unless noted otherwise. Notation: h hidden, q and k widths of queries and keys, i
width of the MLP; s, p, c bytes of an element of the residual stream, of a product, and of the compute type. The
default source is the tensors that autograd saves in the modules of transformers 5.17 under peft 0.21 and autocast,
read with torch.autograd.graph.saved_tensors_hooks."""

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
    """Return the bytes that norms save. Each saves its input in float32 (4 h) and a scale (4).

    A trained norm also saves its normalized input, in the type that its weight multiplies. A LayerNorm in Python saves
    its centered input twice. Liger (LigerRMSNormFunction) and unsloth save the input in its own type. For the norms
    before attention and MLP, this is the residual stream. Our kernels recompute the scale (kernels/rms_norm.py).

    Args:
        layer: The decoder layer.
        plan: How it is trained.
        of: The norms to count, by default all of the layer."""
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
    """Return the bytes that an eager norm saves twice, because two of its operations save the same float32 input.

    When a tensor is saved first, trl's activation offloading moves it to host memory. When the same tensor is saved
    again, it stays on the GPU (activation_offloading.py, deduplication of storages)."""
    if plan.norms_keep_inputs or plan.compiled:
        return 0.0
    return float(FLOAT * sum(norm.width for norm in layer.norms))


def adapter_input(plan: TrainingPlan, linear: Linear) -> float:
    """Return the bytes that the adapters of one matrix save: their input, and its product with A (r numbers).

    peft casts the input to the adapters' type and autocast casts it back to the product's type, so each matrix saves
    its own copy. The copy is shared only if the input already has the adapters' type (a quantized model's o)."""
    shared = linear.reads == "attention" and plan.adapter == plan.compute
    copy = 0 if shared or plan.casts_nothing else plan.compute * linear.inputs
    return copy + plan.compute * plan.rank


def distinct(linears: Sequence[Linear]) -> int:
    """Return the widths of the distinct inputs of linear layers, without the input of o_proj, which attention saves."""
    return sum({each.reads: each.inputs for each in linears if each.reads != "attention"}.values())


def linear_inputs(layer: Layer, plan: TrainingPlan) -> float:
    """Return the bytes of the inputs that the layer's matrices save.

    Trained matrices save the input in the product's type. Matrices that read the same input share it, unless
    autocast casts a float32 input for each. Frozen matrices save only the inputs of their adapters. unsloth saves
    one input for q, k, v and one for gate, up (LoRA_QKV, LoRA_MLP), and so does fused_lora. Products in 8 bits do
    not save their inputs, because their backward pass reads only the transposed weight."""
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

    `augmented` saves a buffer with a copy of the input and the product with A. `separate` saves the input (cast if it
    has another type) and the product with A. Attention's output is saved already and needs no copy."""
    if plan.fused == "augmented":
        return plan.compute * sum(group.inputs + group.columns for group in groups(plan, layer))
    widths = sum(group.inputs for group in groups(plan, layer) if group.reads != "attention")
    return plan.compute * (widths + plan.rank * plan.adapted(layer))


def fused_outputs(layer: Layer, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return the additional bytes that stay because the outputs of a group are parts of one buffer. The buffer stays as
    long as one of its parts is saved.

    For gate and up, the unused columns stay. For queries, keys and values, the unused columns stay, and also queries
    and keys before rotation if attention saves the values. If values are repeated for each query head, attention
    saves a copy of them. The buffer then stays only if a compiled head norm saves queries and keys before rotation,
    and its values count too. Our kernel copies the values and always saves the buffer (kernels/rotary.py)."""
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
    """Return the name of a layer's attention kernel. It is `masked` for sdpa with a mask. sdpa needs one if the sliding
    window is shorter than the rows."""
    slides = layer.window is not None and batch.length > layer.window and not plan.unsloth
    return "masked" if plan.attention == "sdpa" and slides else plan.attention


def repeats(layer: Layer, plan: TrainingPlan, batch: BatchShape) -> bool:
    """Return whether keys and values are repeated for each query head before attention."""
    repeating = kernel(layer, plan, batch) in ("masked", "varlen") and layer.kv_heads != layer.heads
    return repeating and not layer.sinks  # kernels/sink_attention.py


def attention(layer: Layer, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return the bytes that attention saves: queries, keys, values, output, and a float32 number per head.

    With a mask, sdpa repeats keys and values for each query head (transformers, use_gqa_in_sdpa) and saves the mask
    in the product's type, rows x length^2 per layer. varlen of torch 2.11 also repeats keys and values. Eager
    attention saves one attention weight per head and pair of positions, once in float32 and once in the product's
    type. gpt_oss saves it only in the product's type, including the sink. unsloth rotates queries and keys into new
    tensors and keeps both versions. If values are part of a wider product, the product stays, unless the values are
    repeated."""
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
    """Return the bytes of queries and keys before rotation, outside the buffers that `fused_outputs` counts.

    A compiled head norm recomputes its result from them. Our kernel always saves them, and also the values if the
    projections are one product."""
    together = plan.fused == "augmented" and plan.targets >= _PROJECTIONS
    if together or not (layer.head_norms or plan.triton):
        return 0.0
    return plan.compute * (layer.query + layer.key + (layer.key if plan.joined else 0))


def mlp(layer: Layer, plan: TrainingPlan) -> float:
    """Return the bytes that a gated MLP saves: gate, its activation and up, 3 i in the product's type.

    Liger's SwiGLU, unsloth's and our kernels recompute the activation and save 2 i."""
    return plan.product * (2 if plan.norms_keep_inputs else 3) * layer.inner


def experts(layer: Layer, plan: TrainingPlan) -> float:
    """Return the bytes that fused experts save through grouped products (transformers, grouped_mm_experts_forward).

    For each of the `active` experts per token, these are gate and up (2 i), the operands of the gate function, the
    output (h) that the routing weight multiplies, and indices. The operands are i for silu and 4 i for gpt_oss's
    clamped function; compiled layers recompute them. Trained experts also save their inputs, h and i."""
    moe = layer.experts
    if moe is None:
        return 0.0
    h, i, c = layer.hidden, moe.inner, plan.compute
    inputs = h + i if plan.full or "experts" in plan.targets else 0
    gate = 0 if plan.compiled else 4 * i if moe.clamped else i
    return moe.active * (c * (2 * i + gate + h + inputs) + 3 * INDEX + 3)


def router(layer: Layer, plan: TrainingPlan) -> float:
    """Return the bytes that the router saves: float32 probabilities of all experts and indices of the chosen
    experts. gpt_oss normalizes only the chosen experts. A trained router also saves its input, if no other operation
    does."""
    moe = layer.experts
    if moe is None:
        return 0.0
    probabilities = plan.compute * moe.active if moe.router == "chosen" else FLOAT * moe.count
    own = plan.full and not layer.inner
    return probabilities + INDEX * moe.active + (plan.compute * layer.hidden if own else 0)


def inside(layer: Layer, plan: TrainingPlan) -> float:
    """Return the bytes that the second half of a layer saves: its MLP or its experts, and the router."""
    return (mlp(layer, plan) if layer.inner else 0.0) + experts(layer, plan) + router(layer, plan)


def expert_copies(layer: Layer, plan: TrainingPlan) -> float:
    """Return the bytes of the copies of the experts' weights in one layer, for all positions together.

    peft adds the adapters' product to a copy of the weights in each forward pass (ParamWrapper). autograd saves the
    copy and the cast adapters."""
    moe = layer.experts
    if moe is None or "experts" not in plan.targets:
        return 0.0
    adapters = plan.compute * plan.rank * expert_adapter(layer) * moe.count
    if plan.packed_experts or plan.fused != "off":  # two thin products (kernels/expert_products.py)
        return adapters
    return plan.weight * layer.expert_matrices + adapters


def compiled(layer: Layer, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return the bytes that a compiled layer saves.

    Inductor's partitioner recomputes norms, rotation and activation from products. It keeps both residual streams, both
    normalized inputs, queries and keys before and after rotation, values, attention's output, the output as o reads it
    (the same tensor with `separate` adapters or in their type), gate, up and their product. Our kernels keep no scales.
    A lean layer also recomputes the normalized inputs and the product of gate and up, unless they are in the buffers of
    `augmented`."""
    h, c = layer.hidden, plan.compute
    before = before_rotation(layer, plan)
    middle = c * 3 * layer.inner + experts(layer, plan) + router(layer, plan)
    scales = 0 if plan.triton else FLOAT * (2 + layer.heads + layer.kv_heads)
    between = float(c * plan.rank * plan.adapted(layer))
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
    """Return the bytes that the first layer does not save if the embedding is frozen. These tensors come before the
    first adapter, so they do not need a gradient."""
    if plan.full or plan.checkpointing != "off" or plan.compiled:
        return 0.0
    before = [linear for linear in layer.reached(plan.targets) if linear.part == "attention"]
    ahead = [norm for norm in layer.norms[:1] if norm.position == "stream"]
    each = 0.0
    if all(linear.reads.startswith("attention") for linear in before):
        ahead += [norm for norm in layer.norms if norm.position == "head"]
        each += attention(layer, plan, batch)
    return (each + norms(layer, plan, ahead)) * batch.tokens

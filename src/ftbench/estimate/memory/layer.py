"""Compute the bytes that one decoder layer saves for the backward pass.

Results are in bytes per token of the batch, unless a docstring names another unit. Padding counts as tokens. Formulas
follow the tensors that autograd saves in the modules of transformers 5.17, under peft 0.21 and autocast. The tensors
were recorded with torch.autograd.graph.saved_tensors_hooks. Other sources are named."""

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
    """Return the bytes per token that norms save. An eager norm saves its input and one scale per group in float32.

    A trained norm also saves its normalized input. A LayerNorm in Python code saves its centered input twice. The
    kernels of Liger (LigerRMSNormFunction), unsloth and ftbench save the input without a cast to float32. ftbench's
    kernels recompute the scale (kernels/rms_norm.py). `of` are the norms to count (default: all norms of the layer)."""
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
    """Return the bytes per token of norm inputs that trl's activation offloading leaves on the GPU.

    Two operations of an eager norm save its float32 input. trl moves the first saved tensor to host memory. The second
    saved tensor has the same storage and stays on the GPU (activation_offloading.py, deduplication of storages)."""
    if plan.norms_keep_inputs or plan.compiled:
        return 0.0
    return float(FLOAT * sum(norm.width for norm in layer.norms))


def adapter_input(plan: TrainingPlan, linear: Linear) -> float:
    """Return the bytes per token that a LoRA adapter saves: its input x, and `lora_A(x)` with `rank` elements.

    peft casts x to the dtype of the adapter, and autocast casts the result back to the compute dtype. Therefore each
    matrix saves a separate copy of x. If x already has the dtype of the adapter, no copy is needed. This is the case
    for the input of o_proj in a quantized model."""
    shared = linear.reads == "attention" and plan.adapter == plan.compute
    copy = 0 if shared or plan.casts_nothing else plan.compute * linear.inputs
    return copy + plan.compute * plan.rank


def distinct(linears: Sequence[Linear]) -> int:
    """Return the summed widths of distinct linear layer inputs, without the input of o_proj (saved by attention)."""
    return sum({each.reads: each.inputs for each in linears if each.reads != "attention"}.values())


def linear_inputs(layer: Layer, plan: TrainingPlan) -> float:
    """Return the bytes per token of the inputs that linear layers save.

    Trained linear layers save their input in the compute dtype. Linear layers with the same input share one saved
    tensor. If autocast casts a float32 input, each layer saves a separate copy. Frozen linear layers save only the
    inputs of their adapters. unsloth (LoRA_QKV, LoRA_MLP) and fused_lora save one input for q, k and v, and one input
    for gate and up. 8-bit products do not save inputs, because their backward pass reads only the weight."""
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
    """Return the bytes per token of the inputs that fused_lora saves for its groups (kernels/adapter_products.py).

    The layers of a group share an input x. `augmented` saves one buffer that contains x and `lora_A(x)`. `separate`
    saves x and `lora_A(x)` in the compute dtype. For o_proj, `separate` does not save x, because attention already
    saves x."""
    if plan.fused == "augmented":
        return plan.compute * sum(group.inputs + group.columns for group in groups(plan, layer))
    widths = sum(group.inputs for group in groups(plan, layer) if group.reads != "attention")
    return plan.compute * (widths + plan.rank * plan.adapted(layer))


def fused_outputs(layer: Layer, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return the additional bytes per token that fused_lora keeps because layer outputs are views of one buffer.

    The complete buffer stays in memory while one view is saved. Each buffer has extra columns (`Group.columns`) for the
    backward pass. The buffer of q, k and v also contains unrotated q and k. If attention saves v as a view, this buffer
    stays. If attention saves a copy of v (repeated for each query head), the buffer stays only if a compiled norm of
    queries and keys, or ftbench's rotary kernel, saves a view (kernels/rotary.py)."""
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
    """Return the bytes per token that attention saves: q, k, v, the output, and one float32 number per head.

    With a mask, sdpa repeats k and v for each query head (transformers, use_gqa_in_sdpa). The saved mask has the shape
    `(rows, length, length)` and the compute dtype. varlen of torch 2.11 also repeats k and v. Eager attention saves the
    attention weights (`heads * length` elements per token) in float32 and in the compute dtype. gpt_oss saves the
    weights only in the compute dtype, with one more element per head for the sink. unsloth keeps q and k before and
    after the rotary embedding. If v is a view of a wider tensor, the complete tensor stays. Repeated v is a copy."""
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
    """Return the bytes per token of unrotated queries and keys, which are saved in addition to the rotated ones.

    A compiled norm of queries and keys saves its input and recomputes its output. ftbench's rotary kernel also saves
    unrotated tensors, and v if one product computes q, k and v. Tensors in `fused_outputs` are not included."""
    together = plan.fused == "augmented" and plan.targets >= _PROJECTIONS
    if together or not (layer.head_norms or plan.triton):
        return 0.0
    return plan.compute * (layer.query + layer.key + (layer.key if plan.joined else 0))


def mlp(layer: Layer, plan: TrainingPlan) -> float:
    """Return the bytes per token that a gated MLP saves: gate, silu(gate), and up.

    The kernels of Liger, unsloth and ftbench recompute silu(gate) and save only gate and up."""
    return plan.product * (2 if plan.norms_keep_inputs else 3) * layer.inner


def experts(layer: Layer, plan: TrainingPlan) -> float:
    """Return the bytes per token that fused experts save (transformers, grouped_mm_experts_forward).

    h is the hidden size, and i is the width of one expert. Each active expert saves gate and up (`2 * i` elements),
    tensors of the gate function, the expert's output before the multiplication by the routing weight (h elements), and
    indices. The gate function silu saves i elements, and gpt_oss's clamped function `4 * i` elements. Compiled layers
    recompute the tensors of the gate function. Trained experts save the inputs of their products (`h + i` elements)."""
    moe = layer.experts
    if moe is None:
        return 0.0
    h, i, c = layer.hidden, moe.inner, plan.compute
    inputs = h + i if plan.full or "experts" in plan.targets else 0
    gate = 0 if plan.compiled else 4 * i if moe.clamped else i
    return moe.active * (c * (2 * i + gate + h + inputs) + 3 * INDEX + 3)


def router(layer: Layer, plan: TrainingPlan) -> float:
    """Return the bytes per token that the router saves: float32 probabilities of all experts, and the chosen indices.

    gpt_oss saves only the probabilities of the chosen experts. A trained router also saves its input, if the layer does
    not have an MLP that already saves this input."""
    moe = layer.experts
    if moe is None:
        return 0.0
    probabilities = plan.compute * moe.active if moe.router == "chosen" else FLOAT * moe.count
    own = plan.full and not layer.inner
    return probabilities + INDEX * moe.active + (plan.compute * layer.hidden if own else 0)


def inside(layer: Layer, plan: TrainingPlan) -> float:
    """Return the bytes per token that the MLP, the experts and the router of a layer save."""
    return (mlp(layer, plan) if layer.inner else 0.0) + experts(layer, plan) + router(layer, plan)


def expert_copies(layer: Layer, plan: TrainingPlan) -> float:
    """Return the bytes of the expert weight copies that LoRA on experts saves in one layer, for any number of tokens.

    In each forward pass, peft adds the product of A and B to a copy of the expert weights (ParamWrapper). autograd
    saves this copy, and the adapters in the compute dtype."""
    moe = layer.experts
    if moe is None or "experts" not in plan.targets:
        return 0.0
    adapters = plan.compute * plan.rank * expert_adapter(layer) * moe.count
    if plan.packed_experts or plan.fused != "off":  # two thin products (kernels/expert_products.py)
        return adapters
    return plan.weight * layer.expert_matrices + adapters


def compiled(layer: Layer, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return the bytes per token that a compiled layer saves.

    Inductor recomputes norms, rotary embedding and activation function. The layer saves the residual stream and its
    normalized values before attention and before the MLP. Attention saves q, k, v and its output. If o_proj needs
    another dtype or layout, attention also saves a copy of its output. The MLP saves gate, up and silu(gate) * up.
    Norms save float32 scales, except in ftbench's kernels. With `compile: lean`, the layer also recomputes the
    normalized values and silu(gate) * up. The `augmented` buffers of fused_lora contain these tensors, so `lean` then
    saves no memory."""
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
    """Return the bytes that one layer saves for the complete batch, without gradient checkpointing."""
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
    """Return the bytes that the first layer does not save for the batch, because the embedding is frozen.

    Tensors before the first adapter do not require a gradient."""
    if plan.full or plan.checkpointing != "off" or plan.compiled:
        return 0.0
    before = [linear for linear in layer.reached(plan.targets) if linear.part == "attention"]
    ahead = [norm for norm in layer.norms[:1] if norm.position == "stream"]
    each = 0.0
    if all(linear.reads.startswith("attention") for linear in before):
        ahead += [norm for norm in layer.norms if norm.position == "head"]
        each += attention(layer, plan, batch)
    return (each + norms(layer, plan, ahead)) * batch.tokens

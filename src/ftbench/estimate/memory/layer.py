"""What one decoder layer saves for the backward pass.

Counted for one position of the batch, in bytes, unless said otherwise. Notation: h hidden, q and k width of queries and
of keys, i width of the MLP; s, p, c bytes of the residual stream, of a product and of the type products are made in.
Source, unless another is named: what autograd saves in transformers 5.17's modules under peft 0.21 and autocast, read
with torch.autograd.graph.saved_tensors_hooks.
"""

from collections.abc import Sequence

from ftbench.estimate.memory.weights import groups
from ftbench.estimate.workload.largest import BatchShape
from ftbench.estimate.workload.plan import Attention, TrainingPlan
from ftbench.estimate.workload.trainable import expert_adapter
from ftbench.families.shape import Layer, Linear, Norm

FLOAT = 4
INDEX = 8
CHUNK = 64  # positions that torch's gated delta rule computes together
_STREAM = ("input", "mlp input")  # what linear layers read of the residual stream, normed
_PROJECTIONS = {"q_proj", "k_proj", "v_proj"}


def norms(layer: Layer, plan: TrainingPlan, of: Sequence[Norm] | None = None) -> float:
    """Return what a layer's norms save (or some of them): each its input in float32 (4 h) and a scale (4); a trained
    one what it normed, in the type that its weight is multiplied in. A LayerNorm written out saves its centred input
    twice. Liger's saves the input as it is, which before the attention and the MLP is the residual stream itself
    (LigerRMSNormFunction), and unsloth's likewise; our kernels make the scale again (kernels/rms_norm.py)."""
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
    """Return what two operations of an eager norm save, its input in float32. trl's offloading moves what is saved
    first and keeps on the GPU what is saved again (activation_offloading.py, the deduplication of storages)."""
    if plan.norms_keep_inputs or plan.compiled:
        return 0.0
    return float(FLOAT * sum(norm.width for norm in layer.norms))


def adapter_input(plan: TrainingPlan, linear: Linear) -> float:
    """Return what the adapters of one matrix save: their input, cast to the type of the product, and r numbers between
    the two matrices. peft casts the input to the adapters' type and autocast casts it back, so each matrix saves a copy
    of its own; only where the input has the adapters' type already (o under a quantised model) is it shared."""
    shared = linear.reads == "attention" and plan.adapter == plan.compute
    copy = 0 if shared or plan.casts_nothing else plan.compute * linear.inputs
    return copy + plan.compute * plan.rank


def distinct(linears: Sequence[Linear]) -> int:
    """Return the widths of the inputs of some linear layers, each counted once; the attention's output is saved by the
    attention itself."""
    return sum({each.reads: each.inputs for each in linears if each.reads != "attention"}.values())


def linear_inputs(layer: Layer, plan: TrainingPlan) -> float:
    """Return what the layer's matrices save of their inputs. Trained ones save it in the type of the product, shared by
    those that read the same, unless autocast casts a float32 one for each; frozen ones save nothing but what adapters
    save. unsloth saves one input for q, k, v and one for gate, up (LoRA_QKV, LoRA_MLP), and fused_lora likewise.
    Products in 8 bits save none: their backward pass reads the turned weight alone."""
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
    """Return what fused_lora saves of a group's input (kernels/adapter_products.py). `augmented`: a copy, and
    beside it the product with A. `beside`: the input, cast where it has another type, and the product with A; the
    attention's output, which is saved already, needs no copy."""
    if plan.fused == "augmented":
        return plan.compute * sum(group.inputs + group.columns for group in groups(plan, layer))
    widths = sum(group.inputs for group in groups(plan, layer) if group.reads != "attention")
    return plan.compute * (widths + plan.rank * plan.adapted(layer))


def fused_outputs(layer: Layer, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return what is kept because a group's outputs are parts of one buffer, beside those of them that are saved: of
    gate and up the columns left free; of queries, keys and values those too, and queries and keys as they came, where
    attention saves the values themselves. Repeated values are a copy: then the buffer stays only where a compiled norm
    of heads saves queries and keys as they came, and the values in it come on top. Our kernel copies the values, too,
    and always saves the buffer (kernels/rotary.py)."""
    if plan.fused != "augmented":
        return 0.0
    copied = plan.triton or repeats(layer, plan, batch)
    kept = plan.triton or (plan.compiled and layer.head_norms)
    freed = copied and not kept
    columns = sum(
        group.columns for group in groups(plan, layer)
        if group.outputs != layer.hidden and not (freed and group.reads == "input")
    )  # fmt: skip
    before = layer.query + layer.key + (layer.value if copied else 0)
    return plan.compute * (columns + (0 if freed or not plan.targets >= _PROJECTIONS else before))


def kernel(layer: Layer, plan: TrainingPlan, batch: BatchShape) -> Attention:
    """Return what computes the layer's attention: a sliding window that is shorter than the rows is a mask for sdpa."""
    slides = layer.window is not None and batch.length > layer.window and not plan.unsloth
    return "masked" if plan.attention == "sdpa" and slides else plan.attention


def repeats(layer: Layer, plan: TrainingPlan, batch: BatchShape) -> bool:
    """Return whether attention is given keys and values repeated for each query head."""
    repeating = kernel(layer, plan, batch) in ("masked", "varlen") and layer.kv_heads != layer.heads
    return repeating and not layer.sinks  # kernels/sink_attention.py


def attention(layer: Layer, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return what the attention product saves: queries, keys, values and output, and a float32 number a head (flash
    kernels).

    A mask makes sdpa repeat keys and values for each query head (transformers, use_gqa_in_sdpa) and save the mask in
    the product's type, rows x length^2 a layer; torch 2.11's varlen repeats them too. Eager attention keeps the
    weights, float32 and cast, for each head and pair of positions; gpt_oss keeps them once, with a sink, in the
    product's type. unsloth rotates queries and keys into new tensors and keeps both. Values that are a part of a wider
    product keep it whole, unless they are repeated.
    """
    if layer.delta:
        return delta(layer, plan, batch)
    c, scores, by = plan.compute, float(layer.heads * batch.length), kernel(layer, plan, batch)
    gate = c * layer.output if layer.gated_heads else 0
    if by == "eager":
        output = layer.output if plan.full or plan.adapter == c else 0  # only where o reads it as it is
        weights = c * (scores + layer.heads) + INDEX * layer.heads if layer.sinks else (FLOAT + c) * scores
        weights += 2 * c * scores if layer.softcap else 0
        return c * (layer.query + 2 * layer.output + output) + weights + gate
    spread = layer.query + layer.output
    if not repeats(layer, plan, batch):
        spread = layer.key + layer.value + layer.fused_values
    mask = c * batch.length if by == "masked" else 0
    before = c * (layer.query + layer.key) if plan.unsloth else 0
    return c * (layer.query + layer.output + spread) + before + FLOAT * layer.heads + mask + gate


def before_rotation(layer: Layer, plan: TrainingPlan) -> float:
    """Return what is kept of queries and keys as they came, but in the buffers that `fused_outputs` counts: a compiled
    norm of heads makes itself again from them; our kernel saves them always, and with them the values where the
    projections are one product."""
    together = plan.fused == "augmented" and plan.targets >= _PROJECTIONS
    if together or not (layer.head_norms or plan.triton):
        return 0.0
    return plan.compute * (layer.query + layer.key + (layer.value if plan.joined else 0))


def delta(layer: Layer, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return what linear attention by the gated delta rule saves in torch's own chunks of 64 positions (transformers,
    causal_conv1d_fn, torch_chunk_gated_delta_rule and the gated norm behind it); kernels of other packages keep less.

    Of queries and keys (a elements, of as many heads as values) and of values (b), in float32: queries and keys before
    and after their norm, keys times beta, values as they came; both solutions of the triangular system. In the
    products' type: what each chunk multiplies, the first and the last less. Squares of a chunk: decays, the system and
    both products, one of them cast. States: one a chunk in float32 and cast twice."""
    net = layer.delta
    assert net is not None
    c, heads = plan.compute, net.value_heads
    a, b = heads * net.key_dim, heads * net.value_dim
    chunks = -(-batch.length // CHUNK)
    inner = (chunks - 1) / chunks
    singles = FLOAT * (6 * a + 2 * b)
    multiplied = c * (4 * a + b + inner * (3 * a + b))
    squares = heads * CHUNK * (2 * FLOAT + 3 * c)
    states = inner * heads * net.key_dim * net.value_dim / CHUNK * (FLOAT + 2 * c)
    norm = (3 * FLOAT + (2 if plan.full else 1) * c) * b + FLOAT * heads
    convolution = c * net.convolved * (2 + (net.kernel - 1) / batch.length)
    return singles + multiplied + squares + states + norm + convolution + (7 * FLOAT + c) * heads


def mlp(layer: Layer, plan: TrainingPlan) -> float:
    """Return what a gated MLP saves: gate, its activation, and up, 3 i in the product's type; 2 i where Liger's SwiGLU,
    unsloth's and ours make the activation again. A gate of the whole keeps what it multiplies."""
    gated = plan.compute * (layer.hidden + 1) if layer.gated_expert else 0
    return plan.product * (2 if plan.norms_keep_inputs else 3) * layer.inner + gated


def experts(layer: Layer, plan: TrainingPlan) -> float:
    """Return what fused experts save through grouped products (transformers, grouped_mm_experts_forward), for each of
    the `active` experts a token visits: gate and up together (2 i), what the gate function keeps (i of silu; 4 i of
    gpt_oss's clamped one), the output (h) that the routing weight multiplies, and indices; where experts are trained
    their inputs, h and i, too."""
    moe = layer.experts
    if moe is None:
        return 0.0
    h, i, c = layer.hidden, moe.inner, plan.compute
    inputs = h + i if plan.full or "experts" in plan.targets else 0
    return moe.active * (c * (2 * i + (4 * i if moe.clamped else i) + h + inputs) + 3 * INDEX + 3)


def router(layer: Layer, plan: TrainingPlan) -> float:
    """Return what the router saves: probabilities of all experts in float32 (gpt_oss normalises the chosen ones alone),
    the chosen ones' indices, and the input where the router is trained and nothing else saves it."""
    moe = layer.experts
    if moe is None:
        return 0.0
    probabilities = plan.compute * moe.active if moe.router == "chosen" else FLOAT * moe.count
    own = plan.full and (not layer.inner or moe.router == "sigmoid")  # sigmoid: cast to float32 and back
    return probabilities + INDEX * moe.active + (plan.compute * layer.hidden if own else 0)


def inside(layer: Layer, plan: TrainingPlan) -> float:
    """Return what the second half of a layer saves: its MLP or its experts, and what chooses them."""
    return (mlp(layer, plan) if layer.inner else 0.0) + experts(layer, plan) + router(layer, plan)


def expert_copies(layer: Layer, plan: TrainingPlan) -> float:
    """Return bytes of a layer, not of a position: peft adds the adapters' product to a copy of the experts' weights in
    each forward pass (ParamWrapper), and autograd saves the copy and the adapters as they were cast."""
    moe = layer.experts
    if moe is None or "experts" not in plan.targets:
        return 0.0
    adapters = plan.compute * plan.rank * expert_adapter(layer) * moe.count
    if plan.mxfp4 or plan.fused != "off":  # two thin products beside the frozen one (kernels/expert_products.py)
        return adapters
    return plan.weight * layer.expert_matrices + adapters


def compiled(layer: Layer, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return what a compiled layer saves. Inductor's partitioner makes again what is cheap: norms, rotation, the
    activation are made from what products put out (and our kernels keep no scales). Left are the two residual streams,
    the two normed inputs, queries and keys before and after rotation, values, the attention's output as it is and as o
    reads it (which with adapters `beside`, or in its type, is the same), gate, up and their product. A lean one makes
    the normed inputs and that product again, too, but where they lie in the buffers of `augmented`."""
    h, c = layer.hidden, plan.compute
    before = before_rotation(layer, plan)
    middle = c * 3 * layer.inner + experts(layer, plan) + router(layer, plan)
    scales = 0 if plan.triton else FLOAT * (2 + layer.heads + layer.kv_heads)
    between = float(c * plan.rank * plan.adapted(layer))
    if plan.fused == "augmented":  # the inputs and outputs above, in buffers that are wider
        between = c * sum(group.columns for group in groups(plan, layer)) + fused_outputs(layer, plan, batch)
    copied = plan.fused == "augmented" or (plan.fused == "off" and plan.adapter != c)
    out = c * layer.output if plan.targets and copied else 0
    again = c * (2 * h + layer.inner) if plan.lean and plan.fused != "augmented" else 0
    kept = (2 * plan.stream + 2 * c) * h + before + attention(layer, plan, batch) + out + middle
    return kept + scales + between - again


def saved(layer: Layer, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return the bytes that one layer without checkpointing saves for the whole batch."""
    if plan.compiled:
        each = compiled(layer, plan, batch)
    else:
        each = norms(layer, plan) + linear_inputs(layer, plan) + attention(layer, plan, batch)
        each += inside(layer, plan) + fused_outputs(layer, plan, batch)
        each += before_rotation(layer, plan) if plan.triton and not layer.head_norms else 0
    if plan.whole_mlp and not plan.lean:  # silu(gate) * up is made again (kernels/adapted_swiglu.py)
        each -= plan.compute * layer.inner
    return each * batch.tokens + expert_copies(layer, plan)


def unsaved(layer: Layer, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return the bytes that the first layer does not save beside a frozen embedding: none before its first adapter."""
    if plan.full or plan.checkpointing != "off" or plan.compiled:
        return 0.0
    reached = layer.reached(plan.targets)
    before = [linear for linear in reached if linear.part == "attention"]
    ahead = [norm for norm in layer.norms[:1] if norm.position == "stream"]
    each = 0.0
    if all(linear.reads.startswith("attention") for linear in before):
        ahead += [norm for norm in layer.norms if norm.position in ("head", "product")]
        each += attention(layer, plan, batch)
    if not before and "experts" not in plan.targets:
        ahead += [norm for norm in layer.norms[1:] if norm.position in ("stream", "after")][:1]
        each += experts(layer, plan) + router(layer, plan)
        each += mlp(layer, plan) if all(linear.name == "down_proj" for linear in reached) else 0.0
    return (each + norms(layer, plan, ahead)) * batch.tokens

"""Activations of one decoder layer: what each part saves for the backward pass, and what it needs for a moment.

Counted for one position of the batch, in bytes, unless said otherwise. Notation: h hidden, q and k width of queries and
of keys, i width of the MLP; s, p, c bytes of the residual stream, of a product and of the type products are made in.
Source, unless another is named: what autograd saves in transformers 5.17's modules under peft 0.21 and autocast, read
with torch.autograd.graph.saved_tensors_hooks.
"""

from __future__ import annotations

from ftbench.estimate.memory.model import ModelShape
from ftbench.estimate.memory.recipe import Batch, Recipe
from ftbench.estimate.memory.weights import groups

FLOAT = 4
INDEX = 8


def norms(model: ModelShape, recipe: Recipe) -> float:
    """The two RMS norms of a layer: each saves its input in float32 (4 h) and a scale (4); a trained one its normed
    input too, in the stream's type (gpt_oss multiplies in float32). Liger's saves the input as it is, which is the
    residual stream itself (LigerRMSNormFunction), and unsloth's likewise."""
    if recipe.liger or recipe.unsloth:
        return 2 * (recipe.stream * model.hidden + FLOAT)
    normed = (FLOAT if model.family == "gpt_oss" else recipe.stream) if recipe.full else 0
    return 2 * ((FLOAT + normed) * model.hidden + FLOAT)


def head_norms(model: ModelShape, recipe: Recipe) -> float:
    """Norms of queries and keys by head (qwen3): as `norms`, on q + k elements and a scale for each head."""
    if not model.qk_norm:
        return 0.0
    width, scales = model.query + model.key, FLOAT * (model.heads + model.kv_heads)
    if recipe.liger or recipe.unsloth:
        return recipe.product * width + scales
    return (FLOAT + (recipe.product if recipe.full else 0)) * width + scales


def saved_twice(model: ModelShape, recipe: Recipe) -> float:
    """Bytes of a position in a layer: what two operations of an eager norm save, its input in float32. trl's offloading
    moves what is saved first and keeps on the GPU what is saved again (activation_offloading.py, the deduplication of
    storages)."""
    if recipe.liger or recipe.unsloth or recipe.compiled:
        return 0.0
    return FLOAT * (2 * model.hidden + (model.query + model.key if model.qk_norm else 0))


def adapter_input(recipe: Recipe, name: str, width: int) -> float:
    """What the adapters of one matrix save: their input, cast to the type of the product, and r numbers between the two
    matrices. peft casts the input to the adapters' type and autocast casts it back, so each matrix saves a copy of its
    own; only where the input has the adapters' type already (o under a quantised model) is it shared."""
    if name not in recipe.targets:
        return 0.0
    shared = name == "o" and recipe.adapter == recipe.compute
    copy = 0 if shared or (recipe.adapter == recipe.stream == recipe.compute) else recipe.compute * width
    return copy + recipe.compute * recipe.rank


def linear_inputs(model: ModelShape, recipe: Recipe) -> float:
    """What the layer's matrices save of their inputs. Trained ones save it in the type of the product, shared by those
    that read the same, unless autocast casts a float32 one for each; frozen ones save nothing but what adapters save.
    unsloth saves one input for q, k, v and one for gate, up (LoRA_QKV, LoRA_MLP), and fused_lora likewise. Products in
    8 bits save none: their backward pass reads the turned weight alone."""
    h, i = model.hidden, model.inner
    dense = not model.experts
    if recipe.unsloth:
        return recipe.compute * (2 * h + recipe.rank * len(recipe.targets))
    if recipe.fused != "off":
        return fused_inputs(model, recipe)
    if recipe.full:
        cast = recipe.autocast and recipe.stream > recipe.compute
        reads = (3 + 2 * dense) * h if cast else (1 + dense) * h
        return recipe.compute * (reads + (i if dense else 0))
    shared = 0.0
    if recipe.adapter == recipe.stream == recipe.compute:  # nothing is cast: the inputs themselves are saved, once
        shared = recipe.compute * (h if recipe.targets & {"q", "k", "v"} else 0)  # o's is the attention's output
        if dense:
            shared += recipe.compute * (h if recipe.targets & {"gate", "up"} else 0)
            shared += recipe.compute * (i if "down" in recipe.targets else 0)
    return shared + _adapter_inputs(model, recipe)


def fused_inputs(model: ModelShape, recipe: Recipe) -> float:
    """What fused_lora saves of a group's input (worker/adapter_products.py). `augmented`: a copy, and beside it the
    product with A. `beside`: the input, cast where it has another type, and the product with A; the attention's output,
    which is saved already, needs no copy."""
    if recipe.fused == "augmented":
        return recipe.compute * sum(width + room for width, _, room in groups(recipe, model))
    between = recipe.rank * len(recipe.targets)
    shared = {model.query} if "o" in recipe.targets else set()
    return recipe.compute * (sum(width for width, _, _ in groups(recipe, model)) - sum(shared) + between)


def fused_outputs(model: ModelShape, recipe: Recipe) -> float:
    """What is kept because a group's outputs are parts of one buffer: queries and keys as they came, beside the values
    that attention saves, and the columns left free."""
    if recipe.fused != "augmented":
        return 0.0
    rooms = sum(room for width, out, room in groups(recipe, model) if out != model.hidden)
    before = (model.query + model.key) if {"q", "k", "v"} <= recipe.targets else 0
    return recipe.compute * (rooms + before)


def _adapter_inputs(model: ModelShape, recipe: Recipe) -> float:
    widths = {"q": model.hidden, "k": model.hidden, "v": model.hidden, "o": model.query}
    if not model.experts:
        widths |= {"gate": model.hidden, "up": model.hidden, "down": model.inner}
    return sum(adapter_input(recipe, name, width) for name, width in widths.items())


def attention(model: ModelShape, recipe: Recipe, batch: Batch) -> float:
    """What the attention product saves: queries, keys, values and output, and a float32 number a head (flash kernels).

    A mask makes sdpa repeat keys and values for each query head (transformers, use_gqa_in_sdpa) and save the mask in
    the product's type, rows x length^2 a layer; torch 2.11's varlen repeats them too. Eager attention keeps the
    weights, float32 and cast, for each head and pair of positions; gpt_oss keeps them once, with a sink, in the
    product's type. unsloth rotates queries and keys into new tensors and keeps both.
    """
    q, k, c = model.query, model.key, recipe.compute
    scores = float(model.heads * batch.length)
    if recipe.attention == "eager":
        output = q if recipe.full or recipe.adapter == c else 0  # only where o reads it as it is
        weights = (
            c * (scores + model.heads) + INDEX * model.heads if model.family == "gpt_oss" else (FLOAT + c) * scores
        )
        return c * (3 * q + output) + weights
    spread = {"masked": q, "varlen": q}.get(recipe.attention, k)
    mask = c * batch.length if recipe.attention == "masked" else 0
    before = c * (q + k) if recipe.unsloth else 0
    return c * (2 * q + 2 * spread) + before + FLOAT * model.heads + mask


def mlp(model: ModelShape, recipe: Recipe) -> float:
    """A gated MLP saves gate, the activation of gate, and up: 3 i in the product's type. Liger's SwiGLU and unsloth's
    make the activation again in the backward pass: 2 i."""
    return recipe.product * (2 if recipe.liger or recipe.unsloth else 3) * model.inner


def experts(model: ModelShape, recipe: Recipe) -> float:
    """Fused experts through grouped products (transformers, grouped_mm_experts_forward), for each of the `active`
    experts a token visits: gate and up together (2 i), what the gate function keeps (i of silu; 4 i of gpt_oss's
    clamped one), the output (h) that the routing weight multiplies, and indices; where experts are trained their
    inputs, h and i, too."""
    h, i, c = model.hidden, model.inner, recipe.compute
    gate = 4 * i if model.family == "gpt_oss" else i
    inputs = h + i if recipe.full or "experts" in recipe.targets else 0
    return model.active * (c * (2 * i + gate + h + inputs) + 3 * INDEX + 3)


def router(model: ModelShape, recipe: Recipe) -> float:
    """Probabilities of all experts in float32 (qwen3_moe; gpt_oss normalises the chosen ones alone), the chosen ones'
    indices, and the input where the router is trained."""
    probabilities = FLOAT * model.experts if model.family != "gpt_oss" else recipe.compute * model.active
    return probabilities + INDEX * model.active + (recipe.compute * model.hidden if recipe.full else 0)


def expert_copies(model: ModelShape, recipe: Recipe) -> float:
    """Bytes of a layer, not of a position: peft adds the adapters' product to a copy of the experts' weights in each
    forward pass (ParamWrapper), and autograd saves the copy and the adapters as they were cast."""
    if "experts" not in recipe.targets:
        return 0.0
    h, i = model.hidden, model.inner
    adapters = recipe.compute * recipe.rank * (2 * (h + 2 * i) + (i + h))
    if recipe.mxfp4:  # two thin products beside the frozen one (worker/mxfp4.py)
        return model.experts * adapters
    return model.experts * (recipe.weight * 3 * h * i + adapters)


def compiled(model: ModelShape, recipe: Recipe, batch: Batch) -> float:
    """What a compiled layer saves. Inductor's partitioner makes again what is cheap: norms, rotation, the activation
    are made from what products put out. Left are the two residual streams, the two normed inputs, queries and keys
    before and after rotation, values, the attention's output as it is and as o reads it (which with adapters `beside`
    is the same), gate, up and their product."""
    h, q, k, i, c = model.hidden, model.query, model.key, model.inner, recipe.compute
    before = c * (q + k) if model.qk_norm else 0
    inside = c * 3 * i if not model.experts else experts(model, recipe) + router(model, recipe)
    scales = FLOAT * (2 + model.heads + model.kv_heads)
    between = c * recipe.rank * len(recipe.targets)
    if recipe.fused == "augmented":  # the inputs and outputs above, in buffers that are wider
        outs = (room for _, out, room in groups(recipe, model) if out != h)
        between = c * (sum(room for _, _, room in groups(recipe, model)) + sum(outs))
        before = c * (q + k)
    out = c * q if recipe.targets and recipe.fused != "beside" else 0
    return (2 * recipe.stream + 2 * c) * h + before + attention(model, recipe, batch) + out + inside + scales + between


def saved(model: ModelShape, recipe: Recipe, batch: Batch) -> float:
    """Bytes that one layer without checkpointing saves for the whole batch."""
    if recipe.compiled:
        each = compiled(model, recipe, batch)
    else:
        inside = experts(model, recipe) + router(model, recipe) if model.experts else mlp(model, recipe)
        each = norms(model, recipe) + head_norms(model, recipe) + linear_inputs(model, recipe)
        each += attention(model, recipe, batch) + inside + fused_outputs(model, recipe)
    return each * batch.tokens + expert_copies(model, recipe)


def checkpoint(model: ModelShape, recipe: Recipe, batch: Batch) -> float:
    """Bytes that a checkpointed layer saves: its input (Chen et al. 2016). unsloth's own keeps it in host memory; so
    does `offload`, of which `phases` counts the ones on their way."""
    return 0.0 if recipe.checkpointing == "unsloth" else float(recipe.stream * model.hidden * batch.tokens)


def checkpoint_buffers(model: ModelShape, recipe: Recipe, batch: Batch) -> float:
    """Bytes of all layers together: unsloth's own checkpointing copies inputs back into one of two buffers on the GPU,
    which stay, and leaves the last layer's input where it is (unsloth_zoo, gradient_checkpointing.py: GPU_BUFFERS,
    GPU_BUFFERS_B, LAST_GC_INDEX)."""
    return 3.0 * recipe.stream * model.hidden * batch.tokens if recipe.checkpointing == "unsloth" else 0.0


def mlp_hump(model: ModelShape, recipe: Recipe) -> float:
    """The most that one layer's MLP needs at once beyond what is saved.

    Full: gradients of the product, of the activation and of up, less the product that is freed, and the stream.
    Float32 adapters: the product and its float32 copy as down reads it, and five times the stream's width. bfloat16
    adapters on a float32 stream: the gradient through the base, through the adapters, and their sum, less the freed
    input. Compiled: the gradients alone; unsloth: two of them, in place.
    """
    h, i, p, c = model.hidden, model.inner, recipe.product, recipe.compute
    if recipe.unsloth:
        return c * (2 * i + 2 * h)
    if recipe.fused == "augmented" and not recipe.compiled:
        return c * (2 * i + 3 * h)
    if recipe.full or not recipe.targets & {"gate", "up", "down"}:
        return p * (2 if recipe.full else 3) * i + recipe.stream * h
    if recipe.compiled:
        return c * (3 * i + 3 * h)
    if p > recipe.adapter:
        return (3 * p - c) * i + recipe.stream * h
    if recipe.adapter > c:
        return (c + recipe.adapter) * i + 5 * c * h
    return 2 * p * i + 3 * recipe.stream * h


def experts_hump(model: ModelShape, recipe: Recipe) -> float:
    """The most that one layer's experts need at once beyond what is saved: for each visited expert the gradient of the
    output spread out, and put back in order (3 h); gpt_oss's gate function needs 2 i besides."""
    gate = 2 * model.inner if model.family == "gpt_oss" else 0
    return model.active * recipe.compute * (3 * model.hidden + gate)


def attention_hump(model: ModelShape, recipe: Recipe, batch: Batch) -> float:
    """The most that one layer's attention needs at once beyond what is saved: gradients of queries, keys, values and
    output, and for eager attention those of the weights (float32 twice, less the cast ones that are freed; gpt_oss
    twice more in the product's type)."""
    q, k, c = model.query, model.key, recipe.compute
    scores = float(model.heads * batch.length)
    if recipe.attention == "eager":
        return c * 2 * q + scores * (2 * c if model.family == "gpt_oss" else 2 * FLOAT - c)
    spread = {"masked": q, "varlen": q}.get(recipe.attention, k)
    return c * (2 * q + 2 * spread) + (FLOAT * q if model.qk_norm else 0)


def dequantised(model: ModelShape, recipe: Recipe) -> float:
    """The largest matrix back in 16 bits: bitsandbytes dequantises it for its backward product (MatMul4Bit.backward),
    unsloth into a buffer that it keeps (fast_dequantize); gate and up of all experts in MXFP4 (worker/mxfp4.py)."""
    if recipe.mxfp4:
        return float(recipe.compute * model.experts * 2 * model.inner * model.hidden)
    if not recipe.quantised:
        return 0.0
    widest = max(model.query, model.inner if not model.experts else 0)
    return float(recipe.compute * model.hidden * widest)


def fp8_casts(model: ModelShape, recipe: Recipe, batch: Batch) -> float:
    """The widest input on its way to 8 bits: float32 twice, and itself (worker/optimizations/fp8.py, `cast`); a
    compiled layer writes the 8 bits alone."""
    if not recipe.fp8 or model.experts:
        return 0.0
    return float((1 if recipe.compiled else 2 * FLOAT + 1) * model.inner * batch.tokens)


def hump(model: ModelShape, recipe: Recipe, batch: Batch) -> float:
    """Bytes that one layer needs at its worst moment beyond what it saves: in its MLP, or in its attention, which comes
    to its turn when what the MLP saved is not there yet, or is gone."""
    inside = experts_hump(model, recipe) if model.experts else mlp_hump(model, recipe)
    beside = experts(model, recipe) + router(model, recipe) if model.experts else mlp(model, recipe)
    each = max(inside, attention_hump(model, recipe, batch) - beside) * batch.tokens
    copies = (
        0 if recipe.mxfp4 else expert_copies(model, recipe) / 3
    )  # the gradient of gate and up together, when the copy of down is gone
    bits = 0.0 if recipe.unsloth else dequantised(model, recipe)
    casts = fp8_casts(model, recipe, batch)
    return max(each, copies, each / 2 + max(bits, casts))  # dequantised in 16 bits, before gradients add up

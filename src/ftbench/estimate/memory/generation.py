"""Memory of generated completions: transformers' `generate`, and the reference that scores them. In bytes.

Source: tensors alive at the peaks of generation in trl 1.14 under transformers 5.17, on tensors without memory. Nothing
is saved for a backward pass. Bytes of one layer are per position, unless noted otherwise: h hidden, i width of the MLP.
"""

from collections.abc import Sequence

from ftbench.estimate.memory.layer import FLOAT, INDEX, kernel
from ftbench.estimate.memory.transient import dequantised
from ftbench.estimate.workload.largest import BatchShape, Generation
from ftbench.estimate.workload.plan import TrainingPlan
from ftbench.families.shape import Layer, ModelShape

CACHE = "keys and values"


def phases(model: ModelShape, plan: TrainingPlan, batch: BatchShape) -> dict[str, dict[str, float]]:
    """Return the parts of the phases before the first forward pass, by name; empty for objectives without generation.

    First prompts are read, then tokens are generated (the last one needs the most memory), then the reference scores
    the completions of one forward pass."""
    if (made := batch.generation) is None:
        return {}
    prompts = BatchShape(made.rows, made.prompt, 0)
    whole = BatchShape(made.rows, made.prompt + made.tokens - 1, 0)  # the last token needs no cache
    kinds = [layer for layer, _ in model.kinds]
    kept, most = _words(model, plan, made.rows)
    read = max(_reading(each, plan, prompts) for each in kinds) + _masks(kinds, plan, prompts)
    moments = {
        "generation, prompts": (prompts, read, 0.0),
        "generation": (whole, max(_adding(each, plan, whole) for each in kinds), kept),
        "generation, words": (whole, 0.0, most),
    }
    named = {
        name: {
            CACHE: cache(model, plan, length), "one layer": layer, "logits": logits,
            "tokens": float(2 * INDEX * made.rows * (length.length + made.prompt)),  # with their masks
        }
        for name, (length, layer, logits) in moments.items()
    }  # fmt: skip
    if plan.reference != "none":
        width = FLOAT + plan.compute if plan.autocast else plan.compute
        named["scoring"] = {"logits": float(width * batch.rows * (made.tokens + 1) * model.vocab)}
    return named


def tokens(made: Generation | None) -> float:
    """Return the prompts and completions of a step with their masks, which exist until their forward pass."""
    return float(2 * INDEX * made.rows * (made.prompt + made.tokens)) if made is not None else 0.0


def _product(plan: TrainingPlan) -> int:
    """Return bytes of an element that a linear layer returns.

    accelerate applies autocast to the outermost module only. With adapters, `generate` calls the inner module, without
    autocast."""
    if plan.full and plan.autocast:
        return plan.compute
    return plan.stream if plan.quantised and not plan.mxfp4 else plan.weight


def _turned(plan: TrainingPlan) -> int:
    """Return the bytes of an element of the cache. Its type is the wider one of the product and the rotation's
    table."""
    return max(_product(plan), plan.stream)


def cache(model: ModelShape, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return the keys and values of all layers.

    A sliding window keeps one position less than its width (transformers, DynamicSlidingWindowLayer). Linear attention
    keeps its state and the inputs of its convolution."""
    return float(batch.rows * sum(count * _kept(layer, plan, batch.length) for layer, count in model.kinds))


def _kept(layer: Layer, plan: TrainingPlan, length: int) -> float:
    if (net := layer.delta) is not None:
        return FLOAT * net.value_heads * net.key_dim * net.value_dim + _product(plan) * net.kernel * net.convolved
    positions = length if layer.window is None else min(length, layer.window - 1)
    return positions * _turned(plan) * (layer.key + layer.value)


def _adding(layer: Layer, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return the bytes that a layer needs for one more token of the batch.

    A copy of its keys gets room for another token, unless attention needs more. The weights of experts are copied for
    each token that visits them (transformers, batched_mm_experts_forward)."""
    if layer.delta is not None:
        needed = 0.0
    else:
        needed = batch.tokens * max(_turned(plan) * layer.key, _attending(layer, plan, batch, 1))
    if (moe := layer.experts) is None or plan.mxfp4:
        return needed
    return max(needed, float(batch.rows * moe.active * 3 * layer.hidden * moe.inner * plan.weight))


def _attending(layer: Layer, plan: TrainingPlan, batch: BatchShape, queries: int) -> float:
    """Return the bytes that attention needs per past position, with `queries` of each row.

    Keys and values are repeated for each query head in eager mode, with a mask, and if no kernel supports their type,
    which also scales them. Eager attention holds the scores, a cast copy, and the probabilities (with sinks in their
    own type)."""
    each, by = _turned(plan), kernel(layer, plan, batch)
    grouped = layer.heads != layer.kv_heads
    spread, scores = each * (layer.query + layer.output) if grouped else 0, layer.heads * queries
    if by == "eager":
        cast = 0 if each == FLOAT else FLOAT
        return spread + scores * (3 * each if layer.sinks else each + FLOAT + cast)
    cast = plan.compute * (layer.key + layer.value) if plan.full and plan.autocast and each == FLOAT else 0
    if by == "masked":
        return spread + cast * (layer.heads // layer.kv_heads) + queries * each
    if grouped and each == FLOAT and not cast:
        return spread + each * layer.query + (2 if queries > 1 else 1) * FLOAT * scores
    return cast


def _reading(layer: Layer, plan: TrainingPlan, prompts: BatchShape) -> float:
    """Return the bytes that a layer of the batch needs while prompts are read.

    The model holds the embeddings, the residual stream before and after attention, a normalized copy of one of them,
    and the rotation tables. The largest of attention, MLP and experts is added."""
    held = plan.stream * (4 * layer.hidden + 2 * layer.head_dim)
    attention = 0.0
    if layer.delta is None:
        attention = _product(plan) * layer.query + _attending(layer, plan, prompts, prompts.length)
        attention -= plan.stream * layer.hidden  # the stream after attention does not exist yet
    tokens = prompts.tokens
    mlp = _mlp(layer, plan)
    widest = max(tokens * attention, tokens * mlp, tokens * mlp / 2 + dequantised(layer, plan))
    return max(tokens * held + widest, tokens * (held + _experts(layer, plan)))


def _masks(layers: Sequence[Layer], plan: TrainingPlan, prompts: BatchShape) -> float:
    """Return the masks of all layers: one for full attention, and one for each window size."""
    widths = {"eager": _turned(plan), "masked": 1}
    each = {layer.window: widths.get(kernel(layer, plan, prompts), 0) for layer in layers if layer.delta is None}
    return float(prompts.tokens * prompts.length * sum(each.values()))


def _mlp(layer: Layer, plan: TrainingPlan) -> float:
    """Return the bytes that the MLP needs: the gate's activation, up, and their product.

    If `up` has adapters, their cast input and their output (scaled, or summed in the wider type) are added."""
    p, a = _product(plan), plan.adapter
    if "up_proj" not in plan.targets:
        return 3.0 * p * layer.inner
    return float((2 * p + 2 * max(a, p)) * layer.inner + (a * layer.hidden if a != p else 0))


def _experts(layer: Layer, plan: TrainingPlan) -> float:
    """Return the bytes that experts need: gate and up together, masked, and the ordered inputs with indices."""
    if (moe := layer.experts) is None:
        return 0.0
    return moe.active * (_product(plan) * (4 * moe.inner + layer.hidden) + 3 * INDEX)


def _words(model: ModelShape, plan: TrainingPlan, rows: int) -> tuple[float, float]:
    """Return the bytes of one token's logits that stay during the next token, and their peak.

    A float32 copy, the logits after temperature and minimum length, and the probabilities stay. At the peak, the
    original logits and the sampling noise are added."""
    each = float(rows * model.vocab * FLOAT)
    made = FLOAT if plan.full and plan.autocast else _product(plan)
    return 3 * each, 4 * each + rows * model.vocab * made

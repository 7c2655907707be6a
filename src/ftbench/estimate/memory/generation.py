"""What the model's own answers to prompts take: transformers' `generate`, and what a reference makes of them. Bytes.

Source: what is alive at the peaks of simulated generations, of trl 1.14 under transformers 5.17. Nothing is saved for a
backward pass. Of one layer bytes are those of a position, unless said otherwise: h hidden, i width of the MLP.
"""

from collections.abc import Sequence

from ftbench.estimate.memory.layer import FLOAT, INDEX, kernel
from ftbench.estimate.memory.transient import dequantised
from ftbench.estimate.workload.largest import BatchShape, Generation
from ftbench.estimate.workload.plan import TrainingPlan
from ftbench.families.shape import Layer, ModelShape

CACHE = "keys and values"


def phases(model: ModelShape, plan: TrainingPlan, batch: BatchShape) -> dict[str, dict[str, float]]:
    """Return the parts of the moments of a step before its first forward pass, by their name: prompts are read, the
    last token is made, and the reference looks at as many completions as a forward pass does. None without prompts."""
    if (made := batch.generation) is None:
        return {}
    prompts = BatchShape(made.rows, made.prompt, 0)
    whole = BatchShape(made.rows, made.prompt + made.tokens - 1, 0)  # the last token is nobody's past
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
    """Return the prompts and completions of a step, and their masks, which wait for their forward pass."""
    return float(2 * INDEX * made.rows * (made.prompt + made.tokens)) if made is not None else 0.0


def _product(plan: TrainingPlan) -> int:
    """Return the bytes of an element that a linear layer puts out. Autocast is the outermost module's, and with
    adapters `generate` calls the one within."""
    if plan.full and plan.autocast:
        return plan.compute
    return plan.stream if plan.quantised and not plan.mxfp4 else plan.weight


def _turned(plan: TrainingPlan) -> int:
    """Return the bytes of an element of the cache, which has the type of a turned key, and that is the wider one of the
    product and of the table of the stream's type."""
    return max(_product(plan), plan.stream)


def cache(model: ModelShape, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return the keys and values of all layers: of a sliding window one position less than it has (transformers,
    DynamicSlidingWindowLayer), of linear attention its state and what its convolution has yet to see."""
    return float(batch.rows * sum(count * _kept(layer, plan, batch.length) for layer, count in model.kinds))


def _kept(layer: Layer, plan: TrainingPlan, length: int) -> float:
    if (net := layer.delta) is not None:
        return FLOAT * net.value_heads * net.key_dim * net.value_dim + _product(plan) * net.kernel * net.convolved
    positions = length if layer.window is None else min(length, layer.window - 1)
    return positions * _turned(plan) * (layer.key + layer.value)


def _adding(layer: Layer, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return what a layer of the whole batch needs as one more token is made: its keys are copied to where there is
    room for another; or attention needs more. Of experts the weights are copied for each token that visits them
    (transformers, batched_mm_experts_forward)."""
    if layer.delta is not None:
        needed = 0.0
    else:
        needed = batch.tokens * max(_turned(plan) * layer.key, _attending(layer, plan, batch, 1))
    if (moe := layer.experts) is None or plan.mxfp4:
        return needed
    return max(needed, float(batch.rows * moe.active * 3 * layer.hidden * moe.inner * plan.weight))


def _attending(layer: Layer, plan: TrainingPlan, batch: BatchShape, queries: int) -> float:
    """Return what attention needs for a position of the past, beside `queries` of each row. Keys and values are
    repeated for each query head: always in eager mode, beside a mask, and where no kernel takes their type, which then
    are scaled too; the plain formula holds scores, cast and as probabilities (with sinks in their own type)."""
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
    """Return what a layer of the whole batch needs as prompts are read: what the model holds (embeddings, the residual
    stream before and after attention, one of them normed, the tables that turn) with its attention, its MLP or its
    experts, the widest of them."""
    held = plan.stream * (4 * layer.hidden + 2 * layer.head_dim)
    attention = 0.0
    if layer.delta is None:
        attention = _product(plan) * layer.query + _attending(layer, plan, prompts, prompts.length)
        attention -= plan.stream * layer.hidden  # after attention there is not yet
    tokens = prompts.tokens
    mlp = _mlp(layer, plan)
    widest = max(tokens * attention, tokens * mlp, tokens * mlp / 2 + dequantised(layer, plan))
    return max(tokens * held + widest, tokens * (held + _experts(layer, plan)))


def _masks(layers: Sequence[Layer], plan: TrainingPlan, prompts: BatchShape) -> float:
    """Return the masks of all layers together: one of whole attention, one of each window."""
    widths = {"eager": _turned(plan), "masked": 1}
    each = {layer.window: widths.get(kernel(layer, plan, prompts), 0) for layer in layers if layer.delta is None}
    return float(prompts.tokens * prompts.length * sum(each.values()))


def _mlp(layer: Layer, plan: TrainingPlan) -> float:
    """Return what the MLP needs: the gate's activation, what up puts out, and their product; where up has adapters,
    what these put out, scaled or added up, in the wider type, and their input where it is cast."""
    p, a = _product(plan), plan.adapter
    if "up_proj" not in plan.targets:
        return 3.0 * p * layer.inner
    return float((2 * p + 2 * max(a, p)) * layer.inner + (a * layer.hidden if a != p else 0))


def _experts(layer: Layer, plan: TrainingPlan) -> float:
    """Return what experts need: gate and up together, masked, and the inputs in their order, with indices."""
    if (moe := layer.experts) is None:
        return 0.0
    return moe.active * (_product(plan) * (4 * moe.inner + layer.hidden) + 3 * INDEX)


def _words(model: ModelShape, plan: TrainingPlan, rows: int) -> tuple[float, float]:
    """Return what the logits of one token leave while the next is computed (a copy in float32, what temperature and a
    least length make of it, and probabilities), and what they need at most: the logits, and noise, beside these."""
    each = float(rows * model.vocab * FLOAT)
    made = FLOAT if plan.full and plan.autocast else _product(plan)
    return 3 * each, 4 * each + rows * model.vocab * made

"""From the last hidden state to the loss: what is saved, and what logits need for a moment. Bytes of the whole batch.

Notation: T positions, h hidden, V words, n bytes of a normed hidden state.
"""

from ftbench.estimate.workload.largest import BatchShape
from ftbench.estimate.workload.plan import TrainingPlan
from ftbench.families.shape import ModelShape

FLOAT = 4
TRL_CHUNK = 256  # label tokens (trl.trainer.sft_trainer, _CHUNKED_LM_HEAD_CHUNK_SIZE)
UNSLOTH_ROWS = 1024  # whose logits unsloth's fused loss holds, fitted: unsloth 2026.10 sizes chunks by free memory


def tail(model: ModelShape, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return what is saved after the last layer: the final norm's input in float32 (and normed, where trained), and
    the hidden states of the label positions, gathered. Kernels save the norm's input as it is; the losses of Liger and
    unsloth save the gradient of the hidden states, which they make in the forward pass."""
    normed = plan.stream
    norm = plan.stream if plan.norms_keep_inputs else FLOAT + (plan.stream if plan.full else 0)
    return float((norm + normed) * model.hidden * batch.tokens)


def final_norm_peak(model: ModelShape, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return what the final norm's backward pass needs: five float32 copies, less the gathered ones that are freed."""
    if plan.norms_keep_inputs:
        return 0.0
    return float((5 * FLOAT - plan.stream) * model.hidden * batch.tokens)


def head_cast(model: ModelShape, plan: TrainingPlan) -> float:
    """Return the copy of a frozen float32 head, cast for each use (autocast caches only what is trained)."""
    return model.vocab * model.hidden * plan.compute if plan.upcast > plan.compute and plan.autocast else 0.0


def logits(model: ModelShape, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return the transient peak of the logits.

    trl: for a chunk, of 256 positions where there are so many, logits, log-probabilities, probabilities and their
    product, 16 V bytes a token, and 4 V more where a tanh is saved (softcap). Ours: logits and their gradient, and in
    eager mode log-probabilities and probabilities in float32; of one chunk at a time
    (worker/optimizations/chunked_loss.py). Liger: chunks of T h / V tokens rounded up to a power of two, logits twice,
    16-bit and float32. Of pairs the logits of all positions: as the head makes them and, under autocast, in float32
    (accelerate), then their gradient, of which autograd makes a second copy without the last position; the reference's
    stand beside the model's while trl computes its metrics of what is chosen. Of completions those of their positions
    and the one before, in the same way; nothing of the reference is left then.
    """
    if plan.loss == "completions":
        return _completion_logits(model, plan, batch)
    if plan.loss == "pairs":
        return _pair_logits(model, plan, batch)
    if plan.loss == "unsloth":
        return float(min(UNSLOTH_ROWS, batch.tokens) * model.vocab * plan.compute)
    if plan.loss == "liger":
        parts = -(-model.vocab // model.hidden)
        rows = 1 << max(0, -(-batch.tokens // parts) - 1).bit_length()
        return float(min(rows, batch.tokens) * model.vocab * (plan.compute + FLOAT))
    if plan.loss == "chunked":
        each = 2 * plan.compute + (0 if plan.compiled else 2 * FLOAT)
        return float(min(plan.chunk, batch.labels) * model.vocab * each)
    return float(min(TRL_CHUNK, batch.tokens) * model.vocab * (5 if model.softcap else 4) * FLOAT)


def _pair_logits(model: ModelShape, plan: TrainingPlan, batch: BatchShape) -> float:
    kept = FLOAT if plan.autocast else plan.compute
    made = kept + (plan.compute if plan.autocast else 0)
    beside = kept + max(made, kept + kept * batch.labels / batch.tokens / 2) if plan.reference != "none" else 0
    return float(batch.tokens * model.vocab * max(beside, made, 2 * kept))


def _completion_logits(model: ModelShape, plan: TrainingPlan, batch: BatchShape) -> float:
    kept = FLOAT if plan.autocast else plan.compute
    made = kept + (plan.compute if plan.autocast else 0)
    before = batch.labels + batch.rows
    return float(model.vocab * max(made * before, kept * (before + batch.labels)))


def head_gradient(model: ModelShape, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return what a trained head takes for its gradient: of trl's loss the gradients of two chunks and their sum are
    alive together (autograd adds them up); of ours the sum and what a chunk adds, then the sum and what the backward
    pass makes of it."""
    if not plan.full:
        return 0.0
    copies = 2 if plan.loss == "chunked" else 3 if plan.loss == "trl" and batch.labels > TRL_CHUNK else 1
    return float(model.vocab * model.hidden * plan.weight * copies)


def tied_gradients(model: ModelShape, plan: TrainingPlan) -> float:
    """Return, where embedding and head are one, the last thing of the backward pass: beside the gradient that is
    kept, those of its two uses as they are added up."""
    return 2.0 * model.vocab * model.hidden * plan.weight if plan.full and model.tied else 0.0


def transient_peak(model: ModelShape, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return the most that the loss needs at once beyond what is saved: logits with the head's cast, or the head's
    gradients, and one gradient or copy of the hidden states. Ours casts the head for a product, and computes
    probabilities when that copy is gone; it adds up the head's gradient beside the logits."""
    hidden = plan.stream * model.hidden * batch.tokens
    chunk, cast, head = (logits(model, plan, batch), head_cast(model, plan), head_gradient(model, plan, batch))
    if plan.loss != "chunked":
        return max(chunk + cast, head) + hidden
    product = 2 * plan.compute * min(plan.chunk, batch.labels) * model.vocab
    return max(chunk + head / 2, product + max(cast, head)) + hidden

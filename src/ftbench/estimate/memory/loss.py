"""Memory from the last hidden state to the loss: saved tensors and transient logits. Bytes of the batch.

Notation: T positions, h hidden, V vocabulary, n bytes of a normalized hidden state."""

from ftbench.estimate.workload.largest import BatchShape
from ftbench.estimate.workload.plan import TrainingPlan
from ftbench.families.shape import ModelShape

FLOAT = 4
TRL_CHUNK = 256  # label tokens (trl.trainer.sft_trainer, _CHUNKED_LM_HEAD_CHUNK_SIZE)
UNSLOTH_ROWS = 1024  # rows per chunk of unsloth's fused loss, fitted: unsloth 2026.10 sizes chunks by free memory


def tail(model: ModelShape, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return the bytes saved after the last layer: the final norm's input, and the hidden states of the labels.

    The input is float32. A trained norm also saves its normalized input. Kernels save the norm's input as it is. The
    losses of Liger and unsloth save the gradient of the hidden states, which they compute in the forward pass."""
    normed = plan.stream
    norm = plan.stream if plan.norms_keep_inputs else FLOAT + (plan.stream if plan.full else 0)
    return float((norm + normed) * model.hidden * batch.tokens)


def final_norm_peak(model: ModelShape, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return the bytes of the final norm's backward pass: five float32 copies, minus the freed hidden states."""
    if plan.norms_keep_inputs:
        return 0.0
    return float((5 * FLOAT - plan.stream) * model.hidden * batch.tokens)


def head_cast(model: ModelShape, plan: TrainingPlan) -> float:
    """Return the copy of a frozen float32 head, which is cast for each use (autocast caches only trained weights)."""
    return model.vocab * model.hidden * plan.compute if plan.upcast > plan.compute and plan.autocast else 0.0


def logits(model: ModelShape, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return the transient peak of the logits.

    trl: a chunk has up to 256 positions. It holds logits, log-probabilities, probabilities and their product: 16 V
    bytes per token, and 4 V more if a tanh is saved (softcap). Ours: one chunk holds logits and their gradient. Eager
    mode adds log-probabilities and probabilities in float32 (worker/optimizations/chunked_loss.py). Liger: a chunk has
    T h / V tokens, rounded up to a power of two. It holds the logits in 16 bits and in float32.

    Pairs: the logits of all positions exist in the head's type and, under autocast, also in float32 (accelerate). Then
    their gradient is added, and autograd copies it without the last position. The reference's logits exist at the same
    time, while trl computes its metrics of the chosen answers."""
    if plan.loss == "pairs":
        kept = FLOAT if plan.autocast else plan.compute
        made = kept + (plan.compute if plan.autocast else 0)
        both = 0.0 if plan.reference == "none" else kept + max(made, kept + kept * batch.labels / batch.tokens / 2)
        return float(batch.tokens * model.vocab * max(both, made, 2 * kept))
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


def head_gradient(model: ModelShape, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return the temporary gradients of a trained head.

    trl: the gradients of two chunks and their sum exist at the same time (autograd adds them). Ours: the sum and the
    gradient of one chunk exist first, later the sum and the gradient from the backward pass."""
    if not plan.full:
        return 0.0
    copies = 2 if plan.loss == "chunked" else 3 if plan.loss == "trl" and batch.labels > TRL_CHUNK else 1
    return float(model.vocab * model.hidden * plan.weight * copies)


def tied_gradients(model: ModelShape, plan: TrainingPlan) -> float:
    """Return the gradients at the end of the backward pass if embedding and head share a weight.

    While the gradients of both uses are added, they exist in addition to the result."""
    return 2.0 * model.vocab * model.hidden * plan.weight if plan.full and model.tied else 0.0


def transient_peak(model: ModelShape, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return the peak bytes of the loss beyond the saved tensors.

    This is the logits with the head's cast, or the head's gradients, and one gradient or copy of the hidden states. Our
    loss casts the head for a product and frees the copy before it computes probabilities. It adds up the head's
    gradient while the logits exist."""
    hidden = plan.stream * model.hidden * batch.tokens
    chunk, cast, head = (logits(model, plan, batch), head_cast(model, plan), head_gradient(model, plan, batch))
    if plan.loss != "chunked":
        return max(chunk + cast, head) + hidden
    product = 2 * plan.compute * min(plan.chunk, batch.labels) * model.vocab
    return max(chunk + head / 2, product + max(cast, head)) + hidden

"""Compute the memory outside the decoder layers: image encoder, projector, final norm, and loss.

Results are in bytes for the complete batch, unless a docstring names another unit. Padding counts as tokens. The
saved tensors of images were recorded in training steps of CLIP, Qwen2.5-VL and Qwen3-VL on fake tensors (transformers
5.17, peft 0.21, autocast)."""

from ftbench.estimate.memory.weights import fetched_head
from ftbench.estimate.workload.largest import BatchShape
from ftbench.estimate.workload.plan import TrainingPlan
from ftbench.families.shape import ModelShape
from ftbench.families.vision import VisionShape

FLOAT = 4
TRL_CHUNK = 256  # label tokens (trl.trainer.sft_trainer, _CHUNKED_LM_HEAD_CHUNK_SIZE)
UNSLOTH_ROWS = 1024  # rows per chunk of unsloth's fused loss, fitted: unsloth 2026.10 sizes chunks by free memory


def tail(model: ModelShape, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return the bytes saved after the last layer: the input and the output of the final norm.

    An eager norm saves its input in float32. A fused norm kernel saves its input without a cast. A trained eager norm
    also saves the normalized input. The losses of Liger and unsloth save the gradient of the norm's output instead of
    the output. The gradient and the output have the same size."""
    normed = plan.stream
    norm = plan.stream if plan.norms_keep_inputs else FLOAT + (plan.stream if plan.full else 0)
    return float((norm + normed) * model.hidden * batch.tokens)


def final_norm_peak(model: ModelShape, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return the peak bytes of the final norm's backward pass: five float32 input copies minus the freed output."""
    return 0.0 if plan.norms_keep_inputs else float((5 * FLOAT - plan.stream) * model.hidden * batch.tokens)


def head_cast(model: ModelShape, plan: TrainingPlan) -> float:
    """Return the bytes of autocast's copy of a float32 LM head. The copy has the compute dtype.

    autocast copies a frozen head at each use, because autocast caches only the copies of trained weights."""
    return model.vocab * model.hidden * plan.compute if plan.upcast > plan.compute and plan.autocast else 0.0


def logits(model: ModelShape, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return the peak bytes of the logits and of the loss's temporary tensors. V is the vocabulary size.

    - `trl`: a chunk has up to 256 tokens. Logits, log-probabilities, probabilities and their product need `16 * V`
      bytes per token. A softcap adds `4 * V` bytes (tanh).
    - `chunked` (ftbench): a chunk needs logits and their gradient. Without compile, float32 log-probabilities and
      probabilities are added (worker/optimizations/chunked_loss.py).
    - `liger`: a chunk has `tokens * hidden size / V` tokens, rounded up to a power of two. Logits exist in 16 and 32
      bits.
    - `pairs` (dpo): logits of all tokens exist in the head's dtype. Under autocast, a float32 copy is added
      (accelerate). The backward pass needs logits and their gradient. A reference model adds its logits while trl
      computes metrics."""
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
    """Return the bytes of the temporary gradients of a trained LM head.

    `trl`: autograd adds the gradients of two chunks, so three tensors exist: the two gradients and their sum.
    `chunked`: the sum and the gradient of one chunk exist in the forward pass. The sum and a scaled copy exist in the
    backward pass."""
    if not plan.full:
        return 0.0
    copies = 2 if plan.loss == "chunked" else 3 if plan.loss == "trl" and batch.labels > TRL_CHUNK else 1
    return float(model.vocab * model.hidden * plan.weight * copies)


def tied_gradients(model: ModelShape, plan: TrainingPlan) -> float:
    """Return the additional bytes at the end of the backward pass if embedding and LM head share a trained weight.

    autograd adds the gradients from embedding and head. During the addition, three tensors exist: the two gradients and
    their sum. This function counts two of them, and `phases` counts the third with all other gradients."""
    return 2.0 * model.vocab * model.hidden * plan.weight if plan.full and model.tied else 0.0


def transient_peak(model: ModelShape, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return the peak bytes of the loss's temporary tensors, without saved tensors.

    The peak is `max(logits + cast copy of the head, head gradients) + hidden states`. The last term is one gradient or
    copy of the hidden states. ftbench's loss needs less: only half of the head gradients exist while the logits exist.
    With a cast, the cast copy or a 16-bit gradient of the head is added after the probabilities, and autocast keeps the
    copy of a trained head. The second half exists in the backward pass, after weight_offload has freed the head."""
    hidden = plan.stream * model.hidden * batch.tokens
    chunk, cast, head = (logits(model, plan, batch), head_cast(model, plan), head_gradient(model, plan, batch))
    if plan.loss != "chunked":
        return max(chunk + cast, head) + hidden
    product = plan.compute * min(plan.chunk, batch.labels) * model.vocab + cast
    held = head / 2 + cast * (plan.full and not plan.streamed)
    return max(max(chunk, product) + held, head - fetched_head(model, plan)) + hidden


def pixels(vision: VisionShape, batch: BatchShape) -> float:
    """Return the bytes of the batch's pixels in float32."""
    return float(FLOAT * vision.values * (batch.images.patches - _classes(vision, batch)))


def images_shown(model: ModelShape, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return the bytes of the image tensors that stay until the forward pass ends.

    These tensors are the image features, and the embeddings with inserted image features. Qwen3-VL also keeps image
    features for later decoder layers, and the last hidden states of its encoder."""
    if (vision := model.vision) is None:
        return 0.0
    features = (1 + 2 * vision.deep) if vision.deep else 1
    last = plan.compute * vision.hidden * vision.merge**2 * batch.images.tokens if vision.deep else 0
    return plan.stream * model.hidden * (features * batch.images.tokens + batch.tokens) + last


def encoder_saved(vision: VisionShape, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return the bytes that image encoder and projector save. A checkpointed encoder layer saves only its input."""
    encoder = 0.0
    if reached(vision, plan):
        again, used = plan.checkpointing != "off", vision.layers - bool(vision.tile)  # LLaVA skips the last one
        encoder = used * (stream(vision, plan) * vision.hidden if again else _layer(vision, plan))
        encoder += _ends(vision, plan)
    return batch.images.patches * encoder + projector(vision, plan, batch)


def reached(vision: VisionShape, plan: TrainingPlan) -> bool:
    """Return whether the backward pass reaches the image encoder.

    A trained encoder is always reached. Gradient checkpointing also reaches a frozen CLIP encoder, because transformers
    makes CLIP's patch embeddings require a gradient (enable_input_require_grads)."""
    return plan.vision != "frozen" or (plan.checkpointing != "off" and bool(vision.tile))


def _classes(vision: VisionShape, batch: BatchShape) -> int:
    """Return the number of class tokens in the batch. CLIP has one class token per image tile."""
    return batch.images.tiles if vision.tile else 0


def stream(vision: VisionShape, plan: TrainingPlan) -> int:
    """Return the bytes per element of the encoder's residual stream.

    Under autocast, CLIP's first LayerNorm returns float32. Qwen's patch embedding returns the compute dtype."""
    if not plan.autocast:
        return plan.weight
    return FLOAT if vision.tile else plan.compute


def _ends(vision: VisionShape, plan: TrainingPlan) -> float:
    """Return the bytes per patch that the image encoder saves outside its layers.

    Qwen's rotary embedding saves sines and cosines. Full training saves the pixels for the patch embedding, and the
    tensors of CLIP's first norm. With adapters, the first norm of the first layer saves nothing, so its bytes are
    subtracted. With gradient checkpointing, CLIP saves the output of its patch embedding before and after the norm."""
    rotation = 0 if vision.tile else 2 * FLOAT * (vision.hidden // vision.heads)
    norm = FLOAT * vision.hidden + 2 * FLOAT
    if plan.vision == "full":
        return rotation + plan.compute * vision.values + (norm if vision.tile else 0)
    if plan.checkpointing == "off":
        return rotation - norm
    return rotation + (norm + plan.compute * vision.hidden if vision.tile else 0)


def _layer(vision: VisionShape, plan: TrainingPlan) -> float:
    """Return the bytes per patch that one layer of the image encoder saves.

    Each of the two norms saves its input in float32. Attention saves queries, keys, values, output, and one float32
    number per head. Qwen also saves queries and keys before the rotary embedding. The MLP saves `vision.activations`
    tensors, which include the input of its last matrix. `_inputs` counts the inputs of the other matrices."""
    h, c = vision.hidden, plan.compute
    norms = 2 * (FLOAT * h + 2 * FLOAT)
    attention = c * (4 if vision.tile else 6) * h + FLOAT * vision.heads
    return norms + attention + c * vision.activations * vision.inner + _inputs(vision, plan)


def _inputs(vision: VisionShape, plan: TrainingPlan) -> float:
    """Return the bytes per patch of the inputs that the matrices of one encoder layer save.

    Each adapter saves a copy of its input. Fully trained CLIP matrices save four inputs in the compute dtype: for q, k,
    v and fc1. Fully trained Qwen matrices save the outputs of the two norms and the concatenated outputs of the
    attention windows. RMSNorm outputs are saved twice: before and after the multiplication by the weight."""
    if plan.vision == "frozen":
        return 0.0
    if plan.vision == "lora":
        copied = sum(inputs for inputs, _ in vision.matrices[:-1])
        return plan.compute * (copied + plan.rank * len(vision.matrices))
    return plan.compute * vision.hidden * {3: 4, 2: 3, 4: 5}[vision.activations]


def projector(vision: VisionShape, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return the bytes that the projector saves: inputs of its activation function and of trained matrices.

    The inputs of Qwen's norms are added if the gradient passes through these norms."""
    if not (plan.trains_vision or reached(vision, plan)):
        return 0.0
    c, tokens = plan.compute, (batch.images.patches - _classes(vision, batch)) // vision.merge**2
    each: float = c * sum(outputs for _, outputs in vision.merging[::2])
    if plan.projector != "frozen":
        each += c * sum(inputs for inputs, _ in vision.merging)
    if plan.projector == "lora":
        each += c * plan.rank * len(vision.merging)
    if not vision.tile and (plan.vision != "frozen" or plan.projector == "full"):
        normed = c * vision.hidden if plan.projector == "full" and vision.activations == 4 else 0
        each += (1 + vision.deep) * vision.merge**2 * (FLOAT * vision.hidden + 2 * FLOAT + normed)
    return tokens * each


def encoder_moment(vision: VisionShape, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return the peak bytes of the image encoder's temporary tensors.

    LLaVA keeps the outputs of all encoder layers during each MLP (modeling_llava_next.py, output_hidden_states). Qwen
    keeps the pixels in the compute dtype. Qwen's rotary embedding needs eight float32 tensors of the hidden size."""
    h, c = vision.hidden, plan.compute
    if vision.tile:
        each = (vision.layers + 1) * stream(vision, plan) * h + c * vision.activations * vision.inner
    else:
        each = c * vision.values + 8 * FLOAT * h + 4 * c * h + 2 * FLOAT * (h // vision.heads)
    return float(batch.images.patches * each)


def encoder_remade(vision: VisionShape, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return the bytes of the tensors that a checkpointed encoder layer recomputes."""
    again = reached(vision, plan) and plan.checkpointing != "off"
    return batch.images.patches * _layer(vision, plan) if again else 0.0

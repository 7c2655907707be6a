"""Memory before the first and after the last decoder layer: image encoder, projector, and loss. All sizes are bytes for
the whole batch, unless noted otherwise.

Images are counted per patch or per token of the projector. Notation: h hidden and i width of the encoder's MLP; s, c
bytes of an element of the encoder's residual stream and of the compute type. The saved tensors were read from steps of
CLIP, Qwen2.5-VL and Qwen3-VL of transformers 5.17 under peft 0.21 and autocast, on tensors without memory. Loss: T
positions, h hidden, V vocabulary, n bytes of a normalized hidden state."""

from ftbench.estimate.workload.largest import BatchShape
from ftbench.estimate.workload.plan import TrainingPlan
from ftbench.families.shape import ModelShape
from ftbench.families.vision import VisionShape

FLOAT = 4
TRL_CHUNK = 256  # label tokens (trl.trainer.sft_trainer, _CHUNKED_LM_HEAD_CHUNK_SIZE)
UNSLOTH_ROWS = 1024  # rows per chunk of unsloth's fused loss, fitted: unsloth 2026.10 sizes chunks by free memory


def tail(model: ModelShape, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return the bytes saved after the last layer: the final norm's input, and the normalized hidden states.

    The norm's input is saved in float32, or by kernels in its own type. A trained norm also saves its normalized input.
    The losses of Liger and unsloth compute the gradient of the hidden states in the forward pass. They save it instead
    of the hidden states."""
    normed = plan.stream
    norm = plan.stream if plan.norms_keep_inputs else FLOAT + (plan.stream if plan.full else 0)
    return float((norm + normed) * model.hidden * batch.tokens)


def final_norm_peak(model: ModelShape, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return the peak bytes of the final norm's backward pass: five float32 copies of its input, minus freed
    tensors."""
    if plan.norms_keep_inputs:
        return 0.0
    return float((5 * FLOAT - plan.stream) * model.hidden * batch.tokens)


def head_cast(model: ModelShape, plan: TrainingPlan) -> float:
    """Return the bytes of the cast copy of a frozen float32 head. It is cast for each use, because autocast caches
    only trained weights."""
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

    Autograd adds the gradients from the embedding and the head. During the addition, both and their sum exist."""
    return 2.0 * model.vocab * model.hidden * plan.weight if plan.full and model.tied else 0.0


def transient_peak(model: ModelShape, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return the peak bytes of the loss beyond the saved tensors.

    This is the larger of two: logits with the cast head, or the head's gradients. One gradient or copy of the hidden
    states is added to it. ftbench's loss frees the cast head before it computes probabilities, and the head's gradient
    grows while the logits exist."""
    hidden = plan.stream * model.hidden * batch.tokens
    chunk, cast, head = (logits(model, plan, batch), head_cast(model, plan), head_gradient(model, plan, batch))
    if plan.loss != "chunked":
        return max(chunk + cast, head) + hidden
    product = 2 * plan.compute * min(plan.chunk, batch.labels) * model.vocab
    return max(chunk + head / 2, product + max(cast, head)) + hidden


def pixels(vision: VisionShape, batch: BatchShape) -> float:
    """Return the bytes of the batch's pixels in float32."""
    return float(FLOAT * vision.values * (batch.images.patches - _classes(vision, batch)))


def images_shown(model: ModelShape, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return the bytes of image tensors that stay until the forward pass ends.

    These are the image features, and the embeddings with the features inserted. Qwen3-VL adds the features for later
    decoder layers and its last hidden states."""
    if (vision := model.vision) is None:
        return 0.0
    features = (1 + 2 * vision.deep) if vision.deep else 1
    last = plan.compute * vision.hidden * vision.merge**2 * batch.images.tokens if vision.deep else 0
    return plan.stream * model.hidden * (features * batch.images.tokens + batch.tokens) + last


def encoder_saved(vision: VisionShape, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return the bytes that encoder and projector save for the backward pass. Checkpointed layers save only their
    input."""
    encoder = 0.0
    if reached(vision, plan):
        again, used = plan.checkpointing != "off", vision.layers - bool(vision.tile)  # LLaVA skips the last one
        encoder = used * (stream(vision, plan) * vision.hidden if again else _layer(vision, plan))
        encoder += _ends(vision, plan)
    return batch.images.patches * encoder + projector(vision, plan, batch)


def reached(vision: VisionShape, plan: TrainingPlan) -> bool:
    """Return whether the backward pass reaches the encoder.

    With gradient checkpointing, it also reaches a frozen CLIP encoder, because transformers makes the output of CLIP's
    patch embedding require a gradient (enable_input_require_grads)."""
    return plan.vision != "frozen" or (plan.checkpointing != "off" and bool(vision.tile))


def _classes(vision: VisionShape, batch: BatchShape) -> int:
    """Return the number of class tokens. CLIP has one per tile."""
    return batch.images.tiles if vision.tile else 0


def stream(vision: VisionShape, plan: TrainingPlan) -> int:
    """Return the bytes per element of the encoder's residual stream.

    Under autocast CLIP's first LayerNorm returns float32, and Qwen's first product returns the compute type."""
    if not plan.autocast:
        return plan.weight
    return FLOAT if vision.tile else plan.compute


def _ends(vision: VisionShape, plan: TrainingPlan) -> float:
    """Return the bytes per patch that the encoder saves outside its layers.

    Qwen's rotation keeps sines and cosines per head. If the encoder is trained fully, the input pixels of the first
    product and CLIP's first norm are saved too. With adapters, the first layer's norm saves nothing. With
    checkpoints, CLIP keeps the output of its first product, and this output after the norm."""
    rotation = 0 if vision.tile else 2 * FLOAT * (vision.hidden // vision.heads)
    norm = FLOAT * vision.hidden + 2 * FLOAT
    if plan.vision == "full":
        return rotation + plan.compute * vision.values + (norm if vision.tile else 0)
    if plan.checkpointing == "off":
        return rotation - norm
    return rotation + (norm + plan.compute * vision.hidden if vision.tile else 0)


def _layer(vision: VisionShape, plan: TrainingPlan) -> float:
    """Return the bytes per patch that an encoder layer saves.

    The two norms save their float32 input, which in CLIP is the residual stream. Attention saves queries, keys,
    values, output, and a float32 number per head. Qwen's rotation also keeps the fused product of queries and keys.
    The MLP saves `activations` tensors, including the input of its last matrix. `_inputs` counts the inputs of the
    other matrices."""
    h, c = vision.hidden, plan.compute
    norms = 2 * (FLOAT * h + 2 * FLOAT)
    attention = c * (4 if vision.tile else 6) * h + FLOAT * vision.heads
    return norms + attention + c * vision.activations * vision.inner + _inputs(vision, plan)


def _inputs(vision: VisionShape, plan: TrainingPlan) -> float:
    """Return the bytes of the inputs that the encoder's matrices save.

    Each adapter saves a copy of its input. Trained matrices of CLIP (q, k, v and fc1) save a cast input, and the output
    projection shares the output of attention. Trained matrices of Qwen save the joined outputs of the windows.
    They also save the output of the norm: cast for a LayerNorm, before and after the weight for an RMSNorm."""
    if plan.vision == "frozen":
        return 0.0
    if plan.vision == "lora":
        copied = sum(inputs for inputs, _ in vision.matrices[:-1])
        return plan.compute * (copied + plan.rank * len(vision.matrices))
    return plan.compute * vision.hidden * {3: 4, 2: 3, 4: 5}[vision.activations]


def projector(vision: VisionShape, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return the bytes that the projector saves: the activation's input, inputs of trained matrices, and Qwen's norms.

    The norms are included if the gradient passes through them."""
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
    """Return the peak bytes of the encoder's temporary tensors.

    LLaVA keeps the outputs of all layers (modeling_llava_next.py, output_hidden_states) while one MLP is computed.
    Qwen keeps the pixels in the weights' type, and rotates queries and keys in float32: eight tensors of that width."""
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

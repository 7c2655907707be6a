"""What encoder and projector of images hold in a step. Bytes of the whole batch, unless said otherwise.

Counted for a patch or for a token of the projector. Notation: h hidden and i width of the encoder's MLP; s, c bytes of
the encoder's residual stream and of what products are made in. What is saved was read from simulated steps of
transformers 5.17's CLIP, Qwen2.5-VL and Qwen3-VL under peft 0.21 and autocast.
"""

from ftbench.estimate.workload.largest import BatchShape
from ftbench.estimate.workload.plan import TrainingPlan
from ftbench.estimate.workload.vision import learns
from ftbench.families.shape import ModelShape
from ftbench.families.vision import VisionShape

FLOAT = 4


def pixels(vision: VisionShape, batch: BatchShape) -> float:
    """Return the pixels as the batch holds them, in float32."""
    return float(FLOAT * vision.values * (batch.images.patches - _classes(vision, batch)))


def shown(model: ModelShape, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return what stays until the forward pass ends, whoever trains: the features of the images, and the embeddings
    with them among the text's; what each further layer of the decoder is handed, and Qwen3-VL's last hidden states."""
    if (vision := model.vision) is None:
        return 0.0
    features = (1 + 2 * vision.deep) if vision.deep else 1
    last = plan.compute * vision.hidden * vision.merge**2 * batch.images.tokens if vision.deep else 0
    return plan.stream * model.hidden * (features * batch.images.tokens + batch.tokens) + last


def saved(vision: VisionShape, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return what is saved for the backward pass, where a gradient comes. Checkpointed layers keep their input."""
    encoder = 0.0
    if reached(vision, plan):
        again, used = plan.checkpointing != "off", vision.layers - bool(vision.tile)  # LLaVA takes the last but one
        encoder = used * (stream(vision, plan) * vision.hidden if again else _layer(vision, plan))
        encoder += _ends(vision, plan)
    return batch.images.patches * encoder + projector(vision, plan, batch)


def reached(vision: VisionShape, plan: TrainingPlan) -> bool:
    """Return whether the encoder gets a gradient: also a frozen one of CLIP under checkpoints, for which transformers
    asks what CLIP makes of patches for one (enable_input_require_grads)."""
    return plan.vision != "frozen" or (plan.checkpointing != "off" and bool(vision.tile))


def _classes(vision: VisionShape, batch: BatchShape) -> int:
    """Return the tokens of a class, one a tile in CLIP."""
    return batch.images.tiles if vision.tile else 0


def stream(vision: VisionShape, plan: TrainingPlan) -> int:
    """Return bytes of an element of the residual stream: autocast makes float32 of what CLIP's first LayerNorm puts
    out, and products' type of what Qwen's first product does."""
    if not plan.autocast:
        return plan.weight
    return FLOAT if vision.tile else plan.compute


def _ends(vision: VisionShape, plan: TrainingPlan) -> float:
    """Return what is saved of a patch beside the layers. Qwen's rotation keeps sines and cosines of a head. Trained
    whole: the pixels as the first product reads them, and CLIP's first norm; with adapters the first layer's norm is
    left out, but under checkpoints CLIP keeps what its first product put out and normed."""
    rotation = 0 if vision.tile else 2 * FLOAT * (vision.hidden // vision.heads)
    norm = FLOAT * vision.hidden + 2 * FLOAT
    if plan.vision == "full":
        return rotation + plan.compute * vision.values + (norm if vision.tile else 0)
    if plan.checkpointing == "off":
        return rotation - norm
    return rotation + (norm + plan.compute * vision.hidden if vision.tile else 0)


def _layer(vision: VisionShape, plan: TrainingPlan) -> float:
    """Return what a layer saves of a patch.

    Two norms: the input in float32, which in CLIP is the stream itself. The attention: queries, keys, values and
    output, and a float32 number a head; Qwen's rotation keeps the product that queries and keys are parts of besides.
    The MLP: what `activations` counts, the input of its last matrix among them. And the inputs of the other
    matrices."""
    h, c = vision.hidden, plan.compute
    norms = 2 * (FLOAT * h + 2 * FLOAT)
    attention = c * (4 if vision.tile else 6) * h + FLOAT * vision.heads
    return norms + attention + c * vision.activations * vision.inner + _inputs(vision, plan)


def _inputs(vision: VisionShape, plan: TrainingPlan) -> float:
    """Return what matrices save of their inputs: adapters copy each for itself. Trained ones: CLIP casts for q, k, v
    and fc1 and shares what the attention put out; Qwen joins what each window put out, and casts what a LayerNorm did,
    or keeps what an RMSNorm normed before and after its weight."""
    if plan.vision == "frozen":
        return 0.0
    if plan.vision == "lora":
        copied = sum(inputs for inputs, _ in vision.matrices[:-1])
        return plan.compute * (copied + plan.rank * len(vision.matrices))
    return plan.compute * vision.hidden * {3: 4, 2: 3, 4: 5}[vision.activations]


def projector(vision: VisionShape, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return what the projector saves: of the function between its matrices what it reads, their inputs where they
    learn, and Qwen's norms where the gradient goes through them."""
    if not (learns(plan) or reached(vision, plan)):
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


def moment(vision: VisionShape, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return the most that the encoder needs for a moment. LLaVA asks for what all layers put out
    (modeling_llava_next.py, output_hidden_states), and there is the MLP of one. Qwen keeps the pixels in the type of
    the weights meanwhile, and rotates queries and keys in float32: eight tensors of that width."""
    h, c = vision.hidden, plan.compute
    if vision.tile:
        each = (vision.layers + 1) * stream(vision, plan) * h + c * vision.activations * vision.inner
    else:
        each = c * vision.values + 8 * FLOAT * h + 4 * c * h + 2 * FLOAT * (h // vision.heads)
    return float(batch.images.patches * each)


def remade(vision: VisionShape, plan: TrainingPlan, batch: BatchShape) -> float:
    """Return what a checkpointed layer of the encoder makes again."""
    again = reached(vision, plan) and plan.checkpointing != "off"
    return batch.images.patches * _layer(vision, plan) if again else 0.0

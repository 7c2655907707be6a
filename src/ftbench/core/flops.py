"""Training FLOPs from what was trained.

Convention: a multiply-add is 2 FLOPs; attention is causal (half of the square); recomputation counts in HFU only; the
output head counts for the tokens that carry loss, since no other needs logits, and the input embedding does not; a
mixture of experts counts the experts a token visits.
Sources: Kaplan et al. 2020 (6 N for full training), PaLM (Chowdhery et al. 2022) appendix B (MFU and the attention
term); for LoRA the frozen weights need no weight gradient, which leaves 4 N.
"""

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MatmulShape:
    """What a token passes through, counted on the live model.

    base: parameters of matrix products of the base model's layers that one token uses, without the output head.
    base_trained: of these, the ones that are trained themselves.
    head, head_trained: the same of the output head.
    adapters: parameters of adapter matrices that one token uses.
    attention_width: heads x head_dim of each layer, in order; 0 for a layer without attention products.
    windows: sliding window of each layer in tokens, None for full attention.
    """

    base: int
    base_trained: int
    head: int
    head_trained: int
    adapters: int
    attention_width: tuple[int, ...]
    windows: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class VisionMatmulShape:
    """What a patch of an image passes through, counted on the live model.

    encoder, encoder_trained: parameters of the encoder's matrices, and of these the trained ones.
    projector, projector_trained: the same of the projector, as a share of one patch where several become one token.
    encoder_adapters, projector_adapters: parameters of the adapters on them.
    width: heads x head_dim of a layer of the encoder.
    windows: patches that a patch sees in each layer, None for all of its image or tile.
    """

    encoder: int
    encoder_trained: int
    encoder_adapters: int
    projector: float
    projector_trained: float
    projector_adapters: float
    width: int
    windows: tuple[int | None, ...]


def vision_per_patch(shape: VisionMatmulShape, length: float, recompute: float = 0.0) -> float:
    """Return the FLOPs that a patch needs in encoder and projector, among `length` patches that see each other, all of
    them in both directions. What is frozen and has nothing trained before it needs a forward pass alone: the gradient
    ends there. `recompute` is the share of the encoder's layers whose forward pass is made again."""
    learns = bool(shape.encoder_trained or shape.encoder_adapters)
    attention = sum(4 * shape.width * min(length, window or length) for window in shape.windows)
    passes = (3 + recompute) if learns else 1
    encoder = 2 * shape.encoder * (2 + recompute if learns else 1) + 2 * shape.encoder_trained
    reached = learns or bool(shape.projector_trained or shape.projector_adapters)
    projector = 2 * shape.projector * (2 if reached else 1) + 2 * shape.projector_trained
    adapters = (6 + 2 * recompute) * shape.encoder_adapters + 6 * shape.projector_adapters
    return encoder + passes * attention + projector + adapters


def linear_per_token(shape: MatmulShape) -> int:
    """Return the FLOPs a token needs in the layers' products with weights: forward 2 N, gradient of the input 2 N,
    gradient of the weights 2 N for those that are trained; adapters are trained, so 6 of each."""
    return 4 * shape.base + 2 * shape.base_trained + 6 * shape.adapters


def head_per_token(shape: MatmulShape) -> int:
    """Return the FLOPs that the logits of one token need, forward and backward."""
    return 4 * shape.head + 2 * shape.head_trained


def linear_recompute_per_token(shape: MatmulShape) -> int:
    """Return what full gradient checkpointing adds: one more forward pass of the layers."""
    return 2 * shape.base + 2 * shape.adapters


def attention_per_token(shape: MatmulShape, length: float, passes: int = 3) -> float:
    """Return the FLOPs a token needs in attention products in a causal sequence of `length` tokens.

    Scores and values each take 2 * width * context FLOPs forward and twice that backward (`passes` = 3; 1 for a forward
    alone); the mean context of a causal sequence is length / 2, or less under a sliding window.
    """
    kinds = Counter(zip(shape.attention_width, shape.windows, strict=True))
    return sum(layers * passes * 4 * width * _mean_context(length, window) for (width, window), layers in kinds.items())


def _mean_context(length: float, window: int | None) -> float:
    if window is None or length <= window:
        return length / 2
    return window - window * window / (2 * length)


def forward_flops(shape: MatmulShape, tokens: float, heads: float, length: float) -> float:
    """Return the FLOPs of one forward pass without adapters, as of a reference that nothing is learned of: `tokens`
    tokens in sequences of `length`, and logits of `heads` of them."""
    return tokens * (2 * shape.base + attention_per_token(shape, length, passes=1)) + 2 * heads * shape.head


def model_flops(shape: MatmulShape, tokens: float, labels: float, length: float) -> float:
    """Return the FLOPs the model's mathematics needs for `tokens` tokens, of which `labels` carry loss, in sequences of
    `length` tokens (the token-weighted mean)."""
    return tokens * (linear_per_token(shape) + attention_per_token(shape, length)) + labels * head_per_token(shape)


def hardware_flops(
    shape: MatmulShape, positions: float, head_positions: float, length: float, recompute: float, head_recompute: bool
) -> float:
    """Return the FLOPs computed for `positions` positions, padding included, and logits of `head_positions` of them;
    with what gradient checkpointing (in `recompute`, a share of the layers) and a loss over chunks (`head_recompute`)
    compute a second time. Attention is counted as causal here too, also where a kernel computes the whole square."""
    layers = linear_per_token(shape) + attention_per_token(shape, length)
    layers += recompute * (linear_recompute_per_token(shape) + attention_per_token(shape, length, passes=1))
    head = head_per_token(shape) + (2 * shape.head if head_recompute else 0)
    return positions * layers + head_positions * head

"""Compute the FLOPs of training.

Conventions: a multiply-add counts as 2 FLOPs. N is the number of parameters that a token uses. Attention is causal, so
half of the score matrix counts. Recomputation counts only in HFU (hardware FLOPs utilization). The output head counts
only for label tokens. The input embedding does not count. In a mixture of experts, only active experts count. Full
training needs 6 N FLOPs per token (Kaplan et al. 2020). With LoRA, frozen weights need no weight gradient, so 4 N
remain. MFU and the attention term are from PaLM (Chowdhery et al. 2022), appendix B.
"""

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MatmulShape:
    """Sizes of the weight matrices and of attention, to compute the FLOPs of one token.

    Attributes:
        base: Parameters of the layers' matrices that one token uses, without the output head.
        base_trained: The trained part of `base`.
        head: Parameters of the output head.
        head_trained: The trained part of `head`.
        adapters: Parameters of the adapter matrices that one token uses.
        attention_width: heads * head_dim of each layer; 0 for a layer without attention.
        windows: Sliding window of each layer in tokens; None for full attention.
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
    """Sizes of the vision encoder and the projector, to compute the FLOPs of one image patch.

    Attributes:
        encoder: Parameters of the encoder's matrices.
        encoder_trained: The trained part of `encoder`. `encoder_adapters` are the parameters of its adapters.
        projector: Parameters of the projector, divided by the number of patches per image token.
        projector_trained: The trained part of `projector`.
        projector_adapters: Parameters of the projector's adapters, with the same division.
        width: heads * head_dim of an encoder layer.
        windows: Attention window of each layer in patches; None for the full image or tile.
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
    """Return the FLOPs of one image patch in the vision encoder and the projector. Attention is bidirectional.

    A frozen encoder needs only a forward pass. A frozen projector also needs a backward pass if the encoder is trained.

    Args:
        shape: The encoder and projector.
        length: Number of patches that attend to each other.
        recompute: Share of the encoder layers (0 to 1) that gradient checkpointing recomputes.
    """
    learns = bool(shape.encoder_trained or shape.encoder_adapters)
    attention = sum(4 * shape.width * min(length, window or length) for window in shape.windows)
    passes = (3 + recompute) if learns else 1
    encoder = 2 * shape.encoder * (2 + recompute if learns else 1) + 2 * shape.encoder_trained
    reached = learns or bool(shape.projector_trained or shape.projector_adapters)
    projector = 2 * shape.projector * (2 if reached else 1) + 2 * shape.projector_trained
    adapters = (6 + 2 * recompute) * shape.encoder_adapters + 6 * shape.projector_adapters
    return encoder + passes * attention + projector + adapters


def linear_per_token(shape: MatmulShape) -> int:
    """Return the FLOPs of one token in the layers' matrices. A matrix with N weights needs 2 N in the forward pass, 2 N
    for the input gradient, and 2 N for the weight gradient if it is trained. Adapters are always trained."""
    return 4 * shape.base + 2 * shape.base_trained + 6 * shape.adapters


def head_per_token(shape: MatmulShape) -> int:
    """Return the FLOPs of the output head for one token, in the forward and the backward pass."""
    return 4 * shape.head + 2 * shape.head_trained


def linear_recompute_per_token(shape: MatmulShape) -> int:
    """Return the FLOPs per token of a second forward pass through all layers (gradient checkpointing)."""
    return 2 * shape.base + 2 * shape.adapters


def attention_per_token(shape: MatmulShape, length: float, passes: int = 3) -> float:
    """Return the FLOPs of one token in the attention of all layers, in a causal sequence of `length` tokens.

    A layer has two products: queries * keys and scores * values. Each product needs 2 * width * context FLOPs in the
    forward pass. The backward pass needs twice the FLOPs of the forward pass. `passes` is 1 for the forward pass, or 3
    with the backward pass. `context` is the mean number of attended tokens: length / 2, or less with a sliding window.
    """
    kinds = Counter(zip(shape.attention_width, shape.windows, strict=True))
    return sum(layers * passes * 4 * width * _mean_context(length, window) for (width, window), layers in kinds.items())


def _mean_context(length: float, window: int | None) -> float:
    if window is None or length <= window:
        return length / 2
    return window - window * window / (2 * length)


def forward_flops(shape: MatmulShape, tokens: float, heads: float, length: float) -> float:
    """Return the FLOPs of one forward pass without adapters, for example of the reference model in DPO.

    Args:
        shape: The model.
        tokens: Number of tokens.
        heads: Number of tokens with logits.
        length: Sequence length in tokens.
    """
    return tokens * (2 * shape.base + attention_per_token(shape, length, passes=1)) + 2 * heads * shape.head


def model_flops(shape: MatmulShape, tokens: float, labels: float, length: float) -> float:
    """Return the FLOPs for MFU: the work that the model requires, without padding and recomputation. `tokens` is
    the number of real tokens, and `labels` that of label tokens. `length` is the mean sequence length in tokens,
    weighted by tokens."""
    return tokens * (linear_per_token(shape) + attention_per_token(shape, length)) + labels * head_per_token(shape)


def hardware_flops(
    shape: MatmulShape, positions: float, head_positions: float, length: float, recompute: float, head_recompute: bool
) -> float:
    """Return the FLOPs for HFU: the work that the GPU does, including padding and recomputation.

    Only the causal half of attention counts, even if a kernel computes the full score matrix.

    Args:
        positions: Number of positions, including padding.
        head_positions: Number of positions with logits.
        length: Mean sequence length in tokens, weighted by tokens.
        recompute: Share of the layers (0 to 1) that gradient checkpointing recomputes.
        head_recompute: Whether a chunked loss recomputes the logits.
    """
    layers = linear_per_token(shape) + attention_per_token(shape, length)
    layers += recompute * (linear_recompute_per_token(shape) + attention_per_token(shape, length, passes=1))
    head = head_per_token(shape) + (2 * shape.head if head_recompute else 0)
    return positions * layers + head_positions * head

"""Compute training FLOPs.

Convention: a multiply-add is 2 FLOPs, and N is the number of parameters that a token uses. Attention is causal (half of
the square). Recomputation counts in HFU only. The output head counts for label tokens only, and the input embedding
does not count. In a mixture of experts, only active experts count.
Sources: Kaplan et al. 2020 (6 N for full training), PaLM (Chowdhery et al. 2022) appendix B (MFU and the attention
term). With LoRA the frozen weights need no weight gradient, which leaves 4 N.
"""

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MatmulShape:
    """The matrix products of one token, counted on the live model.

    Attributes:
        base: Parameters of the layers' matrices that one token uses, without the output head.
        base_trained: The parameters of `base` that are trained.
        head: Parameters of the output head.
        head_trained: The parameters of `head` that are trained.
        adapters: Parameters of the adapter matrices that one token uses.
        attention_width: heads x head_dim of each layer; 0 for a layer without attention.
        windows: Sliding window of each layer in tokens, None for full attention.
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
    """The matrix products of one image patch, counted on the live model.

    Attributes:
        encoder: Parameters of the encoder's matrices.
        encoder_trained: The parameters of `encoder` that are trained.
        encoder_adapters: Parameters of the encoder's adapters.
        projector: Parameters of the projector per patch: divided by the number of patches per token.
        projector_trained: The parameters of `projector` that are trained.
        projector_adapters: Parameters of the projector's adapters, divided in the same way.
        width: heads x head_dim of an encoder layer.
        windows: Attention window of each layer in patches, None for the full image or tile.
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
    """Return the FLOPs of one patch in encoder and projector. Attention is bidirectional.

    If a part is frozen and no part before it is trained, it needs only a forward pass.

    Args:
        shape: The encoder and projector.
        length: Number of patches that attend to each other.
        recompute: Share of the encoder's layers whose forward pass is recomputed.
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
    """Return the FLOPs of one token in the layers' weight matrices: forward 2 N, input gradient 2 N, weight gradient
    2 N for trained weights. Adapters are trained and need 6 N."""
    return 4 * shape.base + 2 * shape.base_trained + 6 * shape.adapters


def head_per_token(shape: MatmulShape) -> int:
    """Return the FLOPs of the logits of one token, forward and backward."""
    return 4 * shape.head + 2 * shape.head_trained


def linear_recompute_per_token(shape: MatmulShape) -> int:
    """Return the FLOPs of one recomputed forward pass of the layers (gradient checkpointing)."""
    return 2 * shape.base + 2 * shape.adapters


def attention_per_token(shape: MatmulShape, length: float, passes: int = 3) -> float:
    """Return the FLOPs of one token in attention, in a causal sequence of `length` tokens.

    The products of queries with keys, and of scores with values, each need 2 * width * context FLOPs in the forward
    pass, and twice as many in the backward pass. `passes` is 3, or 1 for a forward pass only. `context` is the mean
    number of tokens that a token attends to: length / 2, or less with a sliding window.
    """
    kinds = Counter(zip(shape.attention_width, shape.windows, strict=True))
    return sum(layers * passes * 4 * width * _mean_context(length, window) for (width, window), layers in kinds.items())


def _mean_context(length: float, window: int | None) -> float:
    if window is None or length <= window:
        return length / 2
    return window - window * window / (2 * length)


def forward_flops(shape: MatmulShape, tokens: float, heads: float, length: float) -> float:
    """Return the FLOPs of one forward pass without adapters, such as that of a reference model.

    Args:
        shape: The model.
        tokens: Number of tokens.
        heads: Number of tokens whose logits are computed.
        length: Sequence length in tokens.
    """
    return tokens * (2 * shape.base + attention_per_token(shape, length, passes=1)) + 2 * heads * shape.head


def model_flops(shape: MatmulShape, tokens: float, labels: float, length: float) -> float:
    """Return the FLOPs that the model requires (for MFU).

    Args:
        shape: The model.
        tokens: Number of tokens.
        labels: Number of label tokens.
        length: Token-weighted mean sequence length.
    """
    return tokens * (linear_per_token(shape) + attention_per_token(shape, length)) + labels * head_per_token(shape)


def hardware_flops(
    shape: MatmulShape, positions: float, head_positions: float, length: float, recompute: float, head_recompute: bool
) -> float:
    """Return the FLOPs that are computed, including padding and recomputation (for HFU).

    Attention counts as causal, even if a kernel computes the full square.

    Args:
        shape: The model.
        positions: Number of positions, including padding.
        head_positions: Number of positions whose logits are computed.
        length: Token-weighted mean sequence length.
        recompute: Share of the layers that gradient checkpointing recomputes.
        head_recompute: Whether a chunked loss recomputes the logits.
    """
    layers = linear_per_token(shape) + attention_per_token(shape, length)
    layers += recompute * (linear_recompute_per_token(shape) + attention_per_token(shape, length, passes=1))
    head = head_per_token(shape) + (2 * shape.head if head_recompute else 0)
    return positions * layers + head_positions * head

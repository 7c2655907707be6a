"""Training FLOPs from what was trained.

Convention: a multiply-add is 2 FLOPs; attention is causal (half of the square); recomputation counts in HFU only; the
output head counts for the tokens that carry loss, since no other needs logits, and the input embedding does not; a
mixture of experts counts the experts a token visits.
Sources: Kaplan et al. 2020 (6 N for full training), PaLM (Chowdhery et al. 2022) appendix B (MFU and the attention
term); for LoRA the frozen weights need no weight gradient, which leaves 4 N.
"""

from __future__ import annotations

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

"""How a model is trained, as far as its memory depends on it. The spec is turned into this in `estimate/recipe.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Loss = Literal["trl", "chunked", "liger", "unsloth"]
Attention = Literal["sdpa", "masked", "eager", "flash", "varlen"]
Checkpointing = Literal["off", "full", "selective", "offload", "unsloth"]
Fused = Literal["off", "augmented", "beside"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """Bytes are those of one element.

    weight: of the 16- or 32-bit weights as loaded; upcast: of embedding, head and norms once peft has prepared a
    quantised model (float32); compute: of what products are made in; autocast: whether products cast their inputs.
    adapter: of the adapters, 0 without. targets: what has adapters, of `q k v o gate up down experts`.
    mxfp4: the experts stay in 4 bits as gpt-oss is published. checkpointing: `offload` and `unsloth` keep layer inputs
    in host memory. chunk: label tokens of a chunk of our loss. fused: how fused_lora multiplies adapters
    (worker/adapter_products.py).
    attention: `masked` is sdpa with a mask, made where rows hold padding or several samples.
    """

    full: bool = False
    quantised: bool = False
    mxfp4: bool = False
    unsloth: bool = False
    weight: int = 2
    upcast: int = 2
    compute: int = 2
    autocast: bool = True
    adapter: int = 0
    rank: int = 0
    targets: frozenset[str] = field(default_factory=frozenset)
    double_quant: bool = True
    optimizer: str = "adamw_torch"
    checkpointing: Checkpointing = "off"
    offload: bool = False
    attention: Attention = "sdpa"
    loss: Loss = "trl"
    chunk: int = 2048
    liger: bool = False
    compiled: bool = False
    fp8: bool = False
    fused: Fused = "off"

    @property
    def stream(self) -> int:
        """Bytes of an element of the residual stream, which has the type of the embedding."""
        return self.upcast

    @property
    def product(self) -> int:
        """Bytes of an element that a linear layer puts out: bitsandbytes gives back the type it was given, others
        the type they compute in."""
        return self.stream if self.quantised and not self.mxfp4 else self.compute


@dataclass(frozen=True, slots=True)
class Batch:
    """The largest batch as the model sees it: `rows` of `length` positions, of which `labels` carry loss."""

    rows: int
    length: int
    labels: int

    @property
    def tokens(self) -> int:
        return self.rows * self.length

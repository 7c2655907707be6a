"""Small shapes of model families, in the format of config.json."""

from __future__ import annotations

from typing import Any

_DECODER = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
_SLIDING = {"head_dim": 16, "sliding_window": 32}
SHAPES: dict[str, dict[str, Any]] = {
    "gemma2": _SLIDING,
    "gemma3_text": _SLIDING,
    "phi3": {},
    "olmo2": {},
    "smollm3": {},
    "granite": {},
    "cohere2": _SLIDING,
    "glm4": {"head_dim": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip


def config_of(family: str) -> dict[str, Any]:
    return {"model_type": family, **_DECODER, **SHAPES[family]}

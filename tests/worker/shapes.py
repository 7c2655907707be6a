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
    "deepseek_v3": {
        "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "n_shared_experts": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    },
    "qwen3_next": {
        "head_dim": 16, "num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    },
}  # fmt: skip


def config_of(family: str) -> dict[str, Any]:
    return {"model_type": family, **_DECODER, **SHAPES[family]}

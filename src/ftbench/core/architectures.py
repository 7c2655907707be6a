"""Shapes of public models (facts/architectures.yaml) as Hugging Face configurations, and their parameter counts.

A random-weight model needs nothing but this; `ftbench list models` shows it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from ftbench.facts import read_facts

# What a family's models share, from their published config.json files.
_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"vocab_size": 151936, "head_dim": 128, "rms_norm_eps": 1e-6, "max_position_embeddings": 40960,
              "rope_theta": 1_000_000.0},
    "qwen3_moe": {"vocab_size": 151936, "head_dim": 128, "rms_norm_eps": 1e-6, "max_position_embeddings": 40960,
                  "rope_theta": 1_000_000.0, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "gpt_oss": {"vocab_size": 201088, "head_dim": 64, "sliding_window": 128, "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-5, "rope_theta": 150_000.0},
    "llama": {"vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0},
    "mistral": {"vocab_size": 32000, "max_position_embeddings": 32768, "sliding_window": 4096, "rms_norm_eps": 1e-5,
                "rope_theta": 10_000.0},
    "qwen2": {"vocab_size": 152064, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
              "rope_theta": 1_000_000.0, "use_sliding_window": False},
}  # fmt: skip


@cache
def architectures() -> dict[str, dict[str, Any]]:
    """Model id → configuration with `model_type`. Vision towers are not text models and stay out."""
    table: dict[str, dict[str, Any]] = {}
    for file in ("architectures.yaml", "tiny.yaml"):
        for family, models in read_facts(file).items():
            if family in _FAMILIES:
                for name, shape in models.items():
                    config = _FAMILIES[family] | shape
                    config.pop("parameters", None)
                    table[name] = {"model_type": family, **config}
    return table


def parameter_count(config: dict[str, Any]) -> dict[str, int]:
    """Parameters per module kind (`embedding, attention, mlp, experts, router, norm, head`; tied heads count 0).

    Shapes as in the families' transformers implementations: grouped-query attention with q/k norms (qwen3) or biases
    (qwen2, gpt_oss), gated MLP, experts as fused matrices (with biases and attention sinks in gpt_oss).
    """
    family, hidden, layers = config["model_type"], config["hidden_size"], config["num_hidden_layers"]
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    width, kv_width = heads * head_dim, kv * head_dim
    attention = hidden * (2 * width + 2 * kv_width)
    if family == "qwen2":
        attention += width + 2 * kv_width
    if family == "gpt_oss":
        attention += width + 2 * kv_width + hidden + heads
    experts = config.get("num_experts") or config.get("num_local_experts") or 0
    inner = config.get("moe_intermediate_size", config["intermediate_size"])
    per_expert = 3 * hidden * inner + (2 * inner + hidden if family == "gpt_oss" else 0)
    norms = 2 * hidden + (2 * head_dim if family.startswith("qwen3") else 0)
    vocab = config["vocab_size"] * hidden
    return {
        "embedding": vocab,
        "attention": layers * attention,
        "mlp": 0 if experts else layers * 3 * hidden * config["intermediate_size"],
        "experts": layers * experts * per_expert,
        "router": layers * experts * (hidden + (1 if family == "gpt_oss" else 0)),
        "norm": layers * norms + hidden,
        "head": 0 if config.get("tie_word_embeddings") else vocab,
    }


MXFP4_BITS = 4 + 8 / 32  # a value of 4 bits, and 8 bits of scale for 32 of them


def weight_bytes(config: dict[str, Any], width: float, mxfp4: bool = False) -> float:
    """Bytes of all weights with `width` bytes each; with `mxfp4` the experts' matrices (not their biases) take 4.25
    bits a value, as gpt-oss is published."""
    count = sum(parameter_count(config).values())
    if not mxfp4:
        return count * width
    per_expert: int = 3 * config["hidden_size"] * config["intermediate_size"]
    packed: int = config["num_hidden_layers"] * config["num_local_experts"] * per_expert
    return (count - packed) * width + packed * MXFP4_BITS / 8

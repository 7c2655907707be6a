"""Describe decoders with experts: qwen3_moe, mixtral and gpt_oss."""

from typing import Any

from ftbench.families.config import Config
from ftbench.families.dense import attention, mlp
from ftbench.families.shape import Experts, Layer, Norm

DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"use_sliding_window": False},
    "mixtral": {},
    "gpt_oss": {"attention_bias": True, "head_dim": 64, "num_key_value_heads": 8},
}


def layers(family: str, config: Config) -> tuple[Layer, ...]:
    """Return the layers of a mixture of experts. Raise ValueError if the config.json has an invalid value."""
    hidden, heads, width = config.whole("hidden_size"), config.whole("num_attention_heads"), config.head_dim
    kv_heads, bias = config.whole("num_key_value_heads", heads), bool(config.get("attention_bias"))
    query, key = heads * width, kv_heads * width
    norms = [Norm(hidden), Norm(hidden)]
    if family == "qwen3_moe":
        norms += [Norm(query, heads, "head"), Norm(key, kv_heads, "head")]
    linears = attention(hidden, query, key, bias, bias)
    dense = dense_layers(config) if family == "qwen3_moe" else set()
    sinks = family == "gpt_oss"

    def layer(index: int, window: int | None) -> Layer:
        inner = config.whole("intermediate_size") if index in dense else 0
        return Layer(
            hidden, heads, kv_heads, width, inner, (*linears, *(mlp(hidden, inner) if inner else ())),
            tuple(norms), "float" if sinks else "plain", window, None if inner else experts(family, config),
            sinks=sinks, others=heads if sinks else 0,
        )  # fmt: skip

    windows = config.windows({"gpt_oss": 2, "mixtral": 0, "qwen3_moe": 0}[family])
    return tuple(layer(index, window) for index, window in enumerate(windows))


def experts(family: str, config: Config) -> Experts:
    """Return the experts of one layer. Raise ValueError if a token uses more experts than the layer has."""
    count = config.whole("num_experts" if config.get("num_experts") else "num_local_experts")
    inner = config.whole("moe_intermediate_size", config.whole("intermediate_size"))
    active, hidden = config.whole("num_experts_per_tok"), config.whole("hidden_size")
    if active > count:
        raise ValueError(f"config.json: num_experts_per_tok is {active} and must be at most {count}")
    if family == "gpt_oss":
        return Experts(count, active, inner, "chosen", clamped=True, biases=2 * inner + hidden, router_biases=count)
    return Experts(count, active, inner, float_weights=family == "mixtral")


def dense_layers(config: Config) -> set[int]:
    """Return the indices of the layers with an MLP instead of experts, in a Qwen mixture of experts."""
    step = config.whole("decoder_sparse_step", 1)
    named = config.get("mlp_only_layers") or []
    if not isinstance(named, list) or not all(type(layer) is int for layer in named):
        raise ValueError("config.json: mlp_only_layers must be a list of layer indices")
    return set(named) | {index for index in range(config.whole("num_hidden_layers")) if (index + 1) % step}

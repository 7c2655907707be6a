"""Decoders with experts: qwen3_moe, mixtral and gpt_oss (ordinary attention), deepseek_v3 and qwen3_next."""

import math
from dataclasses import replace
from typing import Any

from ftbench.families.config import Config
from ftbench.families.dense import attention, mlp
from ftbench.families.shape import DeltaNet, Experts, Layer, Linear, Norm

DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"use_sliding_window": False},
    "mixtral": {},
    "gpt_oss": {"attention_bias": True, "head_dim": 64, "num_key_value_heads": 8},
}


def layers(family: str, config: Config) -> tuple[Layer, ...]:
    """Return the layers of a mixture of experts. Raise ValueError for an invalid value."""
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
            hidden, heads, kv_heads, width, width, inner, (*linears, *(mlp(hidden, inner) if inner else ())),
            tuple(norms), "float" if sinks else "plain", window, None if inner else experts(family, config),
            sinks=sinks, others=heads if sinks else 0,
        )  # fmt: skip

    windows = config.windows({"gpt_oss": 2, "mixtral": 0, "qwen3_moe": 0}[family])
    return tuple(layer(index, window) for index, window in enumerate(windows))


def experts(family: str, config: Config) -> Experts:
    """Return the experts of one layer. Raise ValueError if a token visits more experts than the layer has."""
    count = config.whole("num_experts" if config.get("num_experts") else "num_local_experts")
    inner = config.whole("moe_intermediate_size", config.whole("intermediate_size"))
    active, hidden = visited(config, count), config.whole("hidden_size")
    if family == "gpt_oss":
        return Experts(count, active, inner, "chosen", clamped=True, biases=2 * inner + hidden, router_biases=count)
    return Experts(count, active, inner, float_weights=family == "mixtral")


def visited(config: Config, count: int) -> int:
    """Return the number of experts that a token visits. Raise ValueError if it is above `count`."""
    active = config.whole("num_experts_per_tok")
    if active > count:
        raise ValueError(f"config.json: num_experts_per_tok is {active} and must be at most {count}")
    return active


def dense_layers(config: Config) -> set[int]:
    """Return the indices of layers with an MLP instead of experts in a Qwen mixture of experts."""
    step = config.whole("decoder_sparse_step", 1)
    named = config.get("mlp_only_layers") or []
    if not isinstance(named, list) or not all(type(layer) is int for layer in named):
        raise ValueError("config.json: mlp_only_layers must be a list of layer indices")
    return set(named) | {index for index in range(config.layers) if (index + 1) % step}


# --- deepseek_v3: queries, keys and values through latent vectors; dense first layers, then routed and shared experts

DEEPSEEK_DEFAULTS = {"first_k_dense_replace": 3, "n_shared_experts": 1}


def deepseek_layers(family: str, config: Config) -> tuple[Layer, ...]:
    """Return the layers. Raise ValueError for an invalid value."""
    hidden, heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    rotated, plain = config.whole("qk_rope_head_dim"), config.whole("qk_nope_head_dim")
    value, latent = config.whole("v_head_dim"), config.whole("kv_lora_rank")
    query_latent, bias = config.count("q_lora_rank"), bool(config.get("attention_bias"))
    width = plain + rotated
    linears = (
        *_queries(hidden, query_latent, heads * width, bias),
        Linear("kv_a_proj_with_mqa", hidden, latent + rotated, "input", "attention", bias),
        Linear("kv_b_proj", latent, heads * (plain + value), "key latent", "attention"),
        Linear("o_proj", heads * value, hidden, "attention", "attention", bias),
    )
    norms = [Norm(hidden), Norm(hidden), Norm(latent, position="product")]
    norms += [Norm(query_latent, position="product")] if query_latent else []

    def layer(index: int) -> Layer:
        routed = None if index < config.count("first_k_dense_replace") else _routed_experts(config)
        widths = ("moe_intermediate_size", "n_shared_experts") if routed else ("intermediate_size",)
        inner = math.prod(map(config.whole, widths))
        return Layer(
            hidden, heads, heads, width, value, inner, (*linears, *mlp(hidden, inner)), tuple(norms), experts=routed,
            fused_values=heads * plain,
        )  # fmt: skip

    return tuple(layer(index) for index in range(config.layers))


def _queries(hidden: int, latent: int, width: int, bias: bool) -> tuple[Linear, ...]:
    if not latent:
        return (Linear("q_proj", hidden, width, "input", "attention"),)
    down = Linear("q_a_proj", hidden, latent, "input", "attention", bias)
    return down, Linear("q_b_proj", latent, width, "query latent", "attention")


def _routed_experts(config: Config) -> Experts:
    count = config.whole("n_routed_experts" if config.get("n_routed_experts") else "num_local_experts")
    inner = config.whole("moe_intermediate_size")
    return Experts(count, visited(config, count), inner, "sigmoid", shared_after=True)


# --- qwen3_next: linear attention, every fourth layer gated softmax attention, routed experts and a shared one --------

QWEN3_NEXT_DEFAULTS = {
    "head_dim": 256, "num_key_value_heads": 2, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4, "decoder_sparse_step": 1,
}  # fmt: skip


def qwen3_next_layers(family: str, config: Config) -> tuple[Layer, ...]:
    """Return the layers. By default every fourth has full attention. Raise ValueError for an invalid value."""
    dense = dense_layers(config)
    return tuple(
        _with_mlp((_full if kind == "full_attention" else _linear)(config), config, index in dense)
        for index, kind in enumerate(config.kinds(config.whole("full_attention_interval")))
    )


def _full(config: Config) -> Layer:
    """Return a layer of softmax attention. Its q_proj also computes the gate of its output."""
    hidden, heads, width = config.whole("hidden_size"), config.whole("num_attention_heads"), config.head_dim
    kv_heads, bias = config.whole("num_key_value_heads", heads), bool(config.get("attention_bias"))
    query, key = heads * width, kv_heads * width
    gate, *others = attention(hidden, query, key, bias, bias)
    linears = (replace(gate, outputs=2 * query), *others[:2], replace(others[2], reads="gated attention"))
    norms = (Norm(hidden), Norm(hidden), Norm(query, heads, "head"), Norm(key, kv_heads, "head"))
    return Layer(hidden, heads, kv_heads, width, width, 0, linears, norms, "float", gated_heads=True)


def _linear(config: Config) -> Layer:
    """Return a layer of linear attention."""
    hidden = config.whole("hidden_size")
    keys, values = config.whole("linear_num_key_heads"), config.whole("linear_num_value_heads")
    key, value = config.whole("linear_key_head_dim"), config.whole("linear_value_head_dim")
    delta = DeltaNet(keys, values, key, value, config.whole("linear_conv_kernel_dim"))
    linears = (
        Linear("in_proj_qkvz", hidden, 2 * keys * key + 2 * values * value, "input", "attention"),
        Linear("in_proj_ba", hidden, 2 * values, "input", "attention"),
        Linear("out_proj", values * value, hidden, "normed attention", "attention"),
    )
    convolution = delta.convolved * delta.kernel
    norm = value  # one weight for the outputs of all heads
    return Layer(
        hidden, 0, 0, 0, 0, 0, linears, (Norm(hidden), Norm(hidden)), "float", delta=delta,
        others=convolution + 2 * values + norm, matrices=convolution,
    )  # fmt: skip


def _with_mlp(layer: Layer, config: Config, is_dense: bool) -> Layer:
    hidden = layer.hidden
    if is_dense:
        inner = config.whole("intermediate_size")
        return replace(layer, inner=inner, linears=(*layer.linears, *mlp(hidden, inner)))
    inner, count = config.whole("shared_expert_intermediate_size"), config.whole("num_experts")
    experts = Experts(count, visited(config, count), config.whole("moe_intermediate_size"))
    gate = Linear("shared_expert_gate", hidden, 1, "mlp input", "mlp")
    linears = (*layer.linears, *mlp(hidden, inner), gate)
    return replace(layer, inner=inner, linears=linears, experts=experts, gated_expert=True)

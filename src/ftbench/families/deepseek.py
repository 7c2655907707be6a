"""deepseek_v3: queries, keys and values through latent vectors; dense first layers, then routed and shared experts."""

import math

from ftbench.families.config import Config
from ftbench.families.dense import mlp
from ftbench.families.moe import visited
from ftbench.families.shape import Experts, Layer, Linear, Norm

DEFAULTS = {"first_k_dense_replace": 3, "n_shared_experts": 1}


def layers(family: str, config: Config) -> tuple[Layer, ...]:
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
        routed = None if index < config.count("first_k_dense_replace") else _experts(config)
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


def _experts(config: Config) -> Experts:
    count = config.whole("n_routed_experts" if config.get("n_routed_experts") else "num_local_experts")
    inner = config.whole("moe_intermediate_size")
    return Experts(count, visited(config, count), inner, "sigmoid", shared_after=True)

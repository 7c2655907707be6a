"""qwen3_next: linear attention, every fourth layer gated softmax attention, routed experts and a shared one."""

from dataclasses import replace

from ftbench.families.config import Config
from ftbench.families.dense import attention, mlp
from ftbench.families.moe import dense_layers, visited
from ftbench.families.shape import DeltaNet, Experts, Layer, Linear, Norm

DEFAULTS = {
    "head_dim": 256, "num_key_value_heads": 2, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4, "decoder_sparse_step": 1,
}  # fmt: skip


def layers(family: str, config: Config) -> tuple[Layer, ...]:
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

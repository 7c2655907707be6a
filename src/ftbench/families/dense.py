"""Describe decoders with one gated MLP per layer: llama, and families with other norms, biases or fused matrices."""

from dataclasses import dataclass
from typing import Any, Literal

from ftbench.families.config import Config
from ftbench.families.shape import Layer, Linear, Norm, NormKind


@dataclass(frozen=True, slots=True)
class Dense:
    """The differences between a model family and llama.

    `defaults` are the configuration defaults of the family in transformers. `norms` is the position of the norms:
    before attention and MLP, after attention and MLP, before and after (`both`), or one norm for `parallel` attention
    and MLP. `qk_norm` normalizes queries and keys per head, or over all heads. `Config.kinds` explains `sliding`."""

    defaults: dict[str, Any]
    norms: Literal["before", "after", "both", "parallel"] = "before"
    norm_kind: NormKind = "plain"
    qk_norm: Literal["none", "head", "all"] = "none"
    qkv_bias: bool = False
    fused_qkv: bool = False
    fused_gate: bool = False
    part_rotated: bool = False
    sliding: int | None = None


_UNTIED: dict[str, Any] = {"tie_word_embeddings": False}
_TIED: dict[str, Any] = {"tie_word_embeddings": True}
_GEMMA: dict[str, Any] = {"head_dim": 256, "sliding_window": 4096}
DENSE = {
    "llama": Dense(_UNTIED),
    "mistral": Dense(_UNTIED, sliding=0),
    "qwen2": Dense(_UNTIED | {"use_sliding_window": False}, qkv_bias=True, sliding=0),
    "qwen3": Dense(_UNTIED | {"use_sliding_window": False}, qk_norm="head", sliding=0),
    "smollm3": Dense(_TIED | {"use_sliding_window": False, "num_key_value_heads": 4}),
    "granite": Dense(_UNTIED),
    "phi3": Dense(_UNTIED, fused_qkv=True, fused_gate=True, part_rotated=True, sliding=0),
    "olmo2": Dense(_UNTIED, norms="after", norm_kind="float", qk_norm="all"),
    "gemma2": Dense(_TIED | _GEMMA | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
                    norms="both", norm_kind="float", sliding=2),
    "gemma3_text": Dense(_TIED | _GEMMA, norms="both", norm_kind="float", qk_norm="head", sliding=6),
    "cohere2": Dense(_TIED | {"sliding_window": 4096}, norms="parallel", norm_kind="centred",
                     sliding=4),
    "glm4": Dense(_UNTIED | {"attention_bias": True, "head_dim": 128, "num_key_value_heads": 2}, norms="both",
                  fused_gate=True, part_rotated=True),
}  # fmt: skip


def layers(family: str, config: Config) -> tuple[Layer, ...]:
    """Return the layers of a dense model. Raise ValueError if the config.json has an invalid value."""
    form = DENSE[family]
    hidden, heads, width = config.whole("hidden_size"), config.whole("num_attention_heads"), config.head_dim
    kv_heads, inner = config.whole("num_key_value_heads", heads), config.whole("intermediate_size")
    bias = form.qkv_bias or bool(config.get("attention_bias"))
    query, key = heads * width, kv_heads * width
    # phi3 has no biases; glm4 and qwen2 have no bias in o_proj
    bias_out = bool(config.get("attention_bias")) and family not in ("qwen2", "glm4")
    linears = (
        *attention(hidden, query, key, bias, bias_out, fused=form.fused_qkv, copied=form.part_rotated),
        *mlp(hidden, inner, bool(config.get("mlp_bias")), form.fused_gate, parallel=form.norms == "parallel"),
    )
    before, after = Norm(hidden), Norm(hidden, position="after")
    each = form.qk_norm == "head"
    norms = (
        *{"before": (before, before), "after": (after, after), "both": (before, before, after, after),
          "parallel": (before,)}[form.norms],
        *(Norm(of * width, of if each else 1, "head") for of in (heads, kv_heads) if form.qk_norm != "none"),
    )  # fmt: skip

    def layer(window: int | None) -> Layer:
        return Layer(
            hidden, heads, kv_heads, width, inner, linears, norms, form.norm_kind, window,
            fused_values=query + key if form.fused_qkv else 0, softcap=bool(config.get("attn_logit_softcapping")),
        )  # fmt: skip

    return tuple(layer(window) for window in config.windows(form.sliding))


def attention(
    hidden: int, query: int, key: int, bias: bool, bias_out: bool, *, fused: bool = False, copied: bool = False
) -> tuple[Linear, ...]:
    """Return the linear layers of grouped-query attention.

    `fused` is phi3's single matrix for queries, keys and values. If `copied`, o_proj reads a contiguous copy of
    attention's output, because with a partial rotary embedding this output is not contiguous."""
    out = Linear("o_proj", query, hidden, "attention copy" if copied else "attention", "attention", bias_out)
    if fused:
        return Linear("qkv_proj", hidden, query + 2 * key, "input", "attention", bias), out
    sizes = {"q_proj": query, "k_proj": key, "v_proj": key}
    return *(Linear(name, hidden, size, "input", "attention", bias) for name, size in sizes.items()), out


def mlp(
    hidden: int, inner: int, bias: bool = False, fused: bool = False, *, parallel: bool = False
) -> tuple[Linear, ...]:
    """Return the linear layers of a gated MLP. `fused` joins gate and up. `parallel` uses attention's input."""
    source = "input" if parallel else "mlp input"
    down = Linear("down_proj", inner, hidden, "product", "mlp", bias)
    if fused:
        return Linear("gate_up_proj", hidden, 2 * inner, source, "mlp", bias), down
    return *(Linear(name, hidden, inner, source, "mlp", bias) for name in ("gate_proj", "up_proj")), down

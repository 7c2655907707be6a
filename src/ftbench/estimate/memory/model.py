"""What the terms need to know of a model: read from its config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ftbench.core.architectures import parameter_count
from ftbench.families import FAMILIES

_WHOLE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_WHOLE_IF_GIVEN = ("head_dim", "num_experts", "num_local_experts", "moe_intermediate_size", "sliding_window")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder: widths in elements, `parameters` by module kind as `parameter_count` has them.

    `experts` and `active` are 0 for a dense model; `inner` is then the MLP's width, else one expert's.
    `vision` is the parameters of a vision tower, 0 without one; `windows` the sliding window of each layer.
    """

    family: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    experts: int
    active: int
    parameters: dict[str, int]
    vision: int = 0

    @property
    def query(self) -> int:
        """Width of the queries of one token."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Width of the keys, and of the values, of one token."""
        return self.kv_heads * self.head_dim

    @property
    def qk_norm(self) -> bool:
        return self.family.startswith("qwen3")

    @property
    def total(self) -> int:
        return sum(self.parameters.values()) + self.vision

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer."""
        kinds = ("attention", "mlp", "experts", "router")
        return (sum(self.parameters[kind] for kind in kinds) + self.parameters["norm"] - self.hidden) // self.layers


class UnknownFamilyError(ValueError):
    """A model whose layers no term describes."""


def model_shape(config: dict[str, Any]) -> ModelShape:
    """A config.json as `ModelShape`. Raises ValueError with a sentence for one that is not understood: a key that is
    missing, a number that cannot be, or UnknownFamilyError for a family whose layers are not known."""
    text = {**config, **config["text_config"]} if isinstance(config.get("text_config"), dict) else config
    family = text.get("model_type")
    if family in ("llava", "llava_next", "qwen2_5_vl", "qwen2_5_vl_text"):
        family = {"l": "mistral", "q": "qwen2"}[str(family)[0]]
    if family not in FAMILIES:
        raise UnknownFamilyError(f"the layers of model_type {family!r} are not known; known are {', '.join(FAMILIES)}")
    text = {**text, "model_type": family}
    for key in _WHOLE:
        _whole(text, key)
    for key in _WHOLE_IF_GIVEN:
        if text.get(key):
            _whole(text, key)
    _windows_are(text)
    experts = text.get("num_experts") or text.get("num_local_experts") or 0
    inner = (text.get("moe_intermediate_size") if experts else None) or text["intermediate_size"]
    head_dim = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    active = _whole(text, "num_experts_per_tok") if experts else 0
    if not head_dim:
        raise ValueError(f"config.json: hidden_size {text['hidden_size']} is too small for its num_attention_heads")
    if active > experts:
        raise ValueError(f"config.json: num_experts_per_tok is {active}, and there are {experts} experts")
    text.setdefault("num_key_value_heads", text["num_attention_heads"])
    text.setdefault("moe_intermediate_size", inner)
    return ModelShape(
        family=family,
        hidden=text["hidden_size"],
        inner=inner,
        layers=text["num_hidden_layers"],
        heads=text["num_attention_heads"],
        kv_heads=_whole(text, "num_key_value_heads"),
        head_dim=head_dim,
        vocab=text["vocab_size"],
        tied=bool(text.get("tie_word_embeddings")),
        experts=experts,
        active=active,
        parameters=parameter_count(text),
        vision=vision_parameters(config["vision_config"]) if isinstance(config.get("vision_config"), dict) else 0,
    )


def _whole(config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"config.json: {key} is {value!r} and must be a whole number of 1 or more")
    return value


def _windows_are(config: dict[str, Any]) -> None:
    kinds, layers = config.get("layer_types"), config["num_hidden_layers"]
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != layers):
        raise ValueError(f"config.json: layer_types must be a list with a kind for each of the {layers} layers")


def vision_parameters(config: dict[str, Any]) -> int:
    """Parameters of a vision transformer: each layer has 4 h^2 of attention and the MLP's matrices (two in CLIP, three
    where it is gated, as in Qwen2.5-VL), and the patches are embedded by one matrix (CLIPVisionModel,
    Qwen2_5_VisionTransformer in transformers)."""
    hidden, gated = _whole(config, "hidden_size"), "depth" in config
    depth = _whole(config, "depth" if gated else "num_hidden_layers")
    layer = 4 * hidden * hidden + (3 if gated else 2) * hidden * _whole(config, "intermediate_size") + 9 * hidden
    patches = (
        3 * _whole(config, "patch_size") ** 2 * _whole({"temporal_patch_size": 1, **config}, "temporal_patch_size")
    )
    patches *= hidden
    return int(depth * layer + patches)

"""What the layers of a family of models are, for the estimates and the worker alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ftbench.families import deepseek, dense, moe, qwen3_next, vision
from ftbench.families.config import Config
from ftbench.families.shape import ModelShape

_DESCRIBED: dict[str, Callable[[str, dict[str, Any]], ModelShape]] = {
    **dict.fromkeys(dense.DENSE, dense.describe),
    **dict.fromkeys(moe.MOE, moe.describe),
    "deepseek_v3": deepseek.describe,
    "qwen3_next": qwen3_next.describe,
}
FAMILIES = tuple(_DESCRIBED)  # whose layers are known
_WHOLE_IF_GIVEN = ("head_dim", "num_experts", "num_local_experts", "moe_intermediate_size", "sliding_window")


class UnknownFamilyError(ValueError):
    """A model whose layers are not described."""


def describe(config: dict[str, Any]) -> ModelShape:
    """Return the shape of the model of a config.json. Raises ValueError with a sentence for one that is not understood:
    a key that is missing, a number that cannot be, or UnknownFamilyError for a family that is not described."""
    text = {**config, **config["text_config"]} if isinstance(config.get("text_config"), dict) else config
    family = vision.FAMILIES.get(str(config.get("model_type")), text.get("model_type"))
    if not isinstance(family, str) or family not in _DESCRIBED:
        raise UnknownFamilyError(f"the layers of model_type {family!r} are not known; known are {', '.join(FAMILIES)}")
    checked = Config(text, {})
    for key in _WHOLE_IF_GIVEN:
        if text.get(key):
            checked.whole(key)
    if text.get("num_experts"):
        moe.visited(checked, checked.whole("num_experts"))
    checked.kinds(None)
    shape = _DESCRIBED[family](family, text)
    if not isinstance(config.get("vision_config"), dict):
        return shape
    return replace(shape, vision=vision.describe(str(config.get("model_type")), config))

"""Describe the layers of the supported model families, for estimates and for the worker."""

from collections.abc import Callable
from typing import Any

from ftbench.families import dense, moe, vision
from ftbench.families.config import Config
from ftbench.families.shape import Layer, ModelShape

# The defaults of a family's configuration in transformers, and its layers.
_FAMILIES: dict[str, tuple[dict[str, Any], Callable[[str, Config], tuple[Layer, ...]]]] = {
    **{name: (form.defaults, dense.layers) for name, form in dense.DENSE.items()},
    **{name: (defaults, moe.layers) for name, defaults in moe.DEFAULTS.items()},
}
FAMILIES = tuple(_FAMILIES)


class UnknownFamilyError(ValueError):
    """The error for a config.json of a model family that ftbench does not support."""


def describe(config: dict[str, Any]) -> ModelShape:
    """Return the shape of the model that a config.json describes.

    Raises:
        UnknownFamilyError: ftbench does not support the model family.
        ValueError: A key is missing or has an invalid value."""
    text = {**config, **config["text_config"]} if isinstance(config.get("text_config"), dict) else config
    family = vision.FAMILIES.get(str(config.get("model_type")), text.get("model_type"))
    if not isinstance(family, str) or family not in _FAMILIES:
        raise UnknownFamilyError(f"no formula describes model_type {family!r} (known: {', '.join(FAMILIES)})")
    defaults, layers = _FAMILIES[family]
    checked, sees = Config(text, defaults), isinstance(config.get("vision_config"), dict)
    return ModelShape(
        family, checked.whole("hidden_size"), checked.whole("vocab_size"), bool(checked.get("tie_word_embeddings")),
        layers(family, checked), vision.describe(str(config.get("model_type")), config) if sees else None,
        bool(checked.get("final_logit_softcapping")),
    )  # fmt: skip

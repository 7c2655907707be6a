"""The parts of a model, under whatever wraps it."""

from __future__ import annotations

from typing import Any

from ftbench.errors import SpecError


def base_model(model: Any) -> Any:
    """Return the model of the library, under peft's."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def decoder(model: Any) -> Any:
    """Return the decoder: embedding, layers and last norm. Raises SpecError for a model without `layers`."""
    base = base_model(model)
    inner = base.get_decoder()
    if not hasattr(inner, "layers"):
        raise SpecError(
            f"model: {type(base).__name__} is no decoder whose layers ftbench finds ({type(inner).__name__} has no "
            "`layers`): take a model of another family (`ftbench list models`)"
        )
    return inner


def decoder_layers(model: Any) -> list[Any]:
    """Return the decoder's layers in order. Raises SpecError as `decoder`."""
    return list(decoder(model).layers)

"""The parts of a model, under whatever wraps it."""

from __future__ import annotations

from typing import Any, Literal

from ftbench.errors import SpecError

_PROJECTOR = ("multi_modal_projector", "image_newline", "merger", "deepstack_merger_list")
_ENCODER = ("vision_tower", "visual")
BESIDE_LANGUAGE = r".*\.(vision_tower|visual|multi_modal_projector)\."  # matches modules of the other two parts
Part = Literal["language", "vision", "projector"]


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


def part_of(name: str) -> Part:
    """Return the part of a model that a dotted name of a module or a parameter lies in."""
    names = set(name.split("."))
    return "projector" if names & set(_PROJECTOR) else "vision" if names & set(_ENCODER) else "language"


def decoder_layers(model: Any) -> list[Any]:
    """Return the decoder's layers in order. Raises SpecError as `decoder`."""
    return list(decoder(model).layers)

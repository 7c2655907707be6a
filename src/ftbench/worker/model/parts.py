"""Find the decoder, its layers and other parts of a model inside wrappers."""

from typing import Any, Literal

import torch

from ftbench.errors import SpecError

_PROJECTOR = ("multi_modal_projector", "image_newline", "merger", "deepstack_merger_list")
_ENCODER = ("vision_tower", "visual")
VISION_MODULES = r".*\.(vision_tower|visual|multi_modal_projector)\."  # modules of the encoder and the projector
Part = Literal["language", "vision", "projector"]


class Placeholder(torch.nn.Module):
    """Placeholder for a layer, embedding, norm or head of another rank. Its forward pass returns the input."""

    def forward(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        return hidden


def base_model(model: Any) -> Any:
    """Return the model without peft's wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def decoder(model: Any) -> Any:
    """Return the decoder (embedding, layers and last norm). Raise SpecError if it has no attribute `layers`."""
    base = base_model(model)
    inner = base.get_decoder()
    if not hasattr(inner, "layers"):
        raise SpecError(
            f"model: ftbench does not find the layers of {type(base).__name__}, because {type(inner).__name__} has no "
            "`layers`: use a model of another family (`ftbench list models`)"
        )
    return inner


def part_of(name: str) -> Part:
    """Return the part of the model (language, vision or projector) that contains a module or parameter name."""
    names = set(name.split("."))
    return "projector" if names & set(_PROJECTOR) else "vision" if names & set(_ENCODER) else "language"


def plain_tensors(value: Any) -> list[Any]:
    """Return the tensors of one optimizer state. A torchao 8-bit state consists of codes, scales and a table."""
    if not hasattr(value, "untyped_storage"):
        return []
    return [getattr(value, name) for name in value.tensor_attrs] if hasattr(value, "tensor_attrs") else [value]


def decoder_layers(model: Any) -> list[Any]:
    """Return the decoder layers that this rank has, in order."""
    return [layer for layer in decoder(model).layers if not isinstance(layer, Placeholder)]


def unwrapped(layer: Any) -> Any:
    """Return the layer inside FSDP's checkpoint wrapper. Return a layer without a wrapper unchanged."""
    return getattr(layer, "_checkpoint_wrapped_module", layer)


def vision_layers(model: Any) -> list[Any]:
    """Return the layers of the vision encoder in order, or [] for a text model."""
    lists = (
        module
        for name, module in base_model(model).named_modules()
        if name.endswith((".layers", ".blocks")) and part_of(name) == "vision"
    )
    return list(next(lists, ()))

"""The parts of a model, under whatever wraps it."""

from collections.abc import Iterator
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


def kept_tensors(model: Any, optimizer: Any = None) -> Iterator[tuple[Any, str]]:
    """Yield what stays between the steps, each with what it is: weights, adapters or optimizer. Beside a 4-bit weight
    bitsandbytes keeps the scales of its blocks, quantised again or not, and tables."""
    adapted = base_model(model) is not model
    for parameter in model.parameters():
        kind = "adapters" if adapted and parameter.requires_grad else "weights"
        yield parameter, kind
        state = getattr(parameter, "quant_state", None)
        while state is not None:
            beside = (getattr(state, name, None) for name in ("absmax", "code", "offset"))
            yield from ((tensor, kind) for tensor in beside if hasattr(tensor, "untyped_storage"))
            state = getattr(state, "state2", None)
    yield from ((buffer, "weights") for buffer in model.buffers())
    for values in optimizer.state.values() if optimizer is not None else ():
        yield from ((tensor, "optimizer") for value in values.values() for tensor in plain_tensors(value))


def plain_tensors(value: Any) -> list[Any]:
    """Return the tensor that a value of an optimizer's state is, those that it holds (torchao's 8 bits: codes, scales
    and a table), or none."""
    if not hasattr(value, "untyped_storage"):
        return []
    return [getattr(value, name) for name in value.tensor_attrs] if hasattr(value, "tensor_attrs") else [value]


def decoder_layers(model: Any) -> list[Any]:
    """Return the decoder's layers in order. Raises SpecError as `decoder`."""
    return list(decoder(model).layers)


def vision_layers(model: Any) -> list[Any]:
    """Return the layers of the encoder of images in order; none of a model without."""
    lists = (
        module
        for name, module in base_model(model).named_modules()
        if name.endswith((".layers", ".blocks")) and part_of(name) == "vision"
    )
    return list(next(lists, ()))

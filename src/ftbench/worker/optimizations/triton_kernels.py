"""Use Triton kernels for norms, rotary embedding and silu(gate) * up (`kernels/decoder_layer.py`)."""

from typing import Any

from ftbench.errors import SpecError
from ftbench.spec.experiment import Experiment
from ftbench.spec.optimizations.compute import KERNEL_FAMILIES as FAMILIES
from ftbench.worker.model.parts import base_model, decoder, decoder_layers


def apply(model: Any, spec: Experiment) -> None:
    """Make the layers use the kernels. Raise SpecError for unsupported layers."""
    from ftbench.kernels import decoder_layer  # needs triton

    config = base_model(model).config.get_text_config()
    if config.model_type not in FAMILIES or config.hidden_act != "silu":
        raise SpecError(
            f"optimizations.triton_kernels supports layers of {', '.join(FAMILIES)} with silu, but "
            f"{type(base_model(model)).__name__} has other layers or another activation: set it to off"
        )
    for layer in decoder_layers(model):
        decoder_layer.replace_forward(layer)
    decoder_layer.replace_norm(decoder(model).norm)


def _is_ours(module: Any) -> bool:
    return any(kind.__module__ == "ftbench.kernels.decoder_layer" for kind in type(module).__mro__)


def applied(model: Any, spec: Experiment) -> dict[str, Any]:
    """Return a field with the number of modules that use the kernels. Return {} if the optimization is off."""
    if not spec.optimizations.triton_kernels:
        return {}
    return {"triton_kernel_modules": sum(map(_is_ours, model.modules()))}


def verify(model: Any, spec: Experiment) -> list[str]:
    """Return an error message if a layer does not use the kernels."""
    if not spec.optimizations.triton_kernels:
        return []
    left = [index for index, layer in enumerate(decoder_layers(model)) if not _is_ours(layer)]
    return [f"optimizations.triton_kernels is on, but layer {left[0]} does not use the kernels"] if left else []

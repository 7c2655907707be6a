"""A model of a configuration, made as from_pretrained makes it, with weights that nobody read."""

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers.initialization import no_init_weights
from transformers.quantizers.auto import get_hf_quantizer

from ftbench.core.architectures import architectures
from ftbench.spec.experiment import Model
from ftbench.worker.device import device
from ftbench.worker.model import loading, vision
from ftbench.worker.model.random_weights import configuration
from ftbench.worker.model.tokenizer import IMAGE, build_tokenizer


class Shape:
    """What `models.load_model` takes in place of a directory."""

    def __init__(self, model: Model) -> None:
        """Read the model's configuration. Raises MissingError if it cannot be reached, SpecError if it is unknown."""
        self._model = model
        known = model.weights == "random" or (not model.path and model.id in architectures())
        self.config = configuration(model) if known else loading.load_config(model, model.path or model.id)

    def tokenizer(self) -> Any:
        """Return the tokenizer that comes with the model; with random weights, the one that is made for them."""
        if self._model.weights != "random":
            return loading.load_tokenizer(self._model, self._model.path or self._model.id)
        tokenizer = build_tokenizer(int(self.config.get_text_config().vocab_size), vision.reads_images(self.config))
        if vision.reads_images(self.config):
            self.config.image_token_id = tokenizer.convert_tokens_to_ids(IMAGE)
        return tokenizer

    def processor(self) -> Any:
        """Return what makes images into a batch."""
        return vision.processor_of(self.config)

    def load(self, arguments: dict[str, Any]) -> Any:
        """Return the model on the device, in the dtype, attention and quantisation that from_pretrained is given."""
        chosen = {key: arguments[key] for key in ("dtype", "attn_implementation") if key in arguments}
        quantised = arguments.get("quantization_config")
        if quantised is None:
            with no_init_weights(), device():
                model = vision.auto_class(self.config).from_config(self.config, **chosen)
            model.tie_weights()  # which is left undone where weights are not initialised
            return model.eval()
        where = arguments.get("device_map")
        quantiser, config, where = get_hf_quantizer(self.config, quantised, where, True, {})
        with _disable_current_modes():  # bitsandbytes' class of parameter can be on meta, but not fake
            with no_init_weights(), torch.device("meta"):
                model = vision.auto_class(self.config).from_config(config, **chosen)
            quantiser.preprocess_model(model=model, dtype=chosen["dtype"], device_map=where)
        for module in model.modules():
            _materialise(module, chosen["dtype"])
        model.tie_weights()
        model.hf_quantizer, model.hf_device_map = quantiser, where
        quantiser.postprocess_model(model)
        return model.eval()


def _materialise(module: nn.Module, dtype: torch.dtype) -> None:
    """Make the module's own tensors on the device; a layer of bitsandbytes quantises its weight with its own
    function."""
    from bitsandbytes.nn import Linear4bit

    for name, buffer in list(module._buffers.items()):
        if buffer is not None:
            module._buffers[name] = torch.empty_like(buffer, device=device())
    for name, parameter in list(module._parameters.items()):
        if parameter is None:
            continue
        if isinstance(module, Linear4bit) and name == "weight":
            module._parameters[name] = _quantised(module, dtype)
        else:
            value = torch.empty_like(parameter, device=device())
            module._parameters[name] = nn.Parameter(value, requires_grad=parameter.requires_grad)


def _quantised(layer: Any, dtype: torch.dtype) -> nn.Parameter:
    """Return a weight as bitsandbytes keeps it. Its own class of parameter cannot be fake; what its layers read of it
    can."""
    from bitsandbytes.functional import quantize_4bit

    old = layer.weight
    kept = {name: getattr(old, name) for name in ("blocksize", "compress_statistics", "quant_type", "quant_storage")}
    value = torch.empty((layer.out_features, layer.in_features), dtype=dtype, device=device())
    packed, state = quantize_4bit(value, **kept)
    parameter = nn.Parameter(packed, requires_grad=False)
    for name, known in {**kept, "quant_state": state, "bnb_quantized": True, "module": layer}.items():
        setattr(parameter, name, known)
    layer.quant_state = state
    return parameter

"""QLoRA: adapters on frozen weights that bitsandbytes stores in 4 bits."""

from __future__ import annotations

from typing import Any

import torch
from peft import prepare_model_for_kbit_training
from transformers import BitsAndBytesConfig

from ftbench.spec.experiment import Experiment
from ftbench.worker import models
from ftbench.worker.methods import lora


def load(spec: Experiment, source: models.Source) -> Any:
    method: Any = spec.method
    quantised = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=method.quant_type,
        bnb_4bit_use_double_quant=method.double_quant,
        bnb_4bit_compute_dtype=getattr(torch, method.compute_dtype),
    )
    return models.load_model(spec, source, quantised)


def adapt(model: Any, spec: Experiment) -> Any:
    """The quantised model with adapters. peft's preparation casts all that is not quantised to float32; the fused
    experts of a mixture of experts are not, and would double, so such a model is only frozen."""
    if any("experts" in name and parameter.ndim == 3 for name, parameter in model.named_parameters()):
        model.requires_grad_(False)
    else:
        checkpointing = spec.optimizations.gradient_checkpointing
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=checkpointing)
    return lora.adapt(model, spec)


def proof(model: Any, spec: Experiment) -> list[str]:
    """The adapters of LoRA, on layers that hold 4-bit weights of the type asked for."""
    from bitsandbytes.nn import Linear4bit

    method: Any = spec.method
    found = lora.proof(model, spec)
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, Linear4bit)]
    if not layers:
        return [*found, "method qlora: no layer holds 4-bit weights"]
    for name, layer in layers:
        state = layer.weight.quant_state
        if state is None:
            return [*found, f"method qlora: {name} was not quantised"]
        if state.quant_type != method.quant_type:
            found.append(f"method qlora: {name} holds {state.quant_type}, not {method.quant_type}")
        if bool(state.nested) != method.double_quant:
            found.append(f"method qlora: {name} has double_quant {bool(state.nested)}, not {method.double_quant}")
        if layer.compute_dtype != getattr(torch, method.compute_dtype):
            found.append(f"method qlora: {name} computes in {layer.compute_dtype}, not {method.compute_dtype}")
        if found:
            break
    return found

"""QLoRA: adapters on frozen weights that bitsandbytes stores in 4 bits."""

from __future__ import annotations

from typing import Any

import torch
from peft import prepare_model_for_kbit_training
from transformers import BitsAndBytesConfig

from ftbench.spec.experiment import Experiment
from ftbench.spec.methods import Qlora
from ftbench.worker.methods import lora


def quantization(method: Qlora) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=method.quant_type,
        bnb_4bit_use_double_quant=method.double_quant,
        bnb_4bit_compute_dtype=getattr(torch, method.compute_dtype),
    )


def adapt(model: Any, spec: Experiment) -> Any:
    checkpointing = spec.optimizations.gradient_checkpointing
    return lora.adapt(prepare_model_for_kbit_training(model, use_gradient_checkpointing=checkpointing), spec)


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

"""Products with the frozen base layers in 8-bit floats (torchao). Adapters and output head stay as they are."""

from __future__ import annotations

from typing import Any

import torch

from ftbench.spec.experiment import Experiment

MULTIPLE = 16  # torch._scaled_mm takes matrices whose sides are multiples of 16


def _wanted(module: Any, name: str) -> bool:
    frozen = not any(parameter.requires_grad for parameter in module.parameters())
    fits = isinstance(module, torch.nn.Linear) and module.in_features % MULTIPLE == module.out_features % MULTIPLE == 0
    return fits and frozen and "lm_head" not in name and "lora_" not in name


def apply(model: Any, spec: Experiment) -> None:
    if spec.optimizations.fp8 == "off":
        return
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(spec.optimizations.fp8)
    convert_to_float8_training(model, config=config, module_filter_fn=_wanted)


def layers(model: Any) -> int:
    """How many layers multiply in 8 bits."""
    return sum(map(multiplies_in_8_bits, model.modules()))


def multiplies_in_8_bits(module: Any) -> bool:
    return type(module).__name__ == "Float8Linear"


def proof(model: Any, spec: Experiment) -> list[str]:
    if spec.optimizations.fp8 == "off":
        return []
    left = [name for name, module in model.named_modules() if type(module) is torch.nn.Linear and _wanted(module, name)]
    found = [f"optimizations.fp8 is on and {left[0]} still multiplies in 16 bits"] if left else []
    return found if layers(model) else [*found, "optimizations.fp8 is on and no layer multiplies in 8 bits"]

"""The adapters' first values, the same in every framework."""

import math
from typing import Any

import torch
from transformers import set_seed


@torch.no_grad()
def draw_adapters(model: Any, seed: int) -> None:
    """Give LoRA's matrices the values that peft draws in ftbench's own loop after the same seed: A from a uniform
    distribution (Kaiming, a = sqrt(5)), B zero. A framework draws them at another time, and the first gradient norm
    would be another.

    peft makes each pair on the host as two linear layers, which draw their weights, and then draws A again; so do
    these lines, in the order in which the layers are wrapped."""
    set_seed(seed)
    for module in model.modules():
        for name, a in getattr(module, "lora_A", {}).items():
            b = module.lora_B[name]
            made = torch.nn.Linear(a.in_features, a.out_features, bias=False)
            torch.nn.Linear(b.in_features, b.out_features, bias=False)
            torch.nn.init.kaiming_uniform_(made.weight, a=math.sqrt(5))
            a.weight.copy_(made.weight)
            b.weight.zero_()

"""The optimizer of a run: one that transformers makes by its name, or torchao's, and what of it can be verified."""

from __future__ import annotations

from typing import Any

import torch

from ftbench.spec.experiment import Experiment
from ftbench.worker.measure.applied import innermost
from ftbench.worker.model.parts import plain_tensors

# The module and class that stand for each choice of train.optimizer.
OPTIMIZERS = {
    "adamw_torch": ("torch.optim", "AdamW"),
    "adamw_torch_fused": ("torch.optim", "AdamW"),
    "adamw_bnb_8bit": ("bitsandbytes", "AdamW"),
    "paged_adamw_8bit": ("bitsandbytes", "AdamW"),
    "adamw_torchao_fp32": ("torchao.optim", "AdamW"),
    "adamw_torchao_bf16": ("torchao.optim", "AdamW"),
    "adamw_torchao_8bit": ("torchao.optim", "AdamW8bit"),
    "sgd": ("torch.optim", "SGD"),
}
# The type of a state and its bits, by what the name of an optimizer ends in.
STATES = {"8bit": (torch.uint8, 8), "fp32": (torch.float32, 32), "bf16": (torch.bfloat16, 16)}


def arguments(spec: Experiment) -> dict[str, Any]:
    """Return what the trainer's constructor is told of an optimizer that transformers has no name for: its class, and
    what that is told beside transformers' groups of parameters."""
    if "torchao" not in spec.train.optimizer:
        return {}
    options = {"lr": spec.train.learning_rate, "bf16_stochastic_round": True}
    return {"optimizer_cls_and_kwargs": (_torchao(spec.train.optimizer), options)}


def _torchao(name: str) -> Any:
    from torchao import optim

    if name == "adamw_torchao_8bit":
        return optim.AdamW8bit
    dtype = {"adamw_torchao_fp32": torch.float32, "adamw_torchao_bf16": torch.bfloat16}[name]

    def new_buffer(self: Any, p: torch.Tensor, signed: bool) -> torch.Tensor:
        return torch.zeros_like(p, dtype=dtype)

    return type("AdamW", (optim._AdamW,), {"_new_buffer": new_buffer, "__module__": optim.__name__})


def verify(optimizer: Any, spec: Experiment) -> list[str]:
    """Return what of the optimizer, after its first step, is not as the spec says."""
    optimizer, setting, problems = innermost(optimizer), spec.train.optimizer, []
    name = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
    module, kind = OPTIMIZERS[setting]
    if not name.startswith(module) or not name.endswith(kind):
        problems.append(f"train.optimizer is {setting} and the trainer uses {name}")
    if setting == "adamw_torch_fused" and not optimizer.defaults.get("fused"):
        problems.append(f"train.optimizer is adamw_torch_fused and {name} is not fused")
    if "torchao" in setting and not optimizer.bf16_stochastic_round:
        problems.append(f"train.optimizer is {setting} and {name} rounds weights to the nearest")
    wanted, bits = STATES.get(setting.rpartition("_")[2], (None, 0))
    values = (value for state in optimizer.state.values() for value in state.values())
    kept = {tensor.dtype for value in values for tensor in plain_tensors(value) if tensor.numel() > 1}
    if wanted and wanted not in kept:
        problems.append(
            f"train.optimizer is {setting} and {name} keeps no state in {bits} bits "
            "(tensors of fewer than 4,096 elements stay out of 8 bits)"
        )
    return problems

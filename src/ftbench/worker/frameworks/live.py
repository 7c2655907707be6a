"""What a framework really does, read from its live model and trainer with torch alone: its versions of the training
libraries are not ours."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

import torch

from ftbench.spec.experiment import Experiment
from ftbench.worker.measure import applied

PACKAGES = {"axolotl": "axolotl", "llamafactory": "llamafactory", "ms-swift": "ms-swift"}
PRECISION = {"bf16": "bf16", "fp16": "fp16", "fp32": "no"}


def of_model(model: Any) -> dict[str, Any]:
    """Return the sections of applied.json that the model alone can tell."""
    kinds = applied.parameters_by_kind(model)
    return {
        "schema": applied.SCHEMA,
        "device": applied.device_of(model),
        "torch": {"version": torch.__version__, "cuda": torch.version.cuda},
        "model": applied.model_facts(model),
        "parameters": {
            "total": sum(kind["total"] for kind in kinds.values()),
            "trainable": sum(kind["trainable"] for kind in kinds.values()),
            "by_kind": kinds,
        },
        "matmul_shape": asdict(applied.matmul_shape(model)),
        "trained_dtype": trained_dtype(model),
    }


def trained_dtype(model: Any) -> str:
    """Return the dtypes of what is trained."""
    return ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.requires_grad}))


def of_trainer(trainer: Any) -> dict[str, Any]:
    """Return what the trainer made of its arguments."""
    optimizer = applied.innermost(trainer.optimizer)
    precision = trainer.accelerator.mixed_precision
    return {
        "autocast": precision,
        "product_precision": precision if precision in ("bf16", "fp16") else _dtype_of_most(trainer.model),
        "loss": f"{type(trainer).__module__}.{type(trainer).__name__}",
        "loss_normalisation": "label tokens of the step" if trainer.model_accepts_loss_kwargs else "micro-batches",
        "gradient_checkpointing": bool(getattr(trainer.model, "is_gradient_checkpointing", False)),
        "optimizer": applied.optimizer_facts(optimizer),
    }


def _dtype_of_most(model: Any) -> str:
    sizes = Counter[torch.dtype]()
    for parameter in model.parameters():
        sizes[parameter.dtype] += parameter.numel()
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(sizes.most_common(1)[0][0], "fp32")


def model_problems(model: Any, spec: Experiment) -> list[str]:
    """Return what of the method is not as the spec says."""
    method: Any = spec.method
    who, problems = f"{spec.launch.framework}: ", []
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not method.adapters:
        frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        return [f"{who}method full, and {len(frozen)} parameters are not trained ({frozen[0]})"] if frozen else []
    adapted = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in trained if ".lora_" in name}
    if others := [name for name in trained if ".lora_" not in name]:
        problems.append(f"{who}method {method.name}, and {len(others)} base weights are trained ({others[0]})")
    if method.targets != "all-linear" and adapted != set(method.targets):
        problems.append(f"{who}method.targets are {', '.join(method.targets)}; adapters are on {sorted(adapted)}")
    layers = (getattr(module, "r", None) for module in model.modules())
    ranks = {rank for layer in layers if isinstance(layer, dict) for rank in layer.values()}
    if ranks != {method.rank}:
        problems.append(f"{who}method.rank is {method.rank}, and adapters have rank {sorted(ranks)}")
    packed = any(parameter.dtype == torch.uint8 for parameter in model.parameters())
    if packed != method.quantised:
        problems.append(f"{who}method {method.name}, and the weights are {'' if packed else 'not '}quantised")
    return problems


def trainer_problems(trainer: Any, spec: Experiment) -> list[str]:
    """Return what of the recipe is not as the spec says."""
    who, train, args = f"{spec.launch.framework}: ", spec.train, trainer.args
    recipe = {
        "train.batch_size": (train.batch_size, args.per_device_train_batch_size),
        "train.gradient_accumulation_steps": (train.gradient_accumulation_steps, args.gradient_accumulation_steps),
        "train.learning_rate": (train.learning_rate, args.learning_rate),
        "train.max_grad_norm": (train.max_grad_norm, args.max_grad_norm),
        "train.weight_decay": (train.weight_decay, args.weight_decay),
        "train.optimizer": (train.optimizer, _word(args.optim)),
        "train.lr_scheduler": (train.lr_scheduler, _word(args.lr_scheduler_type)),
        "train.precision": (PRECISION[train.precision], str(trainer.accelerator.mixed_precision)),
    }  # fmt: skip
    problems = [f"{who}{key} is {want}, and it trains with {got}" for key, (want, got) in recipe.items() if want != got]
    wanted = bool(spec.optimizations.gradient_checkpointing)
    if bool(getattr(trainer.model, "is_gradient_checkpointing", wanted)) != wanted:
        problems.append(
            f"{who}optimizations.gradient_checkpointing is {'on' if wanted else 'off'}, and it does otherwise"
        )
    return problems


def _word(value: Any) -> str:
    return str(getattr(value, "value", value))

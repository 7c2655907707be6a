"""Read the settings in effect from the live model and trainer of another framework.

This module imports torch, but no other training library, because their versions differ between the frameworks.
"""

import inspect
import sys
from collections.abc import Iterator
from typing import Any

import torch

from ftbench.core.units import listed
from ftbench.spec.experiment import Experiment
from ftbench.worker.measure import effective_config
from ftbench.worker.methods import mismatches

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_PLAIN = {"torch", "transformers", "peft", "accelerate", "bitsandbytes", "ftbench", *sys.stdlib_module_names}


def of_trainer(trainer: Any, labels: int, divisor: Any) -> dict[str, Any]:
    """Return the settings in effect after the first step. `labels` is the number of label tokens in the step. The loss
    is divided by `divisor` (None: unknown). In transformers 4, first tokens of rows also count in `divisor`."""
    also = ", and first tokens of rows" if divisor is not None and int(divisor) > labels else ""
    optimizer = effective_config.innermost(trainer.optimizer)
    precision = trainer.accelerator.mixed_precision
    return {
        "autocast": precision,
        "product_precision": precision if precision in ("bf16", "fp16") else _DTYPES.get(trainer.model.dtype, "fp32"),
        "loss": f"{type(trainer).__module__}.{type(trainer).__name__}",
        "loss_normalisation": effective_config.loss_normalisation(trainer) + also,
        "gradient_checkpointing": float(getattr(trainer.model, "is_gradient_checkpointing", False)),
        "optimizer": effective_config.optimizer_facts(optimizer),
        "fp8_layers": sum("float8" in type(module).__name__.lower() for module in trainer.model.modules()),
        "patched_by": ", ".join(sorted(patched_by(trainer.model))),
    }


def patched_by(model: Any) -> set[str]:
    """Return the packages that patched the model: they replaced its methods, or functions in its source files."""
    files = {name for m in model.modules() if (name := type(m).__module__).startswith("transformers.models.")}
    called = (value for name in files for value in vars(sys.modules[name]).values() if inspect.isfunction(value))
    functions = (*called, *(method for module in model.modules() for method in _methods(module)))
    modules = (getattr(function, "__module__", None) or "torch" for function in functions)  # C functions have no module
    return {module.partition(".")[0] for module in modules} - _PLAIN


def _methods(module: Any) -> Iterator[Any]:
    yield type(module).forward
    yield from (value for value in vars(module).values() if inspect.isroutine(value))


def model_problems(model: Any, spec: Experiment) -> list[str]:
    """Return a message for each difference between the model and the `method` settings of the spec."""
    method: Any = spec.method
    who, problems = f"{spec.launch.framework}: ", []
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not method.adapters:
        frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        return [f"{who}method is full, but these are not trained: {listed(frozen, 1)}"] if frozen else []
    adapted = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in trained if ".lora_" in name}
    if others := [name for name in trained if ".lora_" not in name]:
        problems.append(f"{who}method is {method.name}, but these base weights are trained: {listed(others, 1)}")
    if method.targets != "all-linear" and adapted != set(method.targets):
        problems.append(f"{who}method.targets are {', '.join(method.targets)}; adapters are on {sorted(adapted)}")
    layers = [module for module in model.modules() if isinstance(getattr(module, "r", None), dict)]
    scales = {(rank, layer.scaling[name]) for layer in layers for name, rank in layer.r.items()}
    if scales != {(method.rank, method.alpha / method.rank)}:
        what = listed([f"rank {rank} and alpha {rank * scale:g}" for rank, scale in sorted(scales)], 3) or "no rank"
        problems.append(f"{who}method.rank is {method.rank} and alpha {method.alpha:g}, but adapters have {what}")
    wanted = {_quantised(method.quant_type, method.double_quant, method.compute_dtype)} if method.quantised else set()
    if (states := _states(model)) != wanted:
        actual = " and ".join(sorted(states)) or "not quantised"
        problems.append(f"{who}method is {method.name}, but the weights are {actual}")
    return problems


def _states(model: Any) -> set[str]:
    """Return descriptions of the 4-bit weights, without the storage dtype, which differs between frameworks."""
    weights = ((module, weight) for module in model.modules() for weight in module.parameters(recurse=False))
    states = ((module.compute_dtype, w.quant_state) for module, w in weights if hasattr(w, "quant_state"))
    return {
        _quantised(state.quant_type, bool(state.nested), str(dtype).removeprefix("torch."))
        for dtype, state in states if state is not None
    }  # fmt: skip


def _quantised(kind: str, double_quant: bool, dtype: str) -> str:
    return f"{kind} {'with' if double_quant else 'without'} double_quant, computed in {dtype}"


def trainer_problems(trainer: Any, spec: Experiment) -> list[str]:
    """Return a message for each difference between the trainer and the training settings of the spec."""
    who, train, args = f"{spec.launch.framework}: ", spec.train, trainer.args
    length, name = ("max_steps", "max_steps") if train.max_steps else ("epochs", "num_train_epochs")
    recipe = {
        "train.batch_size": (train.batch_size, args.per_device_train_batch_size),
        "train.gradient_accumulation_steps": (train.gradient_accumulation_steps, args.gradient_accumulation_steps),
        "train.learning_rate": (train.learning_rate, args.learning_rate),
        "train.max_grad_norm": (train.max_grad_norm, args.max_grad_norm),
        "train.weight_decay": (train.weight_decay, args.weight_decay),
        "train.optimizer": (train.optimizer, _text(args.optim)),
        "train.lr_scheduler": (train.lr_scheduler, _text(args.lr_scheduler_type)),
        "train.warmup_steps": (train.warmup_steps, args.warmup_steps),
        f"train.{length}": (getattr(train, length), getattr(args, name)),  # axolotl converts epochs to max_steps
        "train.seed": (train.seed, args.seed),
        "train.precision": (train.precision, effective_config.PRECISIONS.get(str(trainer.accelerator.mixed_precision))),
    }  # fmt: skip
    if spec.optimizations.attention != "auto":
        attention = trainer.model.config.get_text_config()._attn_implementation
        recipe["optimizations.attention"] = (spec.optimizations.attention, attention)
    wanted = bool(spec.optimizations.gradient_checkpointing)
    checkpointing = bool(getattr(trainer.model, "is_gradient_checkpointing", wanted))
    recipe["optimizations.gradient_checkpointing"] = (wanted, checkpointing)
    problems = mismatches(recipe, who)
    patches, best = patched_by(trainer.model), spec.launch.settings == "best"
    if (best or spec.optimizations.liger) and "liger_kernel" not in patches:
        key = "launch.settings is best" if best else "optimizations.liger is on"
        problems.append(f"{who}{key}, but no module uses a kernel of Liger")
    if best and spec.launch.framework == "axolotl" and spec.method.adapters and "axolotl" not in patches:
        problems.append(f"{who}launch.settings is best, but no module uses axolotl's LoRA kernels")
    return problems


def _text(value: Any) -> str:
    return str(getattr(value, "value", value))

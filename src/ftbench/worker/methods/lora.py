"""LoRA: adapters on frozen 16-bit weights, with peft."""

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.utils import transformers_weight_conversion as conversion

from ftbench.core.units import listed
from ftbench.errors import SpecError
from ftbench.spec.experiment import Experiment
from ftbench.worker.model import loading
from ftbench.worker.model.parts import part_of
from ftbench.worker.model.vision import reads_images

load = loading.load_model


def adapt(model: Any, spec: Experiment) -> Any:
    """Return the model with LoRA adapters. Raise SpecError if a target does not exist."""
    method: Any = spec.method
    try:
        config = LoraConfig(
            r=method.rank,
            lora_alpha=method.alpha,
            lora_dropout=method.dropout,
            target_modules=linear_targets(model, spec),
            target_parameters=expert_parameters(model) if method.experts else None,
            task_type="CAUSAL_LM",
        )
        model = get_peft_model(model, config)
    except ValueError as error:
        raise SpecError(f"method.targets: {' '.join(str(error).split())}") from None
    for name, parameter in model.named_parameters():
        if getattr(method, part_of(name), "") == "full":
            parameter.requires_grad_(True)
    return model


def linear_targets(model: Any, spec: Experiment) -> str | list[str]:
    """Return peft's `target_modules` for the targets of the spec.

    `all-linear` means all linear layers except the output head. Fused experts get adapters only with `method.experts`.
    In models with fused experts, peft treats gate_proj, up_proj and down_proj (mixtral: w1, w2, w3) as experts, and
    always adapts them. Therefore these names are left out, also for dense layers and shared experts.

    Raises:
        SpecError: Only fused experts match, and `method.experts` is off.
        ValueError: No layer matches.
    """
    method: Any = spec.method
    if reads_images(model.config):
        return _targets_by_part(model, method)
    targets = method.targets if isinstance(method.targets, str) else list(method.targets)
    config = LoraConfig(target_modules=targets)
    conversion.convert_peft_config_for_transformers(config, model=model, conversions=None)
    if not config.target_parameters:
        return targets
    if not config.target_modules and not method.experts:
        raise SpecError(
            f"method.targets: {', '.join(targets)} are not linear layers: set method.experts to on (only for fused "
            "experts), or use other targets"
        )
    return sorted(config.target_modules)


def _targets_by_part(model: Any, method: Any) -> list[str]:
    """Return the full names of the layers that get adapters in a vision model, because short names are not unique.

    In the language model, these are the target layers of the spec. If the spec also requests adapters in the encoder or
    the projector, add all linear layers of this part.
    """
    names, targets = [], ("",) if method.targets == "all-linear" else tuple(f".{each}" for each in method.targets)
    for name, module in model.named_modules():
        part = part_of(name)
        wanted = f".{name}".endswith(targets) if part == "language" else getattr(method, part) == "lora"
        if wanted and isinstance(module, torch.nn.Linear) and not (targets == ("",) and name.endswith("lm_head")):
            names.append(name)
    return names


def expert_parameters(model: Any) -> list[str]:
    """Return peft's `target_parameters`: names of fused expert weights of shape `(experts, out, in)`."""
    names = {
        ".".join(name.split(".")[-3:])
        for name, p in model.named_parameters()
        if "experts" in name and p.ndim == 3 and p.is_floating_point()
    }
    if not names:
        raise SpecError("method.experts is on, but the model has no fused expert weights: set method.experts to off")
    return sorted(names)


def verify(model: Any, spec: Experiment) -> list[str]:
    """Return messages if adapters are missing, adapters have a wrong rank, or other weights are trained. A target
    without a layer is only a warning: see `unmatched_targets`."""
    method: Any = spec.method
    problems = []
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    adapters = [name for name in trained if "lora_" in name]
    if not adapters:
        problems.append(f"method {method.name}: adapters are not trained")
    full = [part for part in ("vision", "projector") if getattr(method, part) == "full"]
    others = [n for n in trained if "lora_" not in n and part_of(n) not in full]
    problems += [
        f"method.{part} is {getattr(method, part)}, but the parameters of this part are frozen"
        for part in ("vision", "projector")
        if getattr(method, part) != "frozen" and not any(part_of(name) == part for name in trained)
    ]
    if others:
        problems.append(f"method {method.name} trains weights of the base model: {listed(others, 1)}")
    for name, module in model.named_modules():
        rank = getattr(module, "r", None)
        if isinstance(rank, dict) and rank and set(rank.values()) != {method.rank}:
            problems.append(f"method {method.name}: {name} has rank {set(rank.values())}, not {method.rank}")
            break
    if method.experts and not any(".experts." in name for name in adapters):
        problems.append(f"method {method.name}: method.experts is on, but the experts have no adapters")
    return problems


def unmatched_targets(model: Any, spec: Experiment) -> list[str]:
    """Return the requested target names that do not match an adapted layer, such as gate_proj in gpt-oss."""
    method: Any = spec.method
    if isinstance(method.targets, str):
        return []
    adapted = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name, _ in model.named_parameters() if ".lora_" in name}
    return [target for target in method.targets if target.rsplit(".", 1)[-1] not in adapted]

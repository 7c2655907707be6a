"""LoRA: adapters on frozen 16-bit weights, through peft."""

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


def load(spec: Experiment, source: loading.Source) -> Any:
    return loading.load_model(spec, source)


def adapt(model: Any, spec: Experiment) -> Any:
    """Return the model with adapters. Raises SpecError where no layer has a name that was asked for."""
    method: Any = spec.method
    config = LoraConfig(
        r=method.rank,
        lora_alpha=method.alpha,
        lora_dropout=method.dropout,
        bias=method.bias,
        target_modules=linear_targets(model, spec),
        target_parameters=expert_parameters(model) if method.experts else None,
        task_type="CAUSAL_LM",
    )
    try:
        model = get_peft_model(model, config)
    except ValueError as error:
        raise SpecError(f"method {method.name}: {str(error).strip().splitlines()[0]}") from None
    for name, parameter in model.named_parameters():
        if (part := getattr(method, part_of(name), "")) in ("full", "frozen"):  # peft trains biases wherever they are
            parameter.requires_grad_(part == "full")
    return model


def linear_targets(model: Any, spec: Experiment) -> str | list[str]:
    """Return the names by which peft finds the linear layers that `targets` reach: every `nn.Linear` of such a name, or
    with all-linear every one but the output head. Raises SpecError where that is none.

    Fused experts are no linear layers: they get adapters by `experts` alone, of the method's rank. peft takes
    gate_proj, up_proj and down_proj (mixtral: w1, w2, w3) for the experts of models that had them by these names before
    they were fused (qwen3_moe, qwen3_next, deepseek_v3, mixtral …), and adapts them whatever else was said; it has no
    name there for a dense layer's or a shared expert's. So these names are left out."""
    method: Any = spec.method
    if reads_images(model.config):
        return _targets_by_part(model, method)
    if {method.vision, method.projector} != {"frozen"}:
        raise SpecError(f"method.vision and method.projector: {spec.model.id} reads no images: leave them out")
    given = method.targets if isinstance(method.targets, str) else list(method.targets)
    config = LoraConfig(target_modules=given)
    try:
        conversion.convert_peft_config_for_transformers(config, model=model, conversions=None)
    except ValueError as error:
        raise SpecError(f"method {method.name}: {str(error).strip().splitlines()[0]}") from None
    if not config.target_parameters:
        return given
    if not config.target_modules and not method.experts:
        raise SpecError(
            f"method {method.name}: the targets {', '.join(given)} name fused experts alone: set method.experts to on, "
            "or name other layers"
        )
    return sorted(config.target_modules)


def _targets_by_part(model: Any, method: Any) -> list[str]:
    """Return the full names of the linear layers that get adapters in a model with several parts, which share names:
    in the language model those of the targets, in encoder and projector every one where they are to have some."""
    names = []
    for name, module in model.named_modules():
        part, own = part_of(name), name.rpartition(".")[2]
        if part == "language":
            wanted = own in method.targets or (method.targets == "all-linear" and own != "lm_head")
        else:
            wanted = getattr(method, part) == "lora"
        if wanted and isinstance(module, torch.nn.Linear):
            names.append(name)
    return names


def expert_parameters(model: Any) -> list[str]:
    """Return the names of the fused expert matrices (three-dimensional parameters: expert x out x in), as peft wants
    them."""
    names = {
        ".".join(name.split(".")[-3:])
        for name, p in model.named_parameters()
        if "experts" in name and p.ndim == 3 and p.is_floating_point()
    }
    if not names:
        raise SpecError("method.experts is on, and this model has no fused expert matrices: set it to off")
    return sorted(names)


def verify(model: Any, spec: Experiment) -> list[str]:
    """Check that adapters of the rank asked for are there, and only they (and biases, if asked) are trained. Target
    names that match nothing are warnings: `unmatched_targets`."""
    method: Any = spec.method
    sentences = []
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    adapters = [name for name in trained if "lora_" in name]
    if not adapters:
        sentences.append(f"method {method.name}: no adapter is trained")
    whole = [part for part in ("vision", "projector") if getattr(method, part) == "full"]
    others = [n for n in trained if "lora_" not in n and not n.endswith("bias") and part_of(n) not in whole]
    sentences += [
        f"method.{part} is {getattr(method, part)} and nothing of it is trained"
        for part in ("vision", "projector")
        if getattr(method, part) != "frozen" and not any(part_of(name) == part for name in trained)
    ]
    if others:
        sentences.append(f"method {method.name}, and of the base trained: {listed(others, 1)}")
    for name, module in model.named_modules():
        rank = getattr(module, "r", None)
        if isinstance(rank, dict) and rank and set(rank.values()) != {method.rank}:
            sentences.append(f"method {method.name}: {name} has rank {set(rank.values())}, not {method.rank}")
            break
    if method.experts and not any(".experts." in name for name in adapters):
        sentences.append(f"method {method.name}: method.experts is on and no expert has an adapter")
    return sentences


def unmatched_targets(model: Any, spec: Experiment) -> list[str]:
    """Return target names that no adapted layer has: the founding study's surprise, gate_proj and its like on
    gpt-oss."""
    method: Any = spec.method
    if isinstance(method.targets, str):
        return []
    adapted = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name, _ in model.named_parameters() if ".lora_" in name}
    return [target for target in method.targets if target.rsplit(".", 1)[-1] not in adapted]

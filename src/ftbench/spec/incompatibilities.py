"""Find settings that do not work on any machine or on this machine, and replace each `auto`.

Each error message explains how to fix the problem. The modules of methods, objectives, strategies and optimizations
declare further rules.
"""

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from ftbench.spec import frameworks, strategies
from ftbench.spec.base import OFF, Capability, Experiment, Part
from ftbench.spec.methods import decoder_family, reads_images
from ftbench.spec.optimizations import OPTIMIZATIONS, compute, switched_on

KERNELS = "optimizations.triton_kernels"


def incompatibilities(spec: Experiment) -> list[str]:
    """Return an error message for each combination of settings that does not work on any machine."""
    problems = [*spec.method.incompatibilities(spec), *spec.objective.incompatibilities(spec)]
    for name in switched_on(spec.optimizations):
        optimization = OPTIMIZATIONS[name]
        if spec.method.name == "unsloth" and optimization.not_with_unsloth:
            problems.append(f"optimizations.{name} with method unsloth: {optimization.not_with_unsloth}")
        problems += dict.fromkeys(why for key, why in optimization.excludes.items() if attrgetter(key)(spec) not in OFF)
        if optimization.needs_images and not spec.dataset.may_have_images:
            problems.append(f"optimizations.{name} needs images; dataset {spec.dataset.name} has none: set it to off")
        problems += optimization.incompatibilities(spec)
    train, strategy = spec.train, spec.launch.strategy
    if train.warmup_steps and train.lr_scheduler == "constant":
        problems.append("train.lr_scheduler constant ignores train.warmup_steps: set it to constant_with_warmup")
    if "torchao" in train.optimizer and strategy.startswith("zero"):
        problems.append(f"train.optimizer {train.optimizer} is not supported by {strategy}: use adamw_torch_fused")
    if spec.measure.eval == "epoch" and not spec.dataset.eval_samples:
        problems.append("measure.eval: epoch needs dataset.eval_samples")
    if spec.dataset.has_images and not reads_images(spec.model):
        problems.append(f"dataset: {spec.dataset.name} has images and {spec.model.id} is text-only: use another model")
    return problems + _of_profile(spec) + frameworks.incompatibilities(spec) + strategies.incompatibilities(spec)


def _of_profile(spec: Experiment) -> list[str]:
    measure, max_steps, problems = spec.measure, spec.train.max_steps, list[str]()
    if measure.profile == "off":
        return []
    if spec.launch.mock != "off":
        problems.append("measure.profile: launch.mock trains nothing: set one of them to off")
    if max_steps is not None and max_steps < measure.steps_to_profile:
        problems.append(
            f"measure.profile {measure.profile} needs {measure.steps_to_profile} steps to profile "
            f"{measure.profile_steps} of them, and train.max_steps is {max_steps}: raise it, or leave it out"
        )
    if measure.eval == "epoch":
        problems.append("measure.eval: epoch does not work with measure.profile: set it to off or end")
    return problems


def machine_incompatibilities(spec: Experiment, capability: Capability) -> list[str]:
    """Return error messages for settings that do not work on a GPU of this compute capability (None: no GPU)."""
    problems = [*spec.method.machine_incompatibilities(spec, capability)]
    for name, value in switched_on(spec.optimizations).items():
        if (OPTIMIZATIONS[name].needs_gpu or value == "offload") and capability is None:
            problems.append(f"optimizations.{name}{' offload' * (value == 'offload')} needs a GPU: set it to off")
        problems += OPTIMIZATIONS[name].machine_incompatibilities(spec, capability)
    if capability is not None:
        return problems
    if spec.launch.offload == "params" and spec.launch.strategy == "fsdp":
        problems.append("launch.offload: params with fsdp needs a GPU: set it to none, or use zero3")
    if spec.train.optimizer.startswith("paged"):
        problems.append(f"train.optimizer {spec.train.optimizer} needs a GPU: set it to adamw_torch")
    if spec.train.precision == "fp16":
        problems.append("train.precision fp16 needs a GPU (on a CPU it is ignored): set it to bf16 or fp32")
    return problems


# --- decide every `auto` ---------------------------------------------------------------------------------------------


def resolve(spec: Experiment, capability: Capability) -> Experiment:
    """Return the spec with values for this machine instead of `auto`. `capability` is None without a GPU.

    Choose bfloat16 on GPUs of compute capability 8.0 or higher, and float32 elsewhere. A CPU without bfloat16
    instructions computes bfloat16 much slower than float32."""
    half = capability is not None and capability >= (8, 0)
    where = "no GPU on this machine"
    if capability is not None:
        where = f"compute capability {'.'.join(map(str, capability))} is {'at least' if half else 'below'} 8.0"
    made: dict[str, tuple[Any, str]] = {}
    if spec.model.dtype == "auto":
        made["model.dtype"] = "bfloat16" if half else "float32", where
    if spec.train.precision == "auto":
        made["train.precision"] = "bf16" if half else "fp32", where
    if getattr(spec.method, "compute_dtype", None) == "auto":
        made["method.compute_dtype"] = made.get("model.dtype", (spec.model.dtype, "like model.dtype"))
    if spec.optimizations.triton_kernels == "auto":
        left_out = compute.kernels_left_out(spec, capability)
        on, off = compute.kernel_choices({key: getattr(spec.optimizations, key) for key in ("triton_kernels", "fp8")})
        for name, value in (off if left_out else on).items():
            if value != getattr(spec.optimizations, name):
                made[f"optimizations.{name}"] = value, left_out or "the model family and the GPU are supported"
    if spec.optimizations.cuda_graph == "auto":
        left_out = compute.graph_left_out(spec, capability)
        made["optimizations.cuda_graph"] = left_out is None, left_out or "every step has one shape"
    if not made:
        return spec
    decided = with_changes(spec, {key: value for key, (value, _) in made.items()})
    resolved = {key: {"value": value, "reason": reason} for key, (value, reason) in made.items()}
    decided.__dict__["_resolved"] = {**spec.resolved, **resolved}  # not a field: == ignores it
    return decided


def with_changes(spec: Experiment, changes: Mapping[str, Any]) -> Experiment:
    """Return the spec with these values by dotted key. Call `incompatibilities` to validate the result."""
    sections: dict[str, Part] = {}
    for key, value in changes.items():
        section, _, name = key.partition(".")
        sections[section] = sections.get(section, getattr(spec, section)).model_copy(update={name: value})
    return spec.model_copy(update=sections)


def unpublished(spec: Experiment, capability: Capability) -> str | None:
    """Return why `triton_kernels: auto` becomes off on this machine, else None. With the kernels off, the published
    speed and verdict of a recipe do not apply. For some models they are off on all machines: then return None, too."""
    supported = decoder_family(spec.model) in compute.KERNEL_FAMILIES or spec.optimizations.fp8 != "off"
    reason = compute.kernels_left_out(spec, capability) if supported else None
    return reason and f"recipes are published with {KERNELS} on, but this machine would turn it off: {reason}"

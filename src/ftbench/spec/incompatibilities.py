"""Settings that do not work: on any machine, or on this machine. Each message says how to fix it.

Rules of a single method, objective, strategy or optimization are in its own declaration.
"""

from operator import attrgetter

from ftbench.spec import frameworks, strategies
from ftbench.spec.base import Experiment
from ftbench.spec.methods import reads_images
from ftbench.spec.optimizations import OPTIMIZATIONS, switched_on
from ftbench.spec.optimizations.declaration import OFF, Capability


def incompatibilities(spec: Experiment) -> list[str]:
    """Return why the parts of a spec cannot work together on any machine."""
    problems = [*spec.method.incompatibilities(spec), *spec.objective.incompatibilities(spec)]
    for name in switched_on(spec.optimizations):
        problems += _of_optimization(spec, name)
    launch, optimizer = spec.launch, spec.train.optimizer
    if "torchao" in optimizer and (launch.framework != "trl" or launch.strategy.startswith("zero")):
        who = launch.strategy if launch.framework == "trl" else launch.framework
        problems.append(f"train.optimizer {optimizer} is not supported by {who}: set it to adamw_torch_fused")
    if spec.measure.eval == "epoch" and not spec.dataset.eval_samples:
        problems.append("measure.eval: epoch needs dataset.eval_samples")
    if spec.dataset.has_images and not reads_images(spec.model):
        problems.append(f"dataset: {spec.dataset.name} has images and {spec.model.id} is text-only: use another model")
    return problems + _of_profile(spec) + frameworks.incompatibilities(spec) + strategies.incompatibilities(spec)


def _of_optimization(spec: Experiment, name: str) -> list[str]:
    optimization, problems = OPTIMIZATIONS[name], list[str]()
    if spec.method.name == "unsloth" and optimization.not_with_unsloth:
        problems.append(f"optimizations.{name} with method unsloth: {optimization.not_with_unsloth}")
    problems += dict.fromkeys(why for key, why in optimization.excludes.items() if attrgetter(key)(spec) not in OFF)
    if optimization.needs_images and not spec.dataset.may_have_images:
        problems.append(f"optimizations.{name} needs images and dataset {spec.dataset.name} has none: set it to off")
    return [*problems, *optimization.incompatibilities(spec)]


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
    """Return why a spec cannot work on a machine whose GPU has this compute capability. None: no GPU."""
    problems = [
        *spec.method.machine_incompatibilities(spec, capability),
        *strategies.machine_incompatibilities(spec, capability),
    ]
    for name in switched_on(spec.optimizations):
        if OPTIMIZATIONS[name].needs_gpu and capability is None:
            problems.append(f"optimizations.{name} needs a GPU: set it to off")
        problems += OPTIMIZATIONS[name].machine_incompatibilities(spec, capability)
    if capability is not None:
        return problems
    if spec.train.optimizer.startswith("paged"):
        problems.append(f"train.optimizer {spec.train.optimizer} needs a GPU: set it to adamw_torch")
    if spec.train.precision == "fp16":
        problems.append("train.precision fp16 needs a GPU (on a CPU it is ignored): set it to bf16 or fp32")
    return problems

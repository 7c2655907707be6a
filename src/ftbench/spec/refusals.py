"""What cannot work on any machine or on this one, each as a message that says how to fix it. What one method or one
optimization excludes is in its own file."""

from operator import attrgetter

from ftbench.spec import frameworks, strategies
from ftbench.spec.base import Experiment
from ftbench.spec.methods import reads_images
from ftbench.spec.optimizations import OPTIMIZATIONS, switched_on
from ftbench.spec.optimizations.declaration import OFF, Capability


def refusals(spec: Experiment) -> list[str]:
    """Return why the parts of a spec cannot work together on any machine."""
    switched = switched_on(spec.optimizations)
    sentences = [*spec.method.refusals(spec), *spec.objective.refusals(spec)]
    if spec.method.name == "unsloth":
        pairs = ((name, OPTIMIZATIONS[name].unsloth) for name in switched)
        sentences += [f"optimizations.{name} with method unsloth: {why}" for name, why in pairs if why]
    for name, kept in ((name, OPTIMIZATIONS[name]) for name in switched):
        sentences += dict.fromkeys(why for key, why in kept.excludes.items() if attrgetter(key)(spec) not in OFF)
        if kept.images and not spec.dataset.may_have_images:
            sentences.append(f"optimizations.{name} {kept.images}, and {spec.dataset.name} has none: leave it off")
        sentences += kept.refusals(spec)
    if "torchao" in spec.train.optimizer and (
        spec.launch.framework != "trl" or spec.launch.strategy.startswith("zero")
    ):
        who = spec.launch.strategy if spec.launch.framework == "trl" else spec.launch.framework
        sentences.append(f"train.optimizer {spec.train.optimizer} is not known to {who}: set it to adamw_torch_fused")
    if spec.measure.eval == "epoch" and not spec.dataset.eval_samples:
        sentences.append("measure.eval: epoch needs dataset.eval_samples")
    return sentences + _of_images(spec) + _of_profile(spec) + frameworks.refusals(spec) + strategies.refusals(spec)


def _of_images(spec: Experiment) -> list[str]:
    if not spec.dataset.has_images or reads_images(spec.model):
        return []
    return [f"dataset: {spec.dataset.name} holds images, and {spec.model.id} reads none: take one that does"]


def _of_profile(spec: Experiment) -> list[str]:
    if spec.measure.profile == "off":
        return []
    sentences, needed = [], spec.measure.steps_to_profile
    if spec.launch.mock != "off":
        sentences.append(
            "measure.profile: launch.mock trains nothing, so there is nothing to profile: set one of them to off"
        )
    if spec.train.max_steps is not None and spec.train.max_steps < needed:
        sentences.append(
            f"measure.profile {spec.measure.profile} needs {needed} steps to profile {spec.measure.profile_steps} of "
            f"them and train.max_steps is {spec.train.max_steps}: raise it, or leave it out"
        )
    if spec.measure.eval == "epoch":
        sentences.append("measure.eval: epoch has no place in a run that is profiled: set it to off or end")
    return sentences


def refusals_on(spec: Experiment, capability: Capability) -> list[str]:
    """Return why a spec cannot work on a machine whose GPU has this compute capability; None is one without a GPU."""
    sentences = [*spec.method.refusals_on(spec, capability), *strategies.refusals_on(spec, capability)]
    for name in switched_on(spec.optimizations):
        if OPTIMIZATIONS[name].needs_gpu and capability is None:
            sentences.append(f"optimizations.{name} needs a GPU: set it to off")
        sentences += OPTIMIZATIONS[name].refusals_on(spec, capability)
    if capability is not None:
        return sentences
    if spec.train.optimizer.startswith("paged"):
        sentences.append(f"train.optimizer {spec.train.optimizer} needs a GPU to page from: set it to adamw_torch")
    if spec.train.precision == "fp16":
        sentences.append(
            "train.precision fp16 needs a GPU (a CPU trains in fp32 without saying so): set it to bf16 or fp32"
        )
    return sentences

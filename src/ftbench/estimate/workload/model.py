"""The shape of a spec's model, from the shipped facts or a local config.json."""

from functools import cache
from pathlib import Path

from ftbench.errors import SpecError
from ftbench.facts import architectures
from ftbench.families import UnknownFamilyError, describe
from ftbench.families.shape import ModelShape
from ftbench.spec.base import nearest
from ftbench.spec.experiment import Experiment, Model
from ftbench.spec.methods import Unsloth
from ftbench.spec.reading import read_config


def check_modelled(spec: Experiment) -> None:
    """Raise SpecError if no formula describes the step of a spec. The message names the most similar spec that has one.

    This concerns other methods, other frameworks with their best settings, and settings of unsloth that were not
    measured."""
    method, on = spec.method, spec.optimizations
    if spec.objective.prompts:
        raise SpecError(
            f"objective {spec.objective.name} has no formula for memory and time: train a few steps with "
            "`ftbench run SPEC --set train.max_steps=5`"
        )
    if spec.launch.settings == "best":
        raise SpecError(
            f"launch.settings best of {spec.launch.framework} has no formula: estimate with "
            "--set launch.settings=plain, or train a few steps with --set train.max_steps=5"
        )
    if not method.adapters and method.name != "full":
        raise SpecError(
            f"method {method.name} has no formula for memory and time: train a few steps with "
            f"`ftbench run SPEC --set train.max_steps=5`"
        )
    if not isinstance(method, Unsloth):
        return
    if shape_of(spec.model).vision:
        raise SpecError(
            "unsloth with images was never measured: estimate with --set "
            f"method={'qlora' if method.load_in_4bit else 'lora'}, or train a few steps with --set train.max_steps=5"
        )
    unmeasured = {
        "8-bit weights": (method.load_in_fp8, "method.load_in_fp8=off"),
        "layers that it does not compile": (not method.block_compile, "method.block_compile=on"),
        "CUDA graphs": (method.cuda_graphs, "method.cuda_graphs=off"),
        "more autotuning": (method.compile_maximum, "method.compile_maximum=off"),
        "packed rows on 4-bit weights": (on.packing and method.load_in_4bit, "optimizations.packing=off"),
    }
    if what := {name: change for name, (given, change) in unmeasured.items() if given}:
        raise SpecError(
            f"unsloth with {' and '.join(what)} was never measured: the most similar estimated spec has "
            f"{' '.join(f'--set {change}' for change in what.values())}; or train a few steps with --set "
            "train.max_steps=5"
        )


def is_rough(spec: Experiment) -> bool:
    """Return whether a step is known only roughly.

    unsloth's packing on a large model took 14 % more memory than rows of one sample, and more than twice the time.
    Other frameworks took 17 % more, and with QLoRA 19 % less, than ftbench's own loop (headline-first/short-equal and
    frameworks in results/h200)."""
    packed = isinstance(spec.method, Unsloth) and spec.optimizations.packing
    return packed or spec.launch.framework != "trl"


def shape_of(model: Model) -> ModelShape:
    """Return the shape of a spec's model from model.path or the shipped facts.

    Raise SpecError if it is unknown or its config.json is wrong."""
    if not model.path and model.id in architectures():
        return _known(model.id)
    if not model.path:
        folder = f" (write a folder as `model: {{path: {model.id}}}`)" if model.id.startswith((".", "/", "~")) else ""
        meant = folder or nearest(model.id, architectures())
        raise SpecError(
            f"the shape of {model.id} is not known{meant}: set model.path to a folder with its config.json, or "
            "use a model of `ftbench list models`"
        )
    try:
        return describe(read_config(Path(model.path)))
    except UnknownFamilyError as error:
        raise SpecError(
            f"model {model.id}: {error}; measure it with `ftbench run SPEC --set train.max_steps=5`"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        reason = f"config.json: {error} is missing" if isinstance(error, KeyError) else str(error)
        raise SpecError(f"model {model.id}: {reason}: correct it, or use the published file") from None


@cache
def _known(name: str) -> ModelShape:
    return describe(architectures()[name])

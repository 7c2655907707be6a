"""Declare the training frameworks other than trl, and the settings that each framework supports."""

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ftbench.spec.base import Experiment, Launch
from ftbench.spec.methods import family
from ftbench.spec.optimizations import switched_on
from ftbench.spec.reading import as_text

_VERSIONS = Path(__file__).resolve().parents[1] / "facts" / "environments"


@dataclass(frozen=True)
class Framework:
    """A training framework: its package, and the supported settings.

    `own_loop` is True if the framework does not train with transformers.Trainer.
    """

    package: str
    own_loop: bool = False
    methods: tuple[str, ...] = ("lora", "qlora", "full")
    optimizers: tuple[str, ...] = ("adamw_torch", "adamw_torch_fused", "adamw_bnb_8bit", "paged_adamw_8bit", "sgd")
    strategies: tuple[str, ...] = ()
    attention: tuple[str, ...] = ("auto", "eager", "sdpa", "flash_attention_2")

    @property
    def file(self) -> Path:
        """The requirements file with the tested versions of all packages except torch."""
        return _VERSIONS / f"{self.package}.txt"

    @cached_property
    def versions(self) -> dict[str, str]:
        """The tested versions: {normalized package name: version}."""
        pairs = (line.partition("==") for line in self.file.read_text().split())
        return {re.sub(r"[-_.]+", "-", name).lower(): version for name, _, version in pairs}

    @property
    def version(self) -> str:
        """The tested version of the framework."""
        return self.versions[self.package]

    @property
    def install_hint(self) -> str:
        """A sentence for error messages that explains how to install the framework."""
        name = next(name for name, each in FRAMEWORKS.items() if each is self)
        return f"install it as docs/how-to/other-frameworks.md says ({name}), and set launch.python to DIR/bin/python"


FRAMEWORKS = {
    "axolotl": Framework("axolotl"),
    "llamafactory": Framework("llamafactory"),
    "ms-swift": Framework("ms-swift"),
    "megatron": Framework(
        "megatron-core", own_loop=True, methods=("full",), optimizers=("adamw_torch", "sgd"),
        strategies=("ddp", "tp", "pp", "pp+tp", "pp+ddp"), attention=("auto", "sdpa"),
    ),
    "verl": Framework(
        "verl", own_loop=True, methods=("lora", "full"), optimizers=("adamw_torch", "adamw_torch_fused", "sgd"),
        strategies=("fsdp",),
    ),
}  # fmt: skip
MEGATRON_FAMILIES = ("llama", "qwen3")
SUPPORTED = {"attention", "gradient_checkpointing", "liger"}


def interpreter(launch: Launch) -> str:
    """Return the absolute path of `launch.python`. Keep symlinks: Python finds its environment through them."""
    return os.path.abspath(os.path.expanduser(str(launch.python)))


def incompatibilities(spec: Experiment) -> list[str]:
    """Return an error message for each setting that the framework does not support."""
    launch, on, train = spec.launch, spec.optimizations, spec.train
    if launch.framework == "trl":
        problems = ["launch.python is the interpreter of another framework: leave it out"] if launch.python else []
        if launch.settings != "plain":
            problems.append("launch.settings is for another framework: leave it out, or use `recipe: fastest` with trl")
        return problems
    who, framework = f"launch.framework {launch.framework}", FRAMEWORKS[launch.framework]
    problems = []
    if not launch.python and launch.mock == "off":
        problems.append(f"{who} needs launch.python, the interpreter of its environment: {framework.install_hint}")
    for key, value, supported in (
        ("method", spec.method.name, framework.methods),
        ("train.optimizer", train.optimizer, framework.optimizers),
        ("optimizations.attention", on.attention, framework.attention),
        ("launch.strategy", launch.strategy, ("none", *framework.strategies)),
        ("optimizations.gradient_checkpointing", as_text(on.gradient_checkpointing), ("on", "off")),
    ):
        if value not in supported:
            problems.append(f"{key} {value}: {who} needs another value ({', '.join(supported)}): set it, or use trl")
    if spec.method.mxfp4:
        problems.append(f"method.quant_type mxfp4 is not supported by {who}: use nf4, or use trl")
    if spec.dataset.has_images:
        problems.append(f"{who} supports only text: use another dataset, or use trl")
    others = [name for name in switched_on(on) if name not in SUPPORTED - ({"liger"} if framework.own_loop else set())]
    problems += [f"optimizations.{name} is not supported by {who}: set it to off, or use trl" for name in others]
    measured = {
        "eval": spec.dataset.eval_samples and spec.measure.eval != "off",
        "profile": spec.measure.profile != "off", "gradients": spec.measure.gradients,
        "control": spec.measure.control != "off",
        "save_adapter": spec.measure.save_adapter and launch.framework != "megatron",
    }  # fmt: skip
    problems += [f"measure.{name} needs trl: set it to off, or use trl" for name, on in measured.items() if on]
    if framework.own_loop and launch.settings != "plain":
        problems.append(f"launch.settings {launch.settings}: {who} supports only plain settings: leave it out")
    if framework.own_loop and "float16" in (spec.model.dtype, {"fp16": "float16"}.get(train.precision)):
        problems.append(f"{who} does not train in float16: set model.dtype to bfloat16 and train.precision to bf16")
    return [*problems, *(_OF[launch.framework](spec, who) if framework.own_loop else ())]


def _of_megatron(spec: Experiment, who: str) -> Iterator[str]:
    launch = spec.launch
    if (name := family(spec.model)) not in (None, *MEGATRON_FAMILIES):
        yield f"model {spec.model.id}: {who} converts {' and '.join(MEGATRON_FAMILIES)}, not {name}: use trl"
    if spec.measure.save_adapter and launch.pp:
        yield f"measure.save_adapter: {who} cannot save a model with several pipeline stages: set it to off"
    if launch.schedule != "1f1b" or launch.split:
        yield f"launch.schedule and split: {who} supports only equal stages and 1f1b: leave them out"


def _of_verl(spec: Experiment, who: str) -> Iterator[str]:
    method, samples = spec.method, spec.dataset.samples
    if method.name == "lora" and (method.dropout or method.alpha != int(method.alpha)):
        yield f"{who} supports only a whole number as method.alpha, and method.dropout 0: change them"
    if samples and samples % spec.global_batch and (spec.train.max_steps or math.inf) * spec.global_batch > samples:
        yield (
            f"dataset.samples {samples:,}: {who} drops the last batch of an epoch unless it is complete: set it to a "
            f"multiple of {spec.global_batch:,}"
        )


_OF: dict[str, Callable[[Experiment, str], Iterable[str]]] = {"megatron": _of_megatron, "verl": _of_verl}


def needs(spec: Experiment, on_gpu: bool) -> dict[str, str]:
    """Return the packages that a spec needs in addition to the framework: {package: reason}."""
    wanted = {"nvidia-ml-py": "recording on a GPU"} if on_gpu else {}
    if spec.launch.settings == "best":
        wanted["liger-kernel"] = "launch.settings best"
    if spec.optimizations.liger:
        wanted["liger-kernel"] = "optimizations.liger"
    if spec.optimizations.attention == "flash_attention_2":
        wanted["flash-attn"] = "optimizations.attention flash_attention_2"
    return wanted

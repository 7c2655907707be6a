"""Frameworks other than trl that can run the training loop, and the settings they support."""

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ftbench.spec.base import OFF, Experiment, Launch
from ftbench.spec.methods import family
from ftbench.spec.optimizations import switched_on

_VERSIONS = Path(__file__).resolve().parents[1] / "facts" / "environments"


@dataclass(frozen=True)
class Framework:
    """A value of `launch.framework`: its package, and the module of its trainer.

    `own_loop` is set if it does not train through transformers.Trainer.
    """

    package: str
    entry: str
    own_loop: bool = False

    @property
    def file(self) -> Path:
        """The requirements file of the tested versions, without torch."""
        return _VERSIONS / f"{self.package}.txt"

    @cached_property
    def versions(self) -> dict[str, str]:
        """The tested versions by normalized package name."""
        pairs = (line.partition("==") for line in self.file.read_text().split())
        return {re.sub(r"[-_.]+", "-", name).lower(): version for name, _, version in pairs}

    @property
    def version(self) -> str:
        """The tested version of the framework."""
        return self.versions[self.package]

    @property
    def way(self) -> str:
        """Return how to install the framework."""
        name = next(name for name, each in FRAMEWORKS.items() if each is self)
        return f"install it as docs/how-to/other-frameworks.md says ({name}), and set launch.python to DIR/bin/python"


FRAMEWORKS = {
    "axolotl": Framework("axolotl", "axolotl.train"),
    "llamafactory": Framework("llamafactory", "llamafactory.train.tuner"),
    "ms-swift": Framework("ms-swift", "swift.pipelines.train.sft"),
    "megatron": Framework("megatron-core", "megatron.core.models.gpt", own_loop=True),
    "verl": Framework("verl", "verl.trainer.sft_trainer", own_loop=True),
}
MEGATRON_FAMILIES = ("llama", "qwen3")
SUPPORTED = {"attention", "gradient_checkpointing", "liger"}
ATTENTION = ("auto", "eager", "sdpa", "flash_attention_2")


def interpreter(launch: Launch) -> str:
    """Return the interpreter of the framework's environment. Symlinks are kept: Python needs them."""
    return os.path.abspath(os.path.expanduser(str(launch.python)))


def incompatibilities(spec: Experiment) -> list[str]:
    """Return the settings that the framework does not support, and how to fix each."""
    launch, on = spec.launch, spec.optimizations
    if launch.framework == "trl":
        return _of_trl(launch)
    who = f"launch.framework {launch.framework}"
    problems = []
    if not launch.python and launch.mock == "off":
        problems.append(
            f"{who} needs launch.python, the interpreter of its environment: {FRAMEWORKS[launch.framework].way}"
        )
    own_loop = FRAMEWORKS[launch.framework].own_loop
    if own_loop:
        problems += _OF[launch.framework](spec)
    elif spec.method.name == "unsloth" or (spec.method.quantised and spec.method.mxfp4):
        problems.append(f"{who} trains lora, qlora (nf4 or fp4) or full: change the method, or use trl")
    if "torchao" in spec.train.optimizer:
        problems.append(f"train.optimizer {spec.train.optimizer}: {who} takes torch's and bitsandbytes', or use trl")
    if spec.dataset.has_images:
        problems.append(f"{who} supports only text: use another dataset, or use trl")
    if launch.gpus > 1 and launch.strategy not in (strategies := _STRATEGIES.get(launch.framework, ())):
        ways = f"launch.strategy {' or '.join(strategies)}" if strategies else "one GPU"
        problems.append(f"{who} supports {ways}: set launch.gpus to 1, or use trl")
    others = [name for name in switched_on(on) if name not in SUPPORTED - ({"liger"} if own_loop else set())]
    problems += [f"optimizations.{name} is not supported by {who}: set it to off, or use trl" for name in others]
    if on.attention not in ATTENTION:
        problems.append(f"optimizations.attention {on.attention}: {who} supports {', '.join(ATTENTION)}")
    if on.gradient_checkpointing not in (*OFF, True):
        problems.append(f"optimizations.gradient_checkpointing: {who} supports on and off")
    measured = {
        "eval": spec.dataset.eval_samples and spec.measure.eval != "off",
        "profile": spec.measure.profile != "off", "gradients": spec.measure.gradients,
        "control": spec.measure.control != "off",
        "save_adapter": spec.measure.save_adapter and launch.framework != "megatron",
    }  # fmt: skip
    problems += [f"measure.{name} needs trl: leave it out, or use trl" for name, on in measured.items() if on]
    return problems


_STRATEGIES = {"megatron": ("ddp", "tp", "pp", "pp+tp", "pp+ddp"), "verl": ("fsdp",)}  # for several GPUs


def _of_megatron(spec: Experiment) -> list[str]:
    who, launch = "launch.framework megatron", spec.launch
    problems = _of_own_loop(spec, who, ("adamw_torch", "sgd"))
    if spec.method.name != "full":
        problems.append(
            f"method {spec.method.name}: {who} trains full only. Megatron's LoRA is in Megatron-Bridge, which needs "
            "Transformer Engine: set method to full, or use trl"
        )
    if (name := family(spec.model)) not in (None, *MEGATRON_FAMILIES):
        problems.append(f"model {spec.model.id}: {who} converts {' and '.join(MEGATRON_FAMILIES)}, not {name}: use trl")
    if spec.optimizations.attention not in ("auto", "sdpa"):
        problems.append(f"optimizations.attention {spec.optimizations.attention}: {who} runs torch's: set it to sdpa")
    if spec.measure.save_adapter and launch.pp:
        problems.append(f"measure.save_adapter: {who} saves models in one pipeline stage: set it to off")
    if launch.schedule != "1f1b" or launch.split:
        problems.append(f"launch.schedule and split: {who} has equal stages and 1f1b here: leave them out")
    return problems


def _of_verl(spec: Experiment) -> list[str]:
    who, train, method = "launch.framework verl", spec.train, spec.method
    problems = _of_own_loop(spec, who, ("adamw_torch", "adamw_torch_fused", "sgd"))
    if method.name not in ("lora", "full"):
        problems.append(f"method {method.name}: {who} trains lora and full: change the method, or use trl")
    elif method.name == "lora" and (method.dropout or method.alpha != int(method.alpha)):
        problems.append(f"method.alpha must be whole and method.dropout 0: {who} has no setting for others")
    samples = spec.dataset.samples
    if samples and samples % spec.global_batch and (train.max_steps or math.inf) * spec.global_batch > samples:
        problems.append(
            f"dataset.samples {samples:,}: {who} drops the last batch of an epoch unless it is complete: set it to a "
            f"multiple of {spec.global_batch:,}"
        )
    return problems


def _of_own_loop(spec: Experiment, who: str, optimizers: tuple[str, ...]) -> list[str]:
    train, problems = spec.train, list[str]()
    if spec.launch.settings != "plain":
        problems.append(f"launch.settings {spec.launch.settings}: {who} has no other settings here: leave it out")
    if train.optimizer not in optimizers:
        problems.append(f"train.optimizer {train.optimizer}: {who} takes {', '.join(optimizers)}: set one of them")
    if "float16" in (spec.model.dtype, {"fp16": "float16"}.get(train.precision)):
        problems.append(f"float16: {who} trains in bfloat16 or float32 here: set model.dtype and train.precision")
    return problems


_OF: dict[str, Callable[[Experiment], list[str]]] = {"megatron": _of_megatron, "verl": _of_verl}


def _of_trl(launch: Launch) -> list[str]:
    problems = ["launch.python is the interpreter of another framework: leave it out"] if launch.python else []
    if launch.settings != "plain":
        problems.append("launch.settings is for another framework: leave it out, or use `recipe: fastest` with trl")
    return problems


def packs(spec: Experiment) -> bool:
    """Return whether the framework's best settings include its packing.

    Packing needs an attention kernel that separates the samples of a row. A mask over all pairs would be slower than no
    packing. LLaMA-Factory packs only while it tokenizes, and here it gets tokenized rows.
    """
    launch = spec.launch
    flash = spec.optimizations.attention == "flash_attention_2"
    return launch.settings == "best" and flash and launch.framework != "llamafactory"


def needs(spec: Experiment, on_gpu: bool) -> dict[str, str]:
    """Return the packages that a spec needs in addition to the framework, each with the reason."""
    wanted = {"nvidia-ml-py": "recording on a GPU"} if on_gpu else {}
    if spec.launch.settings == "best":
        wanted["liger-kernel"] = "launch.settings best"
    if spec.optimizations.liger:
        wanted["liger-kernel"] = "optimizations.liger"
    if spec.optimizations.attention == "flash_attention_2":
        wanted["flash-attn"] = "optimizations.attention flash_attention_2"
    return wanted

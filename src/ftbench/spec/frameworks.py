"""Which frameworks can run a spec's training loop in an environment of their own, and what of a spec reaches them."""

import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ftbench.spec.base import Experiment, Launch, shown
from ftbench.spec.optimizations import switched_on
from ftbench.spec.optimizations.declaration import OFF

TORCH = "torch==2.13.0"
_VERSIONS = Path(__file__).resolve().parents[1] / "facts" / "environments"


@dataclass(frozen=True)
class Framework:
    """A value of `launch.framework`: the package that is installed for it, the module that has its trainer, how much an
    environment takes with a torch for the CPU, what its import needs that only a torch for CUDA brings, and modules
    that it imports, has no use for here, and no build of fits this torch."""

    package: str
    entry: str
    gib: float
    without_gpu: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()

    @property
    def file(self) -> Path:
        """Return the file of all that was tried together but for torch, as pip takes it."""
        return _VERSIONS / f"{self.package}.txt"

    @cached_property
    def versions(self) -> dict[str, str]:
        """Return the versions of these packages, by their names in small letters with hyphens."""
        pairs = (line.partition("==") for line in self.file.read_text().split())
        return {re.sub(r"[-_.]+", "-", name).lower(): version for name, _, version in pairs}

    @property
    def version(self) -> str:
        """Return the version of the framework itself that was tried."""
        return self.versions[self.package]

    @property
    def way(self) -> str:
        """Return how to make an environment that has it."""
        name = next(name for name, each in FRAMEWORKS.items() if each is self)
        return f"`ftbench env create {name} DIR` makes one, and launch.python is DIR/bin/python"


FRAMEWORKS = {
    "axolotl": Framework("axolotl", "axolotl.train", 3.5, ("triton==3.9.0",)),
    "llamafactory": Framework("llamafactory", "llamafactory.train.tuner", 2.0, empty=("torchaudio",)),
    "ms-swift": Framework("ms-swift", "swift.pipelines.train.sft", 2.2),
}
# Frameworks that were tried and do not train here: what each of them did, in an environment of its own without a GPU
# (torch 2.13.0), and what to use instead.
INSTEAD = "use trl, axolotl, llamafactory or ms-swift"
REFUSED = {
    "verl": (
        "verl's SFT trainer (0.9.1) asks for NCCL and for a CUDA device before its first step, and shuffles its "
        "samples whatever it is told, so that no run of it could be held against the same tokens"
    ),
    "nemo-automodel": (
        "NeMo AutoModel (0.7.0) loads its models onto a CUDA device alone, so that no run of it could be held against "
        "the same tokens"
    ),
    "megatron-bridge": "Megatron-Bridge imports Transformer Engine: import its logs with `ftbench import`",
    "torchtune": "the development of torchtune has stopped",
}
_ALSO = {"nemo": "nemo-automodel", "automodel": "nemo-automodel", "megatron": "megatron-bridge"}
CARRIED = {"attention", "gradient_checkpointing", "liger"}
ATTENTION = ("auto", "eager", "sdpa", "flash_attention_2")


def named(value: object) -> object:
    """Return the name of a framework. Raise ValueError with the reason for one that was tried and does not train."""
    name = _ALSO.get(str(value).lower(), str(value).lower())
    if reason := REFUSED.get(name):
        raise ValueError(f"{shown(value)} is not driven: {reason}: {INSTEAD}")
    return value


def interpreter(launch: Launch) -> str:
    """Return the interpreter of the framework's environment: a link to one is left as it is, for it is by its own place
    that Python finds the environment."""
    return absolute(str(launch.python))


def absolute(python: str) -> str:
    """Return the whole path of an interpreter."""
    return os.path.abspath(os.path.expanduser(python))


def incompatibilities(spec: Experiment) -> list[str]:
    """Return what of a spec another framework would not be told, each as a sentence with a way out."""
    launch, on = spec.launch, spec.optimizations
    who = f"launch.framework {launch.framework}"
    if launch.framework == "trl":
        return _refusals_beside_trl(launch)
    sentences = []
    if not launch.python and launch.mock == "off":
        sentences.append(
            f"{who} needs launch.python, the interpreter of an environment that has it: "
            f"{FRAMEWORKS[launch.framework].way}"
        )
    if spec.method.name == "unsloth" or (spec.method.quantised and spec.method.mxfp4):
        sentences.append(f"{who} trains lora, qlora (nf4 or fp4) or full: change the method, or use trl")
    if "torchao" in spec.train.optimizer:
        sentences.append(f"train.optimizer {spec.train.optimizer}: {who} takes torch's and bitsandbytes', or use trl")
    if spec.dataset.has_images:
        sentences.append(f"{who} is given text alone: take another data set, or use trl")
    if launch.gpus > 1:
        sentences.append(f"{who} trains on one GPU here: set launch.gpus to 1, or use trl")
    others = [name for name in switched_on(on) if name not in CARRIED]
    sentences += [f"optimizations.{name} is ftbench's own: leave it out beside {who}, or use trl" for name in others]
    if on.attention not in ATTENTION:
        sentences.append(f"optimizations.attention {on.attention}: {who} takes {', '.join(ATTENTION)}")
    if on.gradient_checkpointing not in (*OFF, True):
        sentences.append(f"optimizations.gradient_checkpointing: {who} knows on and off")
    measured = {
        "eval": spec.dataset.eval_samples and spec.measure.eval != "off", "generate": spec.measure.generate,
        "profile": spec.measure.profile != "off", "gradients": spec.measure.gradients,
        "control": spec.measure.control != "off", "save_adapter": spec.measure.save_adapter,
    }  # fmt: skip
    sentences += [
        f"measure.{name} is for ftbench's own loop: leave it out, or use trl" for name, on in measured.items() if on
    ]
    return sentences


def _refusals_beside_trl(launch: Launch) -> list[str]:
    sentences = ["launch.python is the interpreter of another framework: leave it out"] if launch.python else []
    if launch.settings != "plain":
        sentences.append("launch.settings is of another framework: leave it out, or take `recipe: fastest` beside trl")
    return sentences


def packs(spec: Experiment) -> bool:
    """Return whether a framework's best has its packing: only where the attention is told where samples begin, for with
    others it would work through masks of all pairs, which is slower than not to pack. LLaMA-Factory packs while it
    tokenises, and is given rows of tokens."""
    launch = spec.launch
    flash = spec.optimizations.attention == "flash_attention_2"
    return launch.settings == "best" and flash and launch.framework != "llamafactory"


def needs(spec: Experiment, on_gpu: bool) -> dict[str, str]:
    """Return the packages that a spec needs beside the framework, each with what wants it: a key, or the recorder."""
    wanted = {"nvidia-ml-py": "recording on a GPU"} if on_gpu else {}
    if spec.launch.settings == "best":
        wanted["liger-kernel"] = "launch.settings best"
    if spec.optimizations.liger:
        wanted["liger-kernel"] = "optimizations.liger"
    if spec.optimizations.attention == "flash_attention_2":
        wanted["flash-attn"] = "optimizations.attention flash_attention_2"
    return wanted

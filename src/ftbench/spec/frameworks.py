"""Which frameworks can run a spec's training loop in an environment of their own, and what of a spec reaches them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftbench.spec.optimizations import switched_on
from ftbench.spec.optimizations.declaration import OFF

if TYPE_CHECKING:
    from ftbench.spec.experiment import Experiment, Launch


@dataclass(frozen=True)
class Framework:
    """A value of `launch.framework`: the package that is installed for it, and the versions that were tried together,
    as pip takes them."""

    package: str
    version: str
    beside: tuple[str, ...]

    @property
    def way(self) -> str:
        """Return how to make an environment that has it."""
        packages = " ".join(f"'{name}'" for name in (f"{self.package}=={self.version}", *self.beside))
        return f"python -m venv DIR; DIR/bin/pip install {packages}; then launch.python is DIR/bin/python"


FRAMEWORKS = {
    "axolotl": Framework(
        "axolotl", "0.19.0", ("transformers==5.16.1", "trl==1.9.0", "peft==0.20.0", "datasets==4.8.5", "pydantic")
    ),
    "llamafactory": Framework(
        "llamafactory", "0.9.5",
        ("transformers==4.57.6", "trl==0.24.0", "peft==0.18.1", "datasets==4.0.0", "accelerate==1.11.0", "pydantic"),
    ),
    "ms-swift": Framework(
        "ms-swift", "4.6.0", ("transformers==5.17.0", "trl==0.29.1", "peft==0.20.0", "datasets==4.8.4", "pydantic")
    ),
}  # fmt: skip
CARRIED = {"attention", "gradient_checkpointing", "liger"}
ATTENTION = ("auto", "eager", "sdpa", "flash_attention_2")


def interpreter(launch: Launch) -> str:
    """Return the interpreter of the framework's environment: a link to one is left as it is, for it is by its own place
    that Python finds the environment."""
    return os.path.abspath(os.path.expanduser(str(launch.python)))


def refusals(spec: Experiment) -> list[str]:
    """Return what of a spec another framework would not be told, each as a sentence with a way out."""
    launch, on = spec.launch, spec.optimizations
    who = f"launch.framework {launch.framework}"
    if launch.framework == "trl":
        return ["launch.python is the interpreter of another framework: leave it out"] if launch.python else []
    sentences = []
    if not launch.python and launch.mock == "off":
        sentences.append(
            f"{who} needs launch.python, the interpreter of an environment that has it: "
            f"{FRAMEWORKS[launch.framework].way}"
        )
    if spec.method.name == "unsloth" or (spec.method.quantised and spec.method.mxfp4):
        sentences.append(f"{who} trains lora, qlora (nf4 or fp4) or full: change the method, or use trl")
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

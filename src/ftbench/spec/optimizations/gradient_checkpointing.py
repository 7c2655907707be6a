"""Gradient checkpointing: the activations of a layer are made again in the backward pass."""

from collections.abc import Iterator
from typing import Annotated, Literal

from ftbench.spec.base import Experiment
from ftbench.spec.optimizations.declaration import EXACT, Optimization, Tolerance, offload_needs_gpu, or_words


def _refusals(spec: Experiment) -> Iterator[str]:
    setting = spec.optimizations.gradient_checkpointing
    if (name := spec.launch.strategy) in ("fsdp", "tp+fsdp", "cp") and setting not in (True, False):
        yield f"optimizations.gradient_checkpointing {setting}: {name} checkpoints all layers or none: use on or off"
    if (objective := spec.objective.name) != "sft" and setting not in (True, False):
        yield (
            f"optimizations.gradient_checkpointing {setting} with objective {objective}: trl switches checkpoints off "
            "and on again around the reference, in all layers: use on or off"
        )


OPTIMIZATION = Optimization(
    type=Annotated[bool | Literal["selective", "offload"], or_words("selective", "offload")],
    description="keep only each layer's input and compute the rest again in the backward pass: less memory, slower; "
    "selective does so in every second layer, offload keeps the inputs in host memory",
    verified="every layer's switch is read after the first step (selective: half of them; offload: as many inputs went "
    "out and came back as there are layers)",
    tolerance=Tolerance(EXACT),
    pairs=None,
    unsloth="set method.use_gradient_checkpointing instead",
    refusals=_refusals,
    refusals_on=offload_needs_gpu("gradient_checkpointing"),
)

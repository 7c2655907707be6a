"""Gradient checkpointing: the activations of a layer are made again in the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from ftbench.spec.optimizations.declaration import EXACT, Capability, Optimization, Tolerance, or_words

if TYPE_CHECKING:
    from ftbench.spec.experiment import Experiment


def _refusals(spec: Experiment) -> Iterator[str]:
    setting = spec.optimizations.gradient_checkpointing
    if (name := spec.launch.strategy) in ("fsdp", "cp") and setting not in (True, False):
        yield f"optimizations.gradient_checkpointing {setting}: {name} checkpoints all layers or none: use on or off"
    if spec.objective.pairs and setting not in (True, False):
        yield (
            f"optimizations.gradient_checkpointing {setting} with objective dpo: trl switches checkpoints off and on "
            "again around the reference, in all layers: use on or off"
        )


def _refusals_on(spec: Experiment, capability: Capability) -> Iterator[str]:
    if spec.optimizations.gradient_checkpointing == "offload" and capability is None:
        yield "optimizations.gradient_checkpointing offload needs a GPU whose memory it saves: set it to on"


def _unsimulated(spec: Experiment) -> tuple[str, str] | None:
    if spec.optimizations.gradient_checkpointing != "offload":
        return None
    why = "optimizations.gradient_checkpointing offload: it moves tensors by streams that only a GPU has"
    return why, "optimizations.gradient_checkpointing=on"


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
    refusals_on=_refusals_on,
    unsimulated=_unsimulated,
)

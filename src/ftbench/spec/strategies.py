"""How a run uses several GPUs: what each strategy is, and what it cannot go with, each as a sentence with a way out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftbench.spec.experiment import Experiment


@dataclass(frozen=True)
class Strategy:
    """A value of `launch.strategy`. `verified` says how a run knows that it is there; `refusals` are what it cannot go
    with."""

    description: str
    verified: str
    refusals: Callable[[Experiment], Iterable[str]] = lambda spec: ()


STRATEGIES = {
    "ddp": Strategy(
        description="a copy of the model on each GPU, each trained on its share of the batch; gradients are summed",
        verified="the model is wrapped for as many ranks, and after the first step all hold the same weights",
    ),
}


def refusals(spec: Experiment) -> list[str]:
    """Return what of `launch` cannot work, or not with the rest of the spec."""
    launch, name = spec.launch, spec.launch.strategy
    if launch.offload != "none":
        return [f"launch.offload: {launch.offload} cannot be launched yet: set it to none"]
    if launch.ranks == 1:
        several = f"launch.strategy: {name} is for several GPUs and launch.gpus is 1: raise it, or set strategy to none"
        return [several] if name != "none" else []
    if name == "none":
        known = "; ".join(f"{key}: {strategy.description}" for key, strategy in STRATEGIES.items())
        return [f"launch.strategy: none is for one GPU and launch.gpus is {launch.gpus}: take one of {known}"]
    if name not in STRATEGIES:
        return [f"launch.strategy: {name} cannot be launched yet: use {' or '.join(STRATEGIES)}"]
    sentences = list(STRATEGIES[name].refusals(spec))
    if spec.method.name == "unsloth":
        sentences.append("method unsloth trains on one GPU: set launch.gpus to 1, or use method lora or qlora")
    return sentences

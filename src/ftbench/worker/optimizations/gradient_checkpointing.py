"""Gradient checkpointing: the trainer turns it on in every layer that supports it (SFTConfig); `selective` turns it off
again in every second one."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from ftbench.spec.experiment import Experiment
from ftbench.worker.optimizations.compile import decoder_layers


def apply(model: Any, spec: Experiment) -> None:
    return None


class Selective(TrainerCallback):
    """Every second layer keeps its activations. The trainer switches all layers on as training begins, after which
    this is called."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for layer in decoder_layers(model)[1::2]:
            for module in layer.modules():
                if hasattr(module, "gradient_checkpointing"):
                    module.gradient_checkpointing = False


def share(model: Any) -> float:
    """The share of the decoder's layers whose activations are made again."""
    layers = decoder_layers(model)
    return sum(any(_is_on(module) for module in layer.modules()) for layer in layers) / len(layers)


def _is_on(module: Any) -> bool:
    return getattr(module, "gradient_checkpointing", False) is True


def asked_for(spec: Experiment) -> bool | str:
    """By the optimization, or by unsloth's option of its own."""
    own = getattr(spec.method, "use_gradient_checkpointing", "off")
    return spec.optimizations.gradient_checkpointing or own != "off"


def proof(model: Any, spec: Experiment) -> list[str]:
    asked, found, layers = asked_for(spec), share(model), len(decoder_layers(model))
    if spec.method.name == "unsloth":  # marks the model, not its layers
        found = float(any(_is_on(module) for module in model.modules()))
    wanted = -(-layers // 2) / layers if asked == "selective" else float(bool(asked))
    if found == wanted:
        return []
    return [f"optimizations.gradient_checkpointing is {asked} and {found:.0%} of the layers do it"]

"""Gradient checkpointing: the trainer turns it on in every layer that supports it (SFTConfig)."""

from __future__ import annotations

from typing import Any

from ftbench.spec.experiment import Experiment


def apply(model: Any, spec: Experiment) -> None:
    return None


def is_on(model: Any) -> bool:
    return any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules())


def asked_for(spec: Experiment) -> bool:
    """By the optimization, or by unsloth's option of its own."""
    own = getattr(spec.method, "use_gradient_checkpointing", "off")
    return spec.optimizations.gradient_checkpointing or own != "off"


def proof(model: Any, spec: Experiment) -> list[str]:
    asked = asked_for(spec)
    if is_on(model) == asked:
        return []
    return [
        f"optimizations.gradient_checkpointing is {'on' if asked else 'off'} and {type(model).__name__} says otherwise"
    ]

"""Gradient checkpointing: the trainer turns it on in every layer that supports it (SFTConfig)."""

from __future__ import annotations

from typing import Any

from ftbench.spec.experiment import Experiment


def apply(model: Any, spec: Experiment) -> None:
    return None


def is_on(model: Any) -> bool:
    return any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules())


def proof(model: Any, spec: Experiment) -> list[str]:
    asked = spec.optimizations.gradient_checkpointing
    if is_on(model) == asked:
        return []
    return [
        f"optimizations.gradient_checkpointing is {'on' if asked else 'off'} and {type(model).__name__} says otherwise"
    ]

"""The attention implementation: chosen when the model is loaded."""

from __future__ import annotations

from typing import Any

from ftbench.spec.experiment import Experiment


def apply(model: Any, spec: Experiment) -> None:
    return None


def proof(model: Any, spec: Experiment) -> list[str]:
    asked, used = spec.optimizations.attention, model.config.get_text_config()._attn_implementation
    if asked in ("auto", used):
        return []
    return [f"optimizations.attention is {asked} and {type(model).__name__} uses {used}"]

"""Activation offloading: trl keeps what the backward pass needs in pinned host memory (SFTConfig)."""

from __future__ import annotations

from typing import Any

from ftbench.spec.experiment import Experiment


def apply(model: Any, spec: Experiment) -> None:
    return None


def proof(model: Any, spec: Experiment) -> list[str]:
    """What the model alone cannot show is proven on the trainer: `trainer.proof`."""
    return []

"""Rows of whole samples: filled with the data (`data/order.py`), laid end to end by the collator."""

from __future__ import annotations

from typing import Any

from ftbench.spec.experiment import Experiment
from ftbench.worker.model.packed_samples import keep_apart


def apply(model: Any, spec: Experiment) -> None:
    if spec.optimizations.packing:
        keep_apart(model)


def proof(model: Any, spec: Experiment) -> list[str]:
    """The counts of the batches say it: `recorder` reads them, `trainer.proof` asks."""
    return []

"""Packed rows: filled with complete samples (`data/order.py`) and concatenated by the collator."""

from typing import Any

from ftbench.spec.experiment import Experiment
from ftbench.worker.model.packed_samples import isolate_packed_samples


def apply(model: Any, spec: Experiment) -> None:
    isolate_packed_samples(model, "packing")

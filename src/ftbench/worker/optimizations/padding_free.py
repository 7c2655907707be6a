"""Batches without padding: the collator lays samples end to end (`data/collate.py`), each seeing only itself."""

from __future__ import annotations

from typing import Any

from ftbench.spec.experiment import Experiment
from ftbench.worker.methods import unsloth
from ftbench.worker.model.packed_samples import isolate_packed_samples


def apply(model: Any, spec: Experiment) -> None:
    isolate_packed_samples(model, "padding_free")


def verify(model: Any, spec: Experiment) -> list[str]:
    """Return what unsloth needs to tell samples apart in its own way (`unsloth/utils/packing.py`)."""
    if not spec.optimizations.padding_free or spec.method.name != "unsloth" or unsloth.reads_boundaries():
        return []
    return ["optimizations.padding_free is on and unsloth's attention was not told where samples begin"]

"""Batches without padding: the collator concatenates samples (`data/collate.py`). Attention stays within a sample."""

from typing import Any

from ftbench.spec.experiment import Experiment
from ftbench.worker.model.packed_samples import isolate_packed_samples


def apply(model: Any, spec: Experiment) -> None:
    isolate_packed_samples(model, "padding_free")

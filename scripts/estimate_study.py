"""Which committed runs the memory estimate is fitted to, and what tells one from another in a table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ftbench.estimate.memory.measured import Measured
from ftbench.spec import identity
from ftbench.spec.experiment import Experiment, Measure, Train


def facts(run: Measured) -> dict[str, Any]:
    """Return what tells one run from another in a table."""
    on = run.spec.optimizations.model_dump(mode="json")
    named = [
        name if value is True else f"{name} {value}"
        for name, value in on.items()
        if value not in (False, "off", "auto")
    ]
    return {
        "model": run.spec.model.id,
        "method": run.spec.method.name,
        "batch": run.spec.train.batch_size,
        "length": run.batch.expected.length if run.batch else None,
        "optimizations": ", ".join(named),
    }


def held_out(run: Measured) -> bool:
    """Return whether a run is never fitted to. Runs with images are too few: all are held out."""
    return run.spec.dataset.has_images or is_held_out(run.spec, run.gpu)


def is_held_out(spec: Experiment, gpu: str | None) -> bool:
    """Return whether a spec belongs to the third of all experiments that is held out, by their hash, which nobody
    chooses; those with the same step are on one side."""
    keep = {"batch_size", "gradient_accumulation_steps", "optimizer", "precision"}
    alike = spec.model_copy(update={
        "train": Train.model_validate(spec.train.model_dump(include=keep)),
        "dataset": spec.dataset.model_copy(update={"samples": None, "eval_samples": 0, "seed": 42}),
        "measure": Measure(),
    })  # fmt: skip
    return int(identity.fingerprint(alike, gpu), 16) % 3 == 0


def once(runs: Iterable[Measured]) -> list[Measured]:
    """Return the first run of each experiment on each GPU: repeats of a run are no further rows."""
    return list({identity.fingerprint(run.spec, run.gpu): run for run in reversed(list(runs))}.values())[::-1]

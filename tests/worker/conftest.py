"""Training in this process: a spec in, a run directory out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="training libraries are not installed")

from ftbench.spec.experiment import Experiment, resolve
from ftbench.store import rundir
from ftbench.store.rundir import RunDir
from ftbench.worker.measure.phases import Phases
from ftbench.worker.train import train
from ftbench.worker.training_run import TrainingRun

TINY: dict[str, Any] = {
    "name": "tiny",
    "model": {"id": "tiny/qwen3", "weights": "random"},
    "dataset": {"name": "synthetic", "samples": 12, "mean_length": 20, "max_length": 64},
    "train": {"batch_size": 2, "learning_rate": 1e-3},
}


def spec_of(**changes: Any) -> Experiment:
    """The tiny spec with sections replaced key by key, resolved for a machine without a GPU."""
    values = json.loads(json.dumps(TINY))
    for section, keys in changes.items():
        values[section] = {**values.get(section, {}), **keys}
    return resolve(Experiment.model_validate(values), None)


def train_in(folder: Path, **changes: Any) -> RunDir:
    """Trains the tiny spec with changes in this process, below `folder`; its directory."""
    spec = spec_of(**changes)
    directory = rundir.claim(folder, "tests", spec.method.name)
    rundir.write_json(directory.spec_json, spec.model_dump(mode="json"))
    rundir.write_json(directory.state, rundir.running() | {"state": "ok"})
    phases = Phases(directory, "import")
    train(TrainingRun(spec, directory, phases))
    phases.close()
    return directory


@pytest.fixture
def train_here(tmp_path: Path, cache: Path) -> Callable[..., RunDir]:
    """Trains a spec in this process and returns its directory."""
    return lambda **changes: train_in(tmp_path, **changes)

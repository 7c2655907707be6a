"""Train specs in this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="training libraries are not installed")

import torch

from ftbench.spec.experiment import Experiment, resolve
from ftbench.store import machine, rundir
from ftbench.store.rundir import RunDir
from ftbench.worker.outcome import Phases
from ftbench.worker.train import train
from ftbench.worker.training_run import TrainingRun
from quick_libraries import quicken

quicken()

TINY: dict[str, Any] = {
    "name": "tiny",
    "model": {"id": "tiny/qwen3", "weights": "random"},
    "dataset": {"name": "synthetic", "samples": 12, "mean_length": 20, "max_length": 64},
    "train": {"batch_size": 2, "learning_rate": 1e-3},
}


def spec_of(**changes: Any) -> Experiment:
    """Return the tiny spec with changed sections, resolved for a machine without a GPU."""
    values = json.loads(json.dumps(TINY))
    for section, keys in changes.items():
        values[section] = {**values.get(section, {}), **keys}
    return resolve(Experiment.model_validate(values), None)


def train_in(folder: Path, **changes: Any) -> RunDir:
    """Train the tiny spec with changes, and return the run's directory below `folder`."""
    spec = spec_of(**changes)
    directory = rundir.create(folder, "tests", spec.method.name)
    rundir.write_json(directory.spec_json, spec.model_dump(mode="json"))
    rundir.write_json(directory.machine, {"gpus": machine.gpus()})
    rundir.write_json(directory.state, rundir.running() | {"state": "ok"})
    phases = Phases(directory, "import")
    train(TrainingRun(spec, directory, phases))
    phases.close()
    return directory


@pytest.fixture
def train_here(tmp_path: Path, cache: Path) -> Callable[..., RunDir]:
    """Train a spec in this process and return the run's directory."""
    return lambda **changes: train_in(tmp_path, **changes)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Compile with the eager backend, and return the compiler's counters."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compile_layer, compile_function = torch.nn.Module.compile, torch.compile
    monkeypatch.setattr(torch, "compile", lambda *one, **how: compile_function(*one, **how | {"backend": "eager"}))
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self, **how: compile_layer(self, **how | {"backend": "eager"})
    )
    yield torch._dynamo.utils.counters
    torch._dynamo.reset()

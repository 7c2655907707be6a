"""A results store as the time estimate asks it: runs by what they did, kept from one question to the next."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ftbench.core.hardware import Gpu
from ftbench.errors import SpecError
from ftbench.estimate.time.history import Known, StepKey, known_runs, step_key
from ftbench.estimate.time.neighbor_correction import Neighbour, neighbours
from ftbench.estimate.time.observations import Observation, observed
from ftbench.estimate.time.work import StepWork, step_work
from ftbench.estimate.workload.lengths import Batch, Lengths, lengths_of
from ftbench.estimate.workload.method import TrainableShape, trainable_shape
from ftbench.spec.datasets import Dataset
from ftbench.spec.experiment import Experiment


class Store:
    """The runs that a folder holds, and the probes below it (`path`)."""

    def __init__(self, path: Path | None = None, runs: Sequence[Known] = ()) -> None:
        self.path, self.runs = path, runs
        self._same: dict[Any, list[Known]] = {}
        self._on: dict[str, list[Known]] = {}
        for run in runs:
            self._on.setdefault(run.gpu, []).append(run)
            self._same.setdefault((run.gpu, *run.key), []).append(run)
        self._seen: dict[str, list[Observation]] = {}
        self._near: dict[Any, list[Neighbour]] = {}
        self._work: dict[Any, tuple[TrainableShape, StepWork]] = {}
        self._lengths: dict[Dataset, Lengths] = {}
        self._left_out: StepKey | None = None

    @classmethod
    def read(cls, path: Path) -> Store:
        """A folder that is not there is an empty store. Raises SpecError for a file."""
        if path.exists() and not path.is_dir():
            raise SpecError(f"--store {path}: is no folder of runs")
        return cls(path, known_runs([path]) if path.is_dir() else ())

    def without(self, key: StepKey) -> Store:
        """The same store as if no run had taken this step."""
        other = copy.copy(self)
        other._left_out = key
        return other

    def same(self, spec: Experiment, gpu: Gpu) -> list[Known]:
        """Runs that took the very step which `spec` (resolved) asks for, on such a GPU."""
        if gpu.name not in self._on:
            return []
        key = step_key(spec)
        return [] if key == self._left_out else self._same.get((gpu.name, *key), [])

    def on(self, gpu: Gpu) -> list[Known]:
        """Runs on such a GPU."""
        return self._on.get(gpu.name, [])

    def lengths(self, dataset: Dataset) -> Lengths:
        """The lengths of the samples, as the runs know them."""
        if dataset not in self._lengths:
            self._lengths[dataset] = lengths_of(dataset, ((run.spec.dataset, run.described) for run in self.runs))
        return self._lengths[dataset]

    def work(
        self, spec: Experiment, batches: Sequence[Batch], config: dict[str, Any] | None
    ) -> tuple[TrainableShape, StepWork]:
        """The model with its method on it, and what a step asks for: the same on every GPU."""
        key = (id(config), *step_key(spec))
        if key not in self._work:
            shape = trainable_shape(spec, config)
            self._work[key] = shape, step_work(spec, shape, batches)
        return self._work[key]

    def observations(self, gpu: Gpu) -> list[Observation]:
        """The runs on such a GPU with their work."""
        if gpu.name not in self._seen:
            found = (observed(run, gpu, self.path) for run in self.on(gpu))
            self._seen[gpu.name] = [each for each in found if each is not None]
        return self._seen[gpu.name]

    def neighbours(self, gpu: Gpu, coefficients: Mapping[str, float]) -> list[Neighbour]:
        """The same with what the model says of them."""
        key = (gpu.name, *coefficients.values())
        if key not in self._near:
            self._near[key] = neighbours(self.observations(gpu), coefficients)
        return [near for near in self._near[key] if near.run.key != self._left_out]

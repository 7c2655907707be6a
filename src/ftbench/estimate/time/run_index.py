"""A results store as the time estimate needs it: runs by what they did, kept from one question to the next."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from ftbench.core.hardware import Gpu
from ftbench.errors import SpecError
from ftbench.estimate.time.ceilings import limits_of
from ftbench.estimate.time.generation import step_work
from ftbench.estimate.time.history import StepKey, TimedRun, step_key, timed_runs
from ftbench.estimate.time.neighbor_correction import Neighbour, Observation, neighbours
from ftbench.estimate.time.speeds import ideal
from ftbench.estimate.time.work import StepWork
from ftbench.estimate.workload.batches import Batch
from ftbench.estimate.workload.images import lengths_with_images
from ftbench.estimate.workload.lengths import Lengths, lengths_of
from ftbench.estimate.workload.model import is_rough, shape_of
from ftbench.estimate.workload.trainable import TrainableShape, trainable_shape
from ftbench.spec.experiment import Experiment

SAME_WATTS = 0.02  # how far limits of power may differ that are taken for the same


def _with_images(spec: Experiment, config: dict[str, Any] | None) -> Lengths | None:
    """Return the lengths of samples with images; None where the model, as far as it is known, or the data have none."""
    with suppress(SpecError):
        if (vision := shape_of(spec.model, config).vision) is not None:
            return lengths_with_images(spec, vision)
    return None


class Store:
    """The runs that a folder (`path`) holds, without `contended` ones (how many, by GPU), and the probes below it."""

    def __init__(self, path: Path | None = None, runs: Sequence[TimedRun] = ()) -> None:
        self.path, self.runs = path, [run for run in runs if not run.contended]
        self.contended = Counter(run.gpu for run in runs if run.contended)
        self._seen: dict[Gpu, list[Observation]] = {}
        self._near: dict[Any, list[Neighbour]] = {}
        self._work: dict[Any, tuple[TrainableShape, StepWork]] = {}
        self._lengths: dict[Any, Lengths] = {}
        self._on: dict[Gpu, dict[StepKey, list[TimedRun]]] = {}
        self._left_out: StepKey | None = None

    @classmethod
    def read(cls, path: Path) -> Store:
        """Return the store in a folder, empty where there is none. Raise SpecError for a file."""
        if path.exists() and not path.is_dir():
            raise SpecError(f"--store {path}: is no folder of runs")
        return cls(path, timed_runs([path]) if path.is_dir() else ())

    def without(self, key: StepKey) -> Store:
        """Return the same store as if no run had taken this step."""
        other = copy.copy(self)
        other._left_out = key
        return other

    def same(self, spec: Experiment, gpu: Gpu) -> list[TimedRun]:
        """Return runs that took the very step which `spec` (resolved) asks for, on such a GPU."""
        if not (steps := self._steps(gpu)):
            return []
        key = step_key(spec)
        return [] if key == self._left_out else steps.get(key, [])

    def outdated(self, spec: Experiment, gpu: Gpu) -> int:
        """Return how many runs took the step of `spec` (resolved) on such a GPU in a way that today's code does not."""
        return sum(run.outdated and run.gpu == gpu.name and run.key == step_key(spec) for run in self.runs)

    def on(self, gpu: Gpu) -> list[TimedRun]:
        """Return the runs on such a GPU, held to as many watts."""
        return list(chain.from_iterable(self._steps(gpu).values()))

    def _steps(self, gpu: Gpu) -> dict[StepKey, list[TimedRun]]:
        if gpu not in self._on:
            self._on[gpu] = {}
            for run in self.runs:
                if (
                    not run.outdated
                    and run.gpu == gpu.name
                    and abs((run.limit_w or gpu.watts) / gpu.watts - 1) < SAME_WATTS
                ):
                    self._on[gpu].setdefault(run.key, []).append(run)
        return self._on[gpu]

    def lengths(self, spec: Experiment, config: dict[str, Any] | None = None) -> Lengths:
        """Return the lengths of a spec's samples, as the runs know them; with images by the rule of the model."""
        kind = spec.objective.name
        key = (spec.dataset, spec.model, spec.optimizations.image_size, kind, id(config))
        if key not in self._lengths:
            alike = (run for run in self.runs if run.spec.objective.name == kind)
            recorded = ((run.spec.dataset, run.described) for run in alike)
            lengths = _with_images(spec, config) or lengths_of(
                spec.dataset, recorded, spec.model, spec.objective.pairs, spec.objective.prompts
            )
            self._lengths[key] = lengths
        return self._lengths[key]

    def counted(self, spec: Experiment) -> Experiment:
        """Return the spec with how many samples its data set has, where it does not say so and a file does."""
        data = spec.dataset
        rows = self.lengths(spec).rows if data.samples is None else None
        if rows is None:
            return spec
        return spec.model_copy(
            update={"dataset": data.model_copy(update={"samples": max(1, rows - data.eval_samples)})}
        )

    def work(
        self, spec: Experiment, batches: Sequence[Batch], config: dict[str, Any] | None
    ) -> tuple[TrainableShape, StepWork]:
        """Return the model with its method on it, and what a step asks for: the same on every GPU."""
        key = (id(config), *step_key(spec))
        if key not in self._work:
            shape = trainable_shape(spec, config)
            self._work[key] = shape, step_work(spec, shape, batches)
        return self._work[key]

    def observations(self, gpu: Gpu) -> list[Observation]:
        """Return the runs on such a GPU with their work; not those of a model whose shape is not known, in a precision
        of which no rate is, or whose work is known roughly, as another framework's is."""
        if gpu not in self._seen:
            self._seen[gpu] = []
            # what GPUs waited for each other is no work of theirs
            alone = (run for run in self.on(gpu) if run.spec.launch.gpus == 1 and not is_rough(run.spec))
            for run in alone:
                with suppress(SpecError):
                    limits = limits_of(gpu, run.spec.train.precision, run.spec.optimizations.fp8 != "off", self.path)
                    work = step_work(run.spec, trainable_shape(run.spec), [run.batch])
                    self._seen[gpu].append(Observation(run, ideal(work, limits)))
        return self._seen[gpu]

    def neighbours(self, gpu: Gpu, coefficients: Mapping[str, float]) -> list[Neighbour]:
        """Return the observations with what the coefficients say of them."""
        key = (gpu, *coefficients.values())
        if key not in self._near:
            self._near[key] = neighbours(self.observations(gpu), coefficients)
        return [near for near in self._near[key] if near.run.key != self._left_out]

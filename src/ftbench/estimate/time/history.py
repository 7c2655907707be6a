"""Correct the time model with the step times that earlier runs measured."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from ftbench.core.hardware import Gpu
from ftbench.errors import SpecError
from ftbench.estimate.time.rates import Step, ideal, limits_of, shipped_coefficients, step
from ftbench.estimate.time.timed_runs import StepKey, TimedRun, settings_of, step_key, timed_runs
from ftbench.estimate.time.work import StepWork, step_work
from ftbench.estimate.workload.batches import Batch
from ftbench.estimate.workload.images import lengths_with_images
from ftbench.estimate.workload.lengths import Lengths, lengths_of
from ftbench.estimate.workload.model import is_rough, shape_of
from ftbench.estimate.workload.trainable import TrainableShape, trainable_shape
from ftbench.spec.experiment import Experiment

SAME_WATTS = 0.02  # relative difference of two power limits that count as the same
# Distance between two specs: half the log ratio of their step times, plus this much for each difference. A run has the
# weight exp(-distance), and the model itself, whose correction is 1, has the weight _MODELS_OWN.
_SWITCH, _METHOD, _MODEL, _SIDE = 1.0, 1.5, 0.7, 2.0
_MODELS_OWN, _FARTHEST = 0.3, 5.0


@dataclass(frozen=True, slots=True)
class Observation:
    """A run with its work in seconds at the GPU's ceilings.

    `miss` is the log of measured over modelled seconds. `share` is 1 divided by the number of runs of the same step."""

    run: TimedRun
    ideal: StepWork
    modelled: Step
    miss: float
    share: float


@dataclass(frozen=True, slots=True)
class Correction:
    """The ratio of measured to modelled step time in `runs` similar runs. `alike` of them have the same method and
    optimizations."""

    factor: float
    runs: int
    alike: int


class RunHistory:
    """The runs of a results folder at `path`, without invalid ones, which are only counted per GPU.

    The folder also holds probes. `coefficients` of the time model are the shipped ones unless given. Results are kept
    between calls, because `recommend` needs the same GPU and spec many times."""

    def __init__(
        self, path: Path | None = None, runs: Sequence[TimedRun] = (), coefficients: Mapping[str, float] | None = None
    ) -> None:
        self.path, self.runs = path, [run for run in runs if not run.invalid]
        self.invalid = Counter((run.gpu, run.invalid) for run in runs if run.invalid)
        self.coefficients = coefficients or shipped_coefficients()
        self._observations: dict[Gpu, list[Observation]] = {}
        self._work: dict[Any, tuple[TrainableShape, StepWork]] = {}
        self._lengths: dict[Any, Lengths] = {}
        self._on: dict[Gpu, dict[StepKey, list[TimedRun]]] = {}

    @classmethod
    def read(cls, path: Path) -> RunHistory:
        """Return the history of a folder, empty if it does not exist. Raise SpecError for a file."""
        if path.exists() and not path.is_dir():
            raise SpecError(f"--store {path}: not a folder; give the folder that holds the runs")
        return cls(path, timed_runs([path]) if path.is_dir() else ())

    def same_step(self, spec: Experiment, gpu: Gpu) -> list[TimedRun]:
        """Return the runs of exactly the step of `spec` (resolved) on such a GPU."""
        steps = self._steps(gpu)
        return steps.get(step_key(spec), []) if steps else []

    def on(self, gpu: Gpu) -> list[TimedRun]:
        """Return the runs on such a GPU with the same power limit."""
        return list(chain.from_iterable(self._steps(gpu).values()))

    def _steps(self, gpu: Gpu) -> dict[StepKey, list[TimedRun]]:
        if gpu not in self._on:
            self._on[gpu] = {}
            for run in self.runs:
                if run.gpu == gpu.name and abs((run.limit_w or gpu.watts) / gpu.watts - 1) < SAME_WATTS:
                    self._on[gpu].setdefault(run.key, []).append(run)
        return self._on[gpu]

    def lengths(self, spec: Experiment, config: dict[str, Any] | None = None) -> Lengths:
        """Return the lengths of a spec's samples, from runs on the same data if possible."""
        objective = spec.objective
        key = (spec.dataset, spec.model, spec.optimizations.image_size, objective.name, id(config))
        if key not in self._lengths:
            alike = (run for run in self.runs if run.spec.objective.name == objective.name)
            recorded = ((run.spec.dataset, run.described) for run in alike)
            self._lengths[key] = _lengths_with_images(spec, config) or lengths_of(
                spec.dataset, recorded, spec.model, objective.pairs
            )
        return self._lengths[key]

    def with_sample_count(self, spec: Experiment) -> Experiment:
        """Return the spec with the number of samples of its file, if the spec does not give it."""
        data = spec.dataset
        rows = self.lengths(spec).rows if data.samples is None else None
        if rows is None:
            return spec
        samples = max(1, rows - data.eval_samples)
        return spec.model_copy(update={"dataset": data.model_copy(update={"samples": samples})})

    def work(
        self, spec: Experiment, batches: Sequence[Batch], config: dict[str, Any] | None
    ) -> tuple[TrainableShape, StepWork]:
        """Return the model with its adapters and the work of a step, which is the same on every GPU."""
        key = (id(config), *step_key(spec))
        if key not in self._work:
            shape = trainable_shape(spec, config)
            self._work[key] = shape, step_work(spec, shape, batches)
        return self._work[key]

    def observations(self, gpu: Gpu) -> list[Observation]:
        """Return the single-GPU runs on such a GPU with their work, as far as models and rates are known."""
        if gpu not in self._observations:
            seen = self._observations[gpu] = []
            repeats = Counter(run.key for run in self.on(gpu))
            for run in self.on(gpu):
                if run.spec.launch.gpus > 1 or is_rough(run.spec):
                    continue
                with suppress(SpecError):
                    limits = limits_of(gpu, run.spec.train.precision, run.spec.optimizations.fp8 != "off", self.path)
                    work = ideal(step_work(run.spec, trainable_shape(run.spec), [run.batch]), limits)
                    modelled = step(work, self.coefficients)
                    miss = math.log(run.step_s / modelled.seconds)
                    seen.append(Observation(run, work, modelled, miss, 1 / repeats[run.key]))
        return self._observations[gpu]

    def correction(self, spec: Experiment, gpu: Gpu, modelled: Step) -> Correction | None:
        """Return the weighted mean error of the model in similar runs on the same GPU; None without such runs."""
        total, weights, near, alike = 0.0, _MODELS_OWN, 0, 0
        own, size = settings_of(spec), math.log(modelled.seconds)
        for each in self.observations(gpu):
            other = each.run
            same_side = each.modelled.host_bound == modelled.host_bound
            distance = abs(size - math.log(each.modelled.seconds)) / 2
            distance += _MODEL * (spec.model.id != other.spec.model.id) + _SIDE * (not same_side)
            distance += _SWITCH * len(own.switches ^ other.settings.switches)
            distance += _METHOD * (own.method != other.settings.method)
            if distance > _FARTHEST:
                continue
            weight = math.exp(-distance) * each.share
            total, weights, near = total + weight * each.miss, weights + weight, near + 1
            alike += same_side and own == other.settings
        return Correction(math.exp(total / weights), near, alike) if near else None


def _lengths_with_images(spec: Experiment, config: dict[str, Any] | None) -> Lengths | None:
    with suppress(SpecError):  # the shape of the model is not known
        if (vision := shape_of(spec.model, config).vision) is not None:
            return lengths_with_images(spec, vision)
    return None

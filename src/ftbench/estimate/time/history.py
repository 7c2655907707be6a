"""Read the step times of earlier runs. Estimates use the times of runs with the same step on the same GPU."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ftbench.core.hardware import Gpu, canonical_name, limited_gpu
from ftbench.core.stats import MINIMUM_STEADY, grouped_by
from ftbench.errors import SpecError
from ftbench.estimate.time.rates import shipped_coefficients
from ftbench.estimate.time.work import StepWork, step_work
from ftbench.estimate.workload.batches import Batch, concatenates, mean_batch
from ftbench.estimate.workload.lengths import Lengths, lengths_of
from ftbench.estimate.workload.model import TrainableShape, check_modelled, shape_of, trainable_shape
from ftbench.estimate.workload.sharding import sharding_of
from ftbench.spec.datasets import too_few_rows
from ftbench.spec.experiment import Experiment
from ftbench.store import machine, rundir
from ftbench.store.rundir import RunDir

# All settings that change the step time. Names, seeds, learning rates and the number of steps are not included.
StepKey = tuple[Any, ...]
SAME_WATTS = 0.02  # relative difference of two power limits that count as the same
AGREE = 0.05  # largest coefficient of variation of the step times, for runs with two to four steady steps
COMPILED = 1.25  # least `mean / median` of the step times of a run that compiled in steady steps
DEFAULT_STORE = Path("results")
# Phases before the first steady step that every run has. Other phases are rare: a machine creates random weights only
# once, and a run waits for its GPU only if other runs use this GPU.
_STARTING = ("import", "prepare_data", "load", "setup", "train_other", "first_step", "warmup", "start_and_exit")


@dataclass(frozen=True, slots=True)
class TimedRun:
    """A successful run with its step time. `gpu` is a name in the GPU table, and `limit_w` the power limit in watts.

    `step_s` is the mean time of a steady step in seconds. `tokens` is the mean number of real tokens per step.
    `start_s` is the time to import, load and compile in seconds. `watts` is the mean power of one GPU. `described` is
    the `dataset` section of summary.json. If the speed is not valid, `invalid` is the reason, for example
    `contended run`."""

    run_id: str
    spec: Experiment
    gpu: str
    step_s: float
    start_s: float | None
    watts: float | None
    described: dict[str, Any]
    batch: Batch
    key: StepKey
    tokens: float
    invalid: str = ""
    limit_w: float | None = None
    launch_bound: bool = False
    cpu: tuple[Any, Any] = (None, None)  # model and number of cores
    ended_at: str = ""


class RunHistory:
    """The runs in the results folder `path` with a valid speed. `invalid` counts the others by GPU, step and reason.

    The folder may also contain probes. By default, the `coefficients` of the time model come from
    facts/durations.yaml."""

    def __init__(
        self, path: Path | None = None, runs: Sequence[TimedRun] = (), coefficients: Mapping[str, float] | None = None
    ) -> None:
        self.path, self.runs = path, [run for run in runs if not run.invalid]
        self.invalid = Counter(((run.gpu, *run.key), run.invalid) for run in runs if run.invalid)
        self.coefficients = coefficients or shipped_coefficients()
        self._by_step = grouped_by(self.runs, lambda run: (run.gpu, *run.key))
        self._work: dict[Any, tuple[TrainableShape, StepWork]] = {}
        self._lengths: dict[Any, Lengths] = {}
        self.hosts: dict[str, tuple[float, int, str]] = {}  # see duration.host_slowdown

    @classmethod
    def read(cls, path: Path, spec: Experiment | None = None, gpus: Iterable[str] = ()) -> RunHistory:
        """Return the history of a folder. A missing folder gives an empty history.

        With `spec`, read only runs of the same model and launch-bound runs on `gpus`, and runs on the same data. In a
        clone, DEFAULT_STORE has runs of other machines. They do not give the speed of this machine's CPU."""
        names = frozenset(map(canonical_name, gpus))

        def wanted(summary: dict[str, Any]) -> bool:
            if spec is None:
                return True
            useful = summary["model"] == spec.model.id or _is_launch_bound(summary)
            if useful and canonical_name(summary["gpu"]) in names:
                return True
            return not spec.dataset.is_generated and bool(summary["dataset"]["name"] == spec.dataset.name)

        runs = timed_runs([path], wanted) if path.is_dir() else []
        if path.resolve() == DEFAULT_STORE.resolve() and any(run.launch_bound for run in runs):
            own = _model_and_cores(machine.cpu())
            runs = [replace(run, launch_bound=run.launch_bound and run.cpu == own) for run in runs]
        return cls(path, runs)

    def same_step(self, spec: Experiment, gpu: Gpu) -> list[TimedRun]:
        """Return the runs on this kind of GPU with exactly the same optimizer step. `spec` comes from `resolve`."""
        alike = self._by_step.get((gpu.name, *step_key(spec)), []) if self.runs else []
        return [run for run in alike if abs((run.limit_w or gpu.watts) / gpu.watts - 1) < SAME_WATTS]

    def lengths(self, spec: Experiment) -> Lengths:
        """Return the sample lengths of a spec. Runs on the same data are the preferred source."""
        key = (spec.dataset, spec.model, spec.optimizations.image_size, spec.objective.name)
        if key not in self._lengths:
            recorded = ((run.spec.dataset, run.described) for run in self.runs
                        if run.spec.objective.name == spec.objective.name)  # fmt: skip
            known = None
            with suppress(SpecError):  # the shape of the model is not known
                if (vision := shape_of(spec.model).vision) is not None:
                    from ftbench.estimate.workload.images import lengths_with_images

                    known = lengths_with_images(spec, vision)
            self._lengths[key] = known or lengths_of(spec.dataset, recorded, spec.model, spec.objective.pairs)
        return self._lengths[key]

    def with_sample_count(self, spec: Experiment) -> Experiment:
        """Return the spec with `dataset.samples`, by default `rows of the file - dataset.eval_samples`. Raise SpecError
        if the file has fewer rows."""
        data, known = spec.dataset, self.lengths(spec)
        if known.rows is None:
            return spec
        samples = data.samples or max(1, known.rows - data.eval_samples)
        if samples + data.eval_samples > known.rows and not known.patches:  # with images, `rows` is rounded
            raise SpecError(too_few_rows(data, known.rows))
        return spec.model_copy(update={"dataset": data.model_copy(update={"samples": samples})})

    def work(self, spec: Experiment, batches: Sequence[Batch]) -> tuple[TrainableShape, StepWork]:
        """Return the trainable shape of the model, and the work of a step. The kind of GPU does not matter."""
        key = step_key(spec)
        if key not in self._work:
            shape = trainable_shape(spec)
            self._work[key] = shape, step_work(spec, shape, batches)
        return self._work[key]


def step_key(spec: Experiment) -> StepKey:
    """Return the settings that determine the step time. Specs with equal keys take the same time on the same GPU."""
    model, data, train, launch = spec.model, spec.dataset, spec.train, spec.launch
    return (
        (model.id, model.path, model.dtype),
        (spec.method, spec.objective),
        (data.name, data.path, data.revision, data.subset, data.split, data.max_length),
        (data.length, data.mean_length, data.like, data.image_size, data.image_sizes, data.images_per_sample),
        (train.batch_size, train.gradient_accumulation_steps, train.optimizer, train.precision),
        spec.optimizations,
        (launch.framework, launch.settings, launch.gpus, launch.nodes, launch.strategy, launch.tp, launch.offload),
        (launch.pp, launch.micro_batches, launch.schedule, launch.split),
    )


def recorded_spec(run: RunDir) -> Experiment | None:
    """Return the spec of a run, or None if estimates must ignore the run.

    Estimates ignore imported logs, mock runs, runs on shared GPUs, specs of incompatible versions, and steps without a
    formula."""
    values = rundir.read_json(run.spec_json)
    if "imported" in values or values.get("measure", {}).get("share_gpu"):
        return None
    try:
        spec = Experiment.model_validate({key: values[key] for key in Experiment.model_fields if key in values})
        check_modelled(spec)
    except (SpecError, ValueError):
        return None
    if spec.launch.mock != "off":
        return None
    padded = concatenates(spec) and not (spec.optimizations.packing or spec.optimizations.padding_free)
    unsloths = rundir.read_json(run.applied).get("unsloth", {}) if padded else {}
    if padded and unsloths.get("batches") != "padding-free":  # older ftbench padded these batches
        spec = spec.model_copy(update={"method": spec.method.model_copy(update={"padded": True})})
    return spec


def timed_runs(
    paths: Iterable[Path], wanted: Callable[[dict[str, Any]], bool] = lambda summary: True
) -> list[TimedRun]:
    """Return the usable runs in `paths` that `wanted` selects by summary. Of runs of one GPU with equal ids, return
    the latest with a valid speed."""
    runs = (timed_run(run, wanted) for path in paths for run in rundir.find_runs(path))
    equal = grouped_by(filter(None, runs), lambda run: (run.gpu, run.run_id))
    return [max(same, key=lambda run: (not run.invalid, run.ended_at)) for same in equal.values()]


def timed_run(run: RunDir, wanted: Callable[[dict[str, Any]], bool]) -> TimedRun | None:
    """Return the run with its step time. Return None if `wanted` rejects its summary, or if the run is not usable.

    Failed runs, short runs, mock runs, and runs without a GPU are not usable."""
    summary = rundir.read_json(run.summary)  # the summary is read first, because it rejects most runs
    try:
        seconds = summary["step_time_s"].get("mean") or 0.0
        if summary["state"] != "ok" or not summary["gpu"] or not 0 < seconds < math.inf or not is_steady(summary):
            return None
        if not wanted(summary) or (spec := recorded_spec(run)) is None:
            return None
        phases, described = summary["phases_s"], rundir.read_json(run.machine)
        limited = limited_gpu(rundir.first_gpu(described))
        watts = summary["energy"].get("mean_watts")  # of all GPUs
        return TimedRun(
            f"{summary['name']}/{summary['run_id']}", spec, canonical_name(summary["gpu"]), seconds,
            _start(phases, summary["steps"]["warmup"] * seconds),
            watts and watts / spec.launch.gpus, summary["dataset"], _mean_batch(summary, spec, seconds),
            step_key(spec), summary["tokens_per_s"]["real"] * seconds,
            _invalid(summary), limited.watts if limited else None, _is_launch_bound(summary),
            _model_and_cores(described.get("cpu") or {}),
            str(rundir.read_json(run.state).get("ended_at") or ""),
        )  # fmt: skip
    except (AttributeError, KeyError, TypeError):  # not a summary of ftbench
        return None


def _start(phases: Mapping[str, float], warmup_s: float) -> float | None:
    """Return the seconds to import, load and compile: the time before the first steady step minus `warmup_s`, the
    seconds that the warm-up steps would take as steady steps. Return None if the run did not record its phases."""
    if not phases.get("total"):
        return None
    return max(0.0, sum(phases.get(name, 0.0) for name in _STARTING) - warmup_s)


def _model_and_cores(cpu: Mapping[str, Any]) -> tuple[Any, Any]:
    return cpu.get("model"), cpu.get("cores")


def _is_launch_bound(summary: dict[str, Any]) -> bool:
    """Return whether a run was launch-bound in all steps. Steps that compile raise the mean far above the median."""
    time, verdict = summary["step_time_s"], (summary.get("bound") or {}).get("verdict")
    return bool(verdict == "launch-bound" and time["mean"] < COMPILED * time["median"])


def _invalid(summary: dict[str, Any]) -> str:
    """Return why the speed of a run is not valid (`contended run` or `diverged run`), or an empty string."""
    if summary.get("contention", {}).get("contended"):
        return "contended run"
    return "diverged run" if summary.get("learning", {}).get("state") == rundir.NOT_FINITE else ""


def is_steady(summary: dict[str, Any]) -> bool:
    """Return whether a run has enough steady steps, or at least two steady steps with similar times."""
    steady = (summary.get("steps") or {}).get("steady") or 0
    spread = (summary.get("step_time_s") or {}).get("cv")
    return steady >= MINIMUM_STEADY or (steady > 1 and spread is not None and spread <= AGREE)


def _mean_batch(summary: dict[str, Any], spec: Experiment, seconds: float) -> Batch:
    """Return the mean micro-batch of one GPU, computed from the steady steps of a run."""
    rates = summary["tokens_per_s"]
    passes = spec.train.gradient_accumulation_steps * sharding_of(spec.launch).holders
    positions, real, labels = (rates[kind] * seconds / passes for kind in ("padded", "real", "label"))
    samples = summary["samples_per_s"] * seconds / passes
    return mean_batch(spec, samples, positions, real, labels, summary["dataset"]["tokens"]["weighted_mean"])

"""Read the step times that earlier runs measured."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ftbench.core.hardware import canonical_name, limited_gpu
from ftbench.core.stats import MINIMUM_STEADY
from ftbench.errors import SpecError
from ftbench.estimate.workload.batches import Batch, concatenates, mean_batch
from ftbench.estimate.workload.model import check_modelled
from ftbench.estimate.workload.sharding import sharding_of
from ftbench.spec.experiment import Experiment
from ftbench.spec.methods import Unsloth
from ftbench.spec.optimizations import Optimizations, switched_on
from ftbench.store import rundir
from ftbench.store.rundir import RunDir
from ftbench.store.steps import has_nan
from ftbench.store.summary import read_summary

# What changes how long a step takes; names, seeds, learning rates and the number of steps do not.
StepKey = tuple[Any, ...]
AGREE = 0.05  # coefficient of variation up to which two to four steady steps agree
MOST_RUNS = 500  # reading them takes at most a second
# Phases before the first steady step that another run has too. Random weights are made once per machine, and a run
# waits for a GPU only if others use it.
_STARTING = ("import", "prepare_data", "load", "setup", "train_other", "first_step", "warmup", "start_and_exit")


@dataclass(frozen=True, slots=True)
class Settings:
    """What similar runs share: the method, as far as it changes the computation, and the optimizations that are on."""

    method: tuple[str, bool, str]
    switches: frozenset[tuple[str, Any]]


@dataclass(frozen=True, slots=True)
class TimedRun:
    """A run that succeeded. `gpu` is the table's name and `limit_w` the power limit of its machine in watts.

    `step_s` is the mean steady step in seconds; `samples` and real `tokens` are per step. `start_s` are the seconds
    before the first steady step, `watts` the mean power of one GPU, `described` the `dataset` section of the summary.
    `invalid` is the reason why its speed is not valid, for example `contended run`."""

    run_id: str
    spec: Experiment
    gpu: str
    step_s: float
    samples: float
    start_s: float | None
    watts: float | None
    described: dict[str, Any]
    batch: Batch
    key: StepKey
    settings: Settings
    tokens: float
    invalid: str = ""
    limit_w: float | None = None


def settings_of(spec: Experiment) -> Settings:
    again = spec.method.use_gradient_checkpointing if isinstance(spec.method, Unsloth) else "off"
    what = spec.objective if spec.objective.pairs else spec.objective.name
    objective = {("objective", what)} if spec.objective.name != "sft" else set()
    return Settings((spec.method.name, spec.method.quantised, again), _switches(spec.optimizations) | objective)


@lru_cache(maxsize=1024)
def _switches(optimizations: Optimizations) -> frozenset[tuple[str, Any]]:
    return frozenset(switched_on(optimizations).items())


def step_key(spec: Experiment) -> StepKey:
    """Return a key that is equal for specs whose steps take the same time on the same GPU."""
    model, data, train, launch = spec.model, spec.dataset, spec.train, spec.launch
    return (
        (model.id, model.path, model.dtype),
        (spec.method, spec.objective),
        (data.name, data.path, data.revision, data.subset, data.split, data.max_length),
        (data.length, data.mean_length, data.like, data.image_size, data.image_sizes, data.images_per_sample),
        (train.batch_size, train.gradient_accumulation_steps, train.optimizer, train.precision),
        spec.optimizations,
        (launch.framework, launch.settings, launch.gpus, launch.strategy, launch.tp, launch.offload),
        (launch.pp, launch.micro_batches, launch.schedule, launch.split),
    )


def recorded_spec(run: RunDir) -> Experiment | None:
    """Return the spec of a run if estimates can learn from it, or None.

    They cannot learn from imported logs, mocks, shared GPUs, specs of another version, steps without a formula, and
    runs of older code that computed the logits of a chunked loss twice."""
    values = rundir.read_json(run.spec_json)
    if "imported" in values or values.get("measure", {}).get("share_gpu"):
        return None
    try:
        spec = Experiment.model_validate({key: values[key] for key in Experiment.model_fields if key in values})
        check_modelled(spec)
    except (SpecError, ValueError):
        return None
    packs = spec.optimizations.packing or spec.optimizations.padding_free
    if concatenates(spec) and not packs and _is_padded(run):  # by ftbench's collator until November 2026
        spec = spec.model_copy(update={"method": spec.method.model_copy(update={"padded": True})})
    return None if spec.launch.mock != "off" or (spec.optimizations.chunked_loss and logits_twice(run)) else spec


def _is_padded(run: RunDir) -> bool:
    try:
        return b'"batches": "padding-free"' not in rundir.read_bytes(run.applied)
    except (OSError, ValueError):
        return True


def logits_twice(run: RunDir) -> bool:
    """Return whether the code of a run computed the logits of its chunked loss a second time in the backward pass."""
    try:
        return b'"loss": "chunked (ftbench)"' in rundir.read_bytes(run.applied)  # parsing takes ten times as long
    except (OSError, ValueError):
        return False


def is_outdated(run: RunDir, spec: Experiment) -> bool:
    """Return whether a ZeRO-3 run fetched its weights without prefetching, as older code did with checkpointing."""
    if spec.launch.strategy != "zero3" or not spec.optimizations.gradient_checkpointing:
        return False
    return "fetched_ahead" not in (rundir.read_json(run.applied).get("parallel") or {})


def timed_runs(paths: Iterable[Path]) -> list[TimedRun]:
    """Return the timed runs among the newest MOST_RUNS at or below `paths`, each run ID once."""
    runs = [run for path in paths for run in rundir.find_runs(path)]
    if len(runs) > MOST_RUNS:
        runs = sorted(runs, key=lambda run: rundir.modified(run.state))[-MOST_RUNS:]
    by_id: dict[str, TimedRun] = {}
    for run in runs:
        if (timed := timed_run(run)) is not None:
            by_id.setdefault(timed.run_id, timed)
    return list(by_id.values())


def timed_run(run: RunDir) -> TimedRun | None:
    """Return the step time of a run, or None if it has no valid one: failed, too short, no GPU, a mock, older code."""
    summary = rundir.read_json(run.summary)  # read first, because it rejects most runs
    try:
        seconds = summary["step_time_s"].get("mean") or 0.0
        if summary["state"] != "ok" or not summary["gpu"] or not 0 < seconds < math.inf or not is_steady(summary):
            return None
        if (spec := recorded_spec(run)) is None or is_outdated(run, spec):
            return None
        phases, limited = summary["phases_s"], limited_gpu(rundir.first_gpu(rundir.read_json(run.machine)))
        watts = summary["energy"].get("mean_watts")  # of all GPUs
        return TimedRun(
            f"{summary['name']}/{summary['run_id']}", spec, canonical_name(summary["gpu"]), seconds,
            summary["samples_per_s"] * seconds,
            sum(phases.get(name, 0.0) for name in _STARTING) if phases.get("total") else None,
            watts and watts / spec.launch.gpus, summary["dataset"], _mean_batch(summary, spec, seconds),
            step_key(spec), settings_of(spec), summary["tokens_per_s"]["real"] * seconds,
            _invalid(run, summary), limited.watts if limited else None,
        )  # fmt: skip
    except (AttributeError, KeyError, TypeError):  # not a summary of ftbench
        return None


def _invalid(run: RunDir, summary: dict[str, Any]) -> str:
    """Return why the speed of a run is not valid: other processes used the machine, or its numbers diverged."""
    if summary.get("contention", {}).get("contended"):
        return "contended run"
    suspect = has_nan(run.steps) or summary.get("learning", {}).get("state") == rundir.NOT_FINITE
    return "diverged run" if suspect and read_summary(run)["state"] != "ok" else ""


def is_steady(summary: dict[str, Any]) -> bool:
    """Return whether a run has enough steady steps, or fewer that agree."""
    steady = (summary.get("steps") or {}).get("steady") or 0
    spread = (summary.get("step_time_s") or {}).get("cv")
    return steady >= MINIMUM_STEADY or (steady > 1 and spread is not None and spread <= AGREE)


def _mean_batch(summary: dict[str, Any], spec: Experiment, seconds: float) -> Batch:
    """Return the mean micro-batch of one GPU over the steady steps."""
    sharding, rates = sharding_of(spec.launch), summary["tokens_per_s"]
    passes = spec.train.gradient_accumulation_steps * sharding.data * sharding.sequence
    positions, real, labels = (rates[kind] * seconds / passes for kind in ("padded", "real", "label"))
    samples = summary["samples_per_s"] * seconds / passes
    return mean_batch(spec, samples, positions, real, labels, summary["dataset"]["tokens"]["weighted_mean"])

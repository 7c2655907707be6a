"""The runs of a results store that tell how long a step takes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ftbench.core.hardware import canonical_name, limited_gpu
from ftbench.core.stats import MINIMUM_STEADY
from ftbench.estimate.recorded import is_outdated, recorded
from ftbench.estimate.workload.batches import Batch, mean_batch
from ftbench.estimate.workload.division import division_of
from ftbench.spec.experiment import Experiment
from ftbench.spec.methods import Unsloth
from ftbench.spec.optimizations import Optimizations, switched_on
from ftbench.store import rundir
from ftbench.store.rundir import RunDir

# What changes how long a step takes; names, seeds, learning rates, and how long is trained do not.
StepKey = tuple[Any, ...]
AGREE = 0.05  # coefficient of variation of two to four steady steps that agree
MOST_RUNS = 500  # reading them takes a second at the most


@dataclass(frozen=True, slots=True)
class TimedRun:
    """A run that ended well. `gpu` is the table's name and `limit_w` the watts that its machine held it to; `step_s`
    the mean of the steady steps, and `samples` and real `tokens` how many a step had; `start_s` the seconds before the
    first steady step, `watts` the mean power, `described` the data set. Beside a `contended` run others used the
    machine: its speed is no measurement; an `outdated` one tells of a way that today's code does not go."""

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
    contended: bool = False
    limit_w: float | None = None
    outdated: bool = False


@dataclass(frozen=True, slots=True)
class Settings:
    """What runs of one kind share: the method as far as it changes what is computed, and the optimizations on."""

    method: tuple[str, bool, str]
    switches: frozenset[tuple[str, Any]]


def settings_of(spec: Experiment) -> Settings:
    again = spec.method.use_gradient_checkpointing if isinstance(spec.method, Unsloth) else "off"
    what = spec.objective if spec.objective.pairs else spec.objective.name
    objective = {("objective", what)} if spec.objective.name != "sft" else set()
    return Settings((spec.method.name, spec.method.quantised, again), _switches(spec.optimizations) | objective)


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
        (launch.framework, launch.settings, launch.gpus, launch.nodes, launch.strategy, launch.tp, launch.offload),
    )


@lru_cache(maxsize=1024)
def _switches(optimizations: Optimizations) -> frozenset[tuple[str, Any]]:
    return frozenset(switched_on(optimizations).items())


# The phases before the first steady step that another run goes through too: weights are made once on a machine, and for
# the GPU one waits where others have it.
_STARTING = ("import", "prepare_data", "load", "setup", "train_other", "first_step", "warmup", "start_and_exit")


def timed_runs(paths: Iterable[Path]) -> list[TimedRun]:
    """Return, of the newest MOST_RUNS runs at or below `paths`, those on a GPU that say how long their steps take; a
    run that lies there twice counts once."""
    runs = [run for path in paths for run in rundir.find_runs(path)]
    if len(runs) > MOST_RUNS:
        runs = sorted(runs, key=lambda run: rundir.modified(run.state))[-MOST_RUNS:]
    by_id: dict[str, TimedRun] = {}
    for run in runs:
        if (timed := timed_run(run)) is not None:
            by_id.setdefault(timed.run_id, timed)
    return list(by_id.values())


def timed_run(run: RunDir) -> TimedRun | None:
    """Return what a run says of its step; None where it says nothing: it failed, was too short, had no GPU, was a mock,
    or its files are not what they should be."""
    summary = rundir.read_json(run.summary)  # first: of many it says enough
    try:
        step = summary["step_time_s"].get("mean") or 0.0
        if summary["state"] != "ok" or not summary["gpu"] or not 0 < step < math.inf or not says_step_time(summary):
            return None
        if (spec := recorded(run)) is None:
            return None
        phases, limited = summary["phases_s"], limited_gpu(rundir.first_gpu(rundir.read_json(run.machine)))
        watts = summary["energy"].get("mean_watts")  # of all GPUs
        return TimedRun(
            f"{summary['name']}/{summary['run_id']}", spec, canonical_name(summary["gpu"]), step,
            summary["samples_per_s"] * step,
            sum(phases.get(name, 0.0) for name in _STARTING) if phases.get("total") else None,
            watts and watts / spec.launch.gpus, summary["dataset"], _batch(summary, spec, step),
            step_key(spec), settings_of(spec), summary["tokens_per_s"]["real"] * step,
            bool(summary.get("contention", {}).get("contended")), limited.watts if limited else None,
            is_outdated(run, spec),
        )  # fmt: skip
    except (AttributeError, KeyError, TypeError):  # a file of somebody else
        return None


def says_step_time(summary: dict[str, Any]) -> bool:
    """Return whether a run says how long its steps take: by enough of them, or by fewer that agree."""
    steady = (summary.get("steps") or {}).get("steady") or 0
    spread = (summary.get("step_time_s") or {}).get("cv")
    return steady >= MINIMUM_STEADY or (steady > 1 and spread is not None and spread <= AGREE)


def _batch(summary: dict[str, Any], spec: Experiment, step: float) -> Batch:
    """Return the mean micro-batch of the steady steps, that of one GPU."""
    division = division_of(spec.launch)
    passes, rates = spec.train.gradient_accumulation_steps * division.data * division.sequence, summary["tokens_per_s"]
    positions, real, labels = (rates[kind] * step / passes for kind in ("padded", "real", "label"))
    samples = summary["samples_per_s"] * step / passes
    return mean_batch(spec, samples, positions, real, labels, summary["dataset"]["tokens"]["weighted_mean"])

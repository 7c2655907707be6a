"""The way nearest to a spec that fits a GPU: the fewest changes, with the samples a step that it asks for."""

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftbench.core.hardware import Gpu, capability_of
from ftbench.estimate.memory.estimate import MemoryEstimate
from ftbench.estimate.memory.memory_cache import MemoryCache
from ftbench.estimate.recommend.candidates import Way, batches, completions, launches, own_kind, ways, with_batch
from ftbench.estimate.workload.sharding import on_gpus, sharding_of
from ftbench.spec.experiment import Experiment, Launch
from ftbench.spec.incompatibilities import machine_incompatibilities

# Distances, where a changed key is 1: of another method, which trains from other weights, of half the batch, and of
# another way for the GPUs to share the work.
_METHOD, _HALVING, _STRATEGY = 2.5, 0.5, 0.5
_MOST_GPUS = 64


@dataclass(frozen=True, slots=True)
class Fit:
    """A spec that fits with the `--set` values that make it of the one asked about, and what it takes."""

    spec: Experiment
    sets: tuple[str, ...]
    memory: MemoryEstimate

    def command(self, path: Path, before: Sequence[str], written: Experiment) -> str:
        """Return the command to type; `before` are the `--set` values that were there before, with which the file at
        `path` says what is `written`."""
        sets = (*before, *_sets(written, self.spec))
        return shlex.join(["ftbench", "run", str(path), *(f"--set={value}" for value in sets)])


def nearest_fit(spec: Experiment, gpu: Gpu | float, config: dict[str, Any] | None = None) -> Fit | None:
    """Return what fits with the fewest changes, if need be on twice as many GPUs, and so on; None for nothing."""
    memory_cache, count = MemoryCache(config=config), spec.launch.gpus
    possible = [way for way in ways(on_gpus(spec, 1, "none"), own_kind(spec), True) if not way.problems]
    while True:
        shared = (alone.on(launch) for launch in launches(spec, count, config) for alone in possible)
        fits = filter(None, (_fit(way, spec, gpu, memory_cache) for way in shared if not way.problems))
        nearest = min(fits, key=lambda fit: _distance(spec, fit), default=None)
        if nearest or count == 1 or count >= _MOST_GPUS:
            return nearest
        count *= 2


def _fit(way: Way, spec: Experiment, gpu: Gpu | float, memory_cache: MemoryCache) -> Fit | None:
    capability = capability_of(gpu)
    if machine_incompatibilities(way.spec, capability):
        return None
    if (samples := shared_samples(spec, way.spec.launch)) is None:
        return None
    most = min(spec.train.batch_size, samples)
    if way.spec.objective.prompts:
        sizes = completions(way, gpu, samples, most, memory_cache)
    else:
        smallest = way.sized(1, 2 if samples > 1 else 1, capability)
        sizes = batches(memory_cache.largest_batch(smallest, gpu, most=most) or 0, samples)
    if not sizes:
        return None
    size, _ = sizes[0]
    sized = way.sized(size, samples // size, capability)
    memory = memory_cache.estimate(sized, gpu)
    if memory.verdict != "fits":
        return None
    chosen = with_batch(way.spec, size, samples // size)
    return Fit(chosen, tuple(_sets(spec, chosen)), memory)


def shared_samples(spec: Experiment, launch: Launch) -> int | None:
    """Return how many samples of a step each share of the batch has under a launch; None where they do not divide."""
    samples = spec.train.batch_size * spec.train.gradient_accumulation_steps * sharding_of(spec.launch).data
    shares = sharding_of(launch).data
    return samples // shares if samples % shares == 0 else None


def _distance(spec: Experiment, fit: Fit) -> float:
    changed = [
        value for value in fit.sets if not value.startswith(("method", "train.gradient_acc", "launch.", "measure."))
    ]
    other = fit.spec.method.name != spec.method.name
    halvings = math.log2(spec.train.batch_size / fit.spec.train.batch_size)
    keys = len(changed) + (_METHOD if other else fit.spec.method != spec.method)
    launch, own = fit.spec.launch, spec.launch
    return (
        keys + _HALVING * halvings + _STRATEGY * ((launch.strategy != own.strategy) + (launch.offload != own.offload))
    )


def _sets(spec: Experiment, fit: Experiment) -> list[str]:
    """Return the keys in which a spec differs from the one asked about, as `--set` takes them."""
    sets = []
    if fit.method != spec.method:
        options = fit.method.model_dump(mode="json", exclude_defaults=True)
        options.pop("name", None)
        name = fit.method.name
        sets.append(f"method={json.dumps({'name': name, **options})}" if options else f"method={name}")
    for section in ("train", "optimizations", "launch", "measure"):
        old, new = (getattr(each, section).model_dump(mode="json") for each in (spec, fit))
        changed = {key: value for key, value in new.items() if value != old[key]}
        if section == "launch" and changed and spec.launch.tp:
            changed |= _of_mesh(fit.launch)
        sets += [f"{section}.{key}={'off' if value is None else json.dumps(value)}" for key, value in changed.items()]
    return sets


def _of_mesh(launch: Launch) -> dict[str, int]:
    """Return what is to be said of a launch that takes the place of a mesh, which may be written as two numbers."""
    numbers = {"tp": launch.tp, "fsdp": launch.gpus // launch.tp} if launch.tp else {}
    return {"gpus": launch.gpus, **numbers}

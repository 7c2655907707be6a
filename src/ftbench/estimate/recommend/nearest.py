"""The way nearest to a spec that fits a GPU: the fewest changes, with the samples a step that it asks for."""

from __future__ import annotations

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
from ftbench.estimate.recommend.candidates import Way, launches, own_kind, ways
from ftbench.estimate.workload.division import on_gpus
from ftbench.spec.experiment import Experiment
from ftbench.spec.refusals import refusals_on

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

    def command(self, path: Path, gpu: Sequence[str], before: Sequence[str] = ()) -> str:
        """Return the command to type: what trains it, or of several GPUs, which the options `gpu` name, what estimates
        it; `before` are the `--set` values that were there before."""
        launch = self.spec.launch
        shared = [*gpu, f"--gpus={launch.gpus}", f"--strategy={launch.strategy}"]
        words = ["ftbench", "run", str(path)] if launch.gpus == 1 else ["ftbench", "estimate", str(path), *shared]
        return shlex.join([*words, *(f"--set={value}" for value in (*before, *self.sets))])


def nearest_fit(spec: Experiment, gpu: Gpu | float, config: dict[str, Any] | None = None) -> Fit | None:
    """Return what fits with the fewest changes; where nothing does on several GPUs, on twice as many, and so on; None
    where nothing does."""
    memory_cache, count = MemoryCache(config=config), spec.launch.gpus
    possible = [way for way in ways(on_gpus(spec, 1, "none"), own_kind(spec), True) if not way.problems]
    while True:
        shared = (way for launch in launches(spec, count, config) for alone in possible if (way := alone.on(launch)))
        fits = filter(None, (_fit(way, spec, gpu, memory_cache) for way in shared))
        nearest = min(fits, key=lambda fit: _distance(spec, fit), default=None)
        if nearest or count == 1 or count >= _MOST_GPUS:
            return nearest
        count *= 2


def _fit(way: Way, spec: Experiment, gpu: Gpu | float, memory_cache: MemoryCache) -> Fit | None:
    capability = capability_of(gpu)
    if refusals_on(way.spec, capability):
        return None
    batch, passes = spec.train.batch_size, spec.train.gradient_accumulation_steps
    largest = memory_cache.largest_batch(way.sized(1, 2 if batch * passes > 1 else 1, capability), gpu)
    if largest is None:
        return None
    size = next(size for size in range(min(largest, batch), 0, -1) if batch * passes % size == 0)
    sized = way.sized(size, batch * passes // size, capability)
    memory = memory_cache.estimate(sized, gpu)
    if memory.verdict != "fits":
        return None
    train = way.spec.train.model_copy(
        update={"batch_size": size, "gradient_accumulation_steps": batch * passes // size}
    )
    chosen = way.spec.model_copy(update={"train": train})
    return Fit(chosen, tuple(_sets(spec, chosen)), memory)


def _distance(spec: Experiment, fit: Fit) -> float:
    changed = [value for value in fit.sets if not value.startswith(("method", "train.gradient_acc"))]
    other = fit.spec.method.name != spec.method.name
    halvings = math.log2(spec.train.batch_size / fit.spec.train.batch_size)
    keys = len(changed) + (_METHOD if other else fit.spec.method != spec.method)
    return keys + _HALVING * halvings + _STRATEGY * (fit.spec.launch.strategy != spec.launch.strategy)


def _sets(spec: Experiment, fit: Experiment) -> list[str]:
    """Return the keys in which a spec differs from the one asked about, as `--set` takes them."""
    sets = []
    if fit.method != spec.method:
        options = fit.method.model_dump(mode="json", exclude_defaults=True)
        options.pop("name", None)
        name = fit.method.name
        sets.append(f"method={json.dumps({'name': name, **options})}" if options else f"method={name}")
    for section in ("train", "optimizations"):
        old, new = (getattr(each, section).model_dump(mode="json") for each in (spec, fit))
        sets += [f"{section}.{key}={json.dumps(value)}" for key, value in new.items() if value != old[key]]
    return sets

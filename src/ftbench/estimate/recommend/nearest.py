"""Find the most similar spec that fits a GPU: the fewest changes, with the same samples per step."""

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftbench.core.hardware import Gpu, capability_of
from ftbench.core.table import terminal_width
from ftbench.estimate.memory.estimate import MemoryEstimate
from ftbench.estimate.memory.largest_batch import MemoryCache
from ftbench.estimate.recommend.candidates import Way, launches, same_kind, ways, with_batch
from ftbench.estimate.workload.sharding import on_gpus, sharding_of
from ftbench.spec.experiment import Experiment, Launch
from ftbench.spec.incompatibilities import machine_incompatibilities
from ftbench.spec.model_argument import options_of
from ftbench.spec.reading import as_text

# Distances between specs. A changed key counts 1; these are another method (with other weights), half the batch, and
# another strategy of the GPUs.
_METHOD, _HALVING, _STRATEGY = 2.5, 0.5, 0.5
_MOST_GPUS = 64
_WIDTH = 120  # of the lines of a command


@dataclass(frozen=True, slots=True)
class Fit:
    """A spec that fits, the `--set` values that lead to it, and its memory."""

    spec: Experiment
    sets: tuple[str, ...]
    memory: MemoryEstimate

    def command(self, path: Path, before: Sequence[str], written: Experiment) -> str:
        """Return the command that runs this spec. `path` with the user's `--set` values (`before`) gives the spec
        `written`."""
        return run_command(path, (*before, *changed_keys(written, self.spec)))


def run_command(path: Path, sets: Sequence[str]) -> str:
    """Return `ftbench run PATH --set=KEY=VALUE ...`."""
    return shlex.join(["ftbench", "run", str(path), *options_of(sets)])


def on_lines(command: str) -> str:
    """Return an indented command for a terminal, continued on further lines if it is long."""
    lines, width = [""], (terminal_width() or _WIDTH) - 8
    for word in shlex.split(command):
        follows = lines[-1].endswith(("--recipe", "--dataset", "--length"))  # the value of this option
        if lines[-1] and not follows and len(lines[-1]) + len(word) > width:
            lines.append(" ")
        lines[-1] += f" {shlex.quote(word)}" if lines[-1] else word
    return "  " + " \\\n  ".join(lines)


def nearest_fit(spec: Experiment, gpu: Gpu | float, config: dict[str, Any] | None = None) -> Fit | None:
    """Return the spec with the fewest changes that fits, if necessary on 2, 4, ... times as many GPUs."""
    memory_cache, count = MemoryCache(config=config), spec.launch.gpus
    possible = [way for way in ways(on_gpus(spec, 1, "none"), same_kind(spec), True) if not way.problems]
    while True:
        shared = (single.on(launch) for launch in launches(spec, count, config) for single in possible)
        fits = filter(None, (_fit(way, spec, gpu, memory_cache) for way in shared if not way.problems))
        nearest = min(fits, key=lambda fit: _distance(spec, fit), default=None)
        if nearest or count == 1 or count >= _MOST_GPUS:
            return nearest
        count *= 2


def _fit(way: Way, spec: Experiment, gpu: Gpu | float, memory_cache: MemoryCache) -> Fit | None:
    """Return the way with its largest batch that fits, or None."""
    capability = capability_of(gpu)
    if machine_incompatibilities(way.spec, capability):
        return None
    train, shares = spec.train, sharding_of(way.spec.launch).data
    total = train.batch_size * train.gradient_accumulation_steps * sharding_of(spec.launch).data
    if total % shares:
        return None
    samples = total // shares
    sizes = way.largest_batches(gpu, samples, min(train.batch_size, samples), memory_cache)
    if not sizes:
        return None
    memory = memory_cache.estimate(way.sized(*sizes[0], capability), gpu)
    if memory.verdict != "fits":
        return None
    chosen = with_batch(way.spec, *sizes[0])
    return Fit(chosen, tuple(changed_keys(spec, chosen)), memory)


def _distance(spec: Experiment, fit: Fit) -> float:
    changed = [
        value for value in fit.sets if not value.startswith(("method", "train.gradient_acc", "launch.", "measure."))
    ]
    other = fit.spec.method.name != spec.method.name
    halvings = math.log2(spec.train.batch_size / fit.spec.train.batch_size)
    keys = len(changed) + (_METHOD if other else fit.spec.method != spec.method)
    launch, own = fit.spec.launch, spec.launch
    moved = (launch.strategy != own.strategy) + (launch.offload != own.offload)
    return keys + _HALVING * halvings + _STRATEGY * moved


def changed_keys(spec: Experiment, other: Experiment) -> list[str]:
    """Return the `--set` values that turn one spec into another, as far as a recommendation changes it."""
    sets = []
    if other.method != spec.method:
        options = other.method.model_dump(mode="json", exclude_defaults=True)
        options.pop("name", None)
        name = other.method.name
        sets.append(f"method={json.dumps({'name': name, **options})}" if options else f"method={name}")
    for section in ("train", "optimizations", "launch", "measure"):
        old, new = (getattr(each, section).model_dump(mode="json") for each in (spec, other))
        changed = {key: value for key, value in new.items() if value != old[key]}
        if section == "launch" and changed and spec.launch.tp and not other.launch.pp:
            changed |= _mesh(other.launch)
        sets += [f"{section}.{key}={'off' if value is None else as_text(value)}" for key, value in changed.items()]
    return sets


def _mesh(launch: Launch) -> dict[str, int]:
    """Return the keys that replace those of a mesh, which may be written as two numbers."""
    numbers = {"tp": launch.tp, "fsdp": launch.gpus // launch.tp} if launch.tp else {}
    return {"gpus": launch.gpus, **numbers}

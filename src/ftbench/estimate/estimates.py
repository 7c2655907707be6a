"""Compute the answer of `ftbench estimate`: the memory and time of a spec on one or several GPUs."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ftbench.core.hardware import Gpu
from ftbench.core.table import folded_command
from ftbench.core.units import NIGHT_H, gibibytes, listed, some
from ftbench.errors import SpecError
from ftbench.estimate import text
from ftbench.estimate.gpus import ALL, gpus_named, machine_gpu, probed
from ftbench.estimate.memory.estimate import VERDICTS
from ftbench.estimate.memory.largest_batch import MemoryCache
from ftbench.estimate.text import GpuEstimate, Scope, totals
from ftbench.estimate.time.duration import estimate_duration
from ftbench.estimate.time.history import RunHistory
from ftbench.estimate.time.rates import NO_FP8, has_fp8
from ftbench.spec.experiment import Experiment
from ftbench.spec.load import load
from ftbench.spec.prices import load_prices
from ftbench.store import machine

_MOST_COMPARED, _USUAL_NODE = 64, 8  # GPUs of `--strategy all`


@dataclass(frozen=True, slots=True)
class EstimateRequest:
    """The options of `ftbench estimate`. `gpus` and `strategy` override the `launch` section of the spec."""

    spec: Path
    sets: Sequence[str] = ()
    gpu: str | None = None
    gpus: int | None = None
    strategy: str | None = None
    samples: int | None = None
    hours: float | None = None
    prices: Path | None = None
    store: Path = Path("results")


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer as text and as JSON. `code` is the exit code of `--check`: 0 fits, 1 uncertain, 2 does not fit."""

    text: str
    document: str
    code: int


class Target(NamedTuple):
    """A GPU to estimate for: a row of the GPU table, or its memory in GiB. `total`: GiB that the driver reports."""

    name: str
    gpu: Gpu | float
    total: float | None = None


def estimate(request: EstimateRequest) -> Answer:
    """Return the answer to a request. Raise SpecError for a wrong option, an unknown model or an unknown GPU."""
    every, launch = request.strategy == ALL, {"gpus": request.gpus, "strategy": request.strategy}
    given = [f"launch.{key}={value}" for key, value in launch.items() if value is not None]
    sets = [*request.sets, *([] if every else given)]
    spec, targets = load(request.spec, sets), _targets(request)
    history = RunHistory.read(request.store, spec, [target.name for target in targets])
    spec = history.with_sample_count(spec)
    if every:
        return _compare_strategies(spec, targets, request, history)
    targets, without = _with_fp8(spec, targets, request.store)
    prices = None if request.prices is None else load_prices(request.prices)
    scope = Scope(request.samples, NIGHT_H if request.hours is None else request.hours, prices)
    memory_cache = MemoryCache(targets[0].total)
    rows = [_estimated(spec, target, history, memory_cache) for target in targets]
    best = min(VERDICTS.index(row.memory.verdict) for row in rows)
    document, nearest = as_document(spec, rows, scope), ""
    if best:
        closest = min(range(len(rows)), key=lambda at: rows[at].memory.device.high - rows[at].memory.usable)
        nearest, document["gpus"][closest]["nearest"] = _alternative(spec, targets[closest], request, sets, history)
    note = f"\nwithout {listed(without, 2)}: no fp8 matrix products" if without else ""
    return Answer(text.as_text(spec, rows, scope, nearest) + note, json.dumps(document | {"without": without}), best)


def _with_fp8(spec: Experiment, targets: list[Target], store: Path) -> tuple[list[Target], list[str]]:
    """Return the GPUs with 8-bit products (if needed), and the names of others. Raise SpecError if no GPU is left."""
    if spec.optimizations.fp8 == "off":
        return targets, []
    able = [target for target in targets if not isinstance(target.gpu, Gpu) or has_fp8(target.gpu, store)]
    lacking = [target.name for target in targets if target not in able]
    if not able:
        raise SpecError(NO_FP8.format(listed(lacking, 2)))
    return able, lacking


def _estimated(spec: Experiment, target: Target, history: RunHistory, memory_cache: MemoryCache) -> GpuEstimate:
    """Return the estimate for one GPU. If the time is unknown, the field `reason` explains why."""
    memory = memory_cache.estimate(spec, target.gpu)
    most = memory_cache.largest_batch(spec, target.gpu)
    row = GpuEstimate(target.name, memory, most)
    if not isinstance(target.gpu, Gpu):
        return replace(row, reason="not known for this GPU: use --gpu with a similar GPU of `ftbench list gpus`")
    try:
        return replace(row, time=estimate_duration(spec, target.gpu, history))
    except SpecError as error:
        reason = str(error)
        fits = memory.verdict != VERDICTS[-1]
        return replace(row, reason=reason if fits else f"{reason.partition(': ')[0]}, and the spec does not fit")


def _compare_strategies(
    spec: Experiment, targets: list[Target], request: EstimateRequest, history: RunHistory
) -> Answer:
    """Return the answer to `--strategy all`: a table of all strategies on different numbers of GPUs."""
    from ftbench.estimate import strategies_table

    given = {"--samples": request.samples, "--hours": request.hours, "--prices": request.prices}
    if unused := [name for name, value in given.items() if value is not None]:
        raise SpecError(
            f"--strategy {ALL} only compares memory and speed: remove {' and '.join(unused)} or name a strategy"
        )
    target, *others = targets
    if others:
        raise SpecError(f"--strategy {ALL} compares strategies on one kind of GPU: name one, such as {target.name}")
    _with_fp8(spec, targets, request.store)
    most = request.gpus or (spec.launch.gpus if spec.launch.gpus > 1 else _USUAL_NODE)
    if not 2 <= most <= _MOST_COMPARED:
        raise SpecError(f"--gpus {most}: --strategy {ALL} compares 2 to {_MOST_COMPARED} GPUs")
    rows = strategies_table.rows(spec, target.gpu, most, history, target.total)
    best = min(VERDICTS.index(row.memory.verdict) for row in rows if row.memory and not row.problems)
    return Answer(
        strategies_table.as_text(spec, target.name, rows), strategies_table.as_document(spec, target.name, rows), best
    )


def _alternative(
    spec: Experiment, target: Target, request: EstimateRequest, sets: Sequence[str], history: RunHistory
) -> tuple[str, dict[str, Any] | None]:
    """Return the fastest settings that fit with the same samples per step, as text and as a JSON record."""
    from ftbench.estimate.recommend import ranking, spec_file  # imported late: most specs fit

    if not isinstance(target.gpu, Gpu):
        return "Name a GPU with --gpu to get settings that fit.", None
    best = ranking.alternative(spec, target.gpu, history)
    if best is None:
        return "`ftbench recommend` did not find a batch, optimization or method that certainly fits.", None
    memory, command = best.memory, spec_file.run_command(request.spec, sets, best.spec, best.gpu)
    where = "" if request.gpu is None or len(gpus_named(request.gpu)) == 1 else f" on {target.name}"
    step = some(round(ranking.samples_per_step(best.spec, history)), "sample")
    needed = f"{gibibytes(memory.device.expected)} of {gibibytes(memory.total)} GiB{where}, with {step} per step"
    record = {"command": command, "device_gb": asdict(memory.device)}
    note = f"\n{text.AMD}" if best.gpu.compute_capability is None else ""
    return f"The fastest settings that fit take {needed}:\n{folded_command(command)}{note}", record


def _targets(request: EstimateRequest) -> list[Target]:
    """Return the GPUs that `--gpu` names, or this machine's GPU. The memory of a GPU comes from probes in the results
    folder, from the driver, or from the GPU table."""
    if request.gpu is not None:
        return [Target(gpu.name, probed(gpu, request.store)) for gpu in gpus_named(request.gpu)]
    described = machine.gpu()
    if described is None or not described.get("memory_gb"):
        raise SpecError("this machine has no GPU: name one with --gpu (`ftbench list gpus`)")
    return [Target(described["name"], machine_gpu(described, request.store), described["memory_gb"])]


def as_document(spec: Experiment, rows: Sequence[GpuEstimate], scope: Scope) -> dict[str, Any]:
    """Return the JSON document of an estimate: sizes in GiB, times in seconds."""
    records = [
        {"gpu": row.name, **asdict(row.memory), "largest_batch": row.largest, "time": _time_record(spec, row, scope)}
        for row in rows
    ]
    return {
        "schema": 1, "model": spec.model.id, "method": spec.method.name, "batch_size": spec.train.batch_size,
        "gpus": records,
    }  # fmt: skip


def _time_record(spec: Experiment, row: GpuEstimate, scope: Scope) -> dict[str, Any]:
    time = row.time
    if time is None:
        return {"why": row.reason}
    samples, seconds, cost = totals(spec, row.name, time, scope)
    return {
        "step_s": asdict(time.step_s), "samples_per_step": time.samples,
        "tokens_per_s": time.tokens_per_s, "mean_tokens": time.mean_tokens,
        "samples_per_hour": time.samples_per_hour, "real_tokens_per_step": time.tokens,
        "padding": time.padding, "start_s": asdict(time.start_s), "first_s": time.first_s,
        "bound": time.bound, "parts_s": time.parts,
        "basis": time.basis, "confidence": time.confidence, "lengths": time.lengths,
        "upper_bound": time.upper_bound, "hours": scope.hours,
        "samples_in_hours": asdict(time.samples_in(3600 * scope.hours)), "samples": samples,
        "training_s": None if seconds is None else asdict(seconds),
        "joules": None if samples is None else asdict(time.joules_for(samples)), "watts": asdict(time.watts),
        "watts_source": time.watts_source, "gpus": time.gpus, "exposed_s": time.exposed_s,
        "cost": None if cost is None else asdict(cost),
    }  # fmt: skip

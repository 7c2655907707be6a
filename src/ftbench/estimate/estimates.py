"""Answer `ftbench estimate`: the memory and time of a spec on one or several GPUs."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ftbench.core.hardware import Gpu
from ftbench.core.table import folded_command
from ftbench.core.units import gibibytes
from ftbench.errors import SpecError
from ftbench.estimate import text
from ftbench.estimate.gpus import ALL, gpus_named, machine_gpu, probed
from ftbench.estimate.memory.estimate import VERDICTS, estimate_memory
from ftbench.estimate.memory.largest_batch import largest_batch
from ftbench.estimate.text import GpuEstimate, Scope, totals
from ftbench.estimate.time.duration import estimate_duration
from ftbench.estimate.time.history import RunHistory
from ftbench.estimate.workload.model import shape_of
from ftbench.estimate.workload.sharding import STRATEGIES, on_gpus, problem
from ftbench.spec import strategies
from ftbench.spec.experiment import Experiment
from ftbench.spec.launch import MOST_GPUS
from ftbench.spec.load import load
from ftbench.spec.prices import load_prices
from ftbench.store import machine

NIGHT_H = 8.0
MOST_SAMPLES = 10**15
_MOST_COMPARED, _USUAL_NODE = 64, 8  # GPUs of `--strategy all`
_MOST_MEMORY_GB, _MOST_HOURS = 1_000_000, 1_000_000


@dataclass(frozen=True, slots=True)
class EstimateRequest:
    """The options of `ftbench estimate`. `gpus` and `strategy` replace the spec's `launch`."""

    spec: Path
    sets: Sequence[str] = ()
    gpu: str | None = None
    memory_gb: float | None = None
    gpus: int | None = None
    strategy: str | None = None
    samples: int | None = None
    hours: float | None = None
    prices: Path | None = None
    store: Path = Path("results")


@dataclass(frozen=True, slots=True)
class Answer:
    """The text, the JSON document, and the exit code of --check, which follows the best verdict."""

    text: str
    document: str
    code: int


@dataclass(frozen=True, slots=True)
class Target:
    """A GPU of the table, or the GiB of an unknown GPU. `total` is the memory that its driver reports, if known."""

    name: str
    gpu: Gpu | float
    total: float | None = None


def estimate(request: EstimateRequest) -> Answer:
    """Return the answer. Raise SpecError if the request is wrong or something is not known."""
    history = RunHistory.read(request.store)
    if request.strategy == ALL:
        return _compare_strategies(request, history)
    spec = history.with_sample_count(launched(load(request.spec, request.sets), request.gpus, request.strategy))
    scope = _scope(request)
    if why := problem(shape_of(spec.model), spec.launch):
        raise SpecError(f"launch.gpus: {why}: choose another number of GPUs or another strategy")
    targets = _targets(request, history.path)
    rows = [_estimated(spec, target, history) for target in targets]
    best = min(VERDICTS.index(row.memory.verdict) for row in rows)
    document, nearest = as_document(spec, rows, scope), ""
    if best:
        closest = min(range(len(rows)), key=lambda at: rows[at].memory.device.high - rows[at].memory.usable)
        nearest, document["gpus"][closest]["nearest"] = _alternative(spec, targets[closest], request, history)
    return Answer(text.as_text(spec, rows, scope, nearest), json.dumps(document), best)


def _estimated(spec: Experiment, target: Target, history: RunHistory) -> GpuEstimate:
    """Return memory and time on one GPU. If the time is not known, `reason` explains it."""
    memory = estimate_memory(spec, target.gpu, total=target.total)
    most = largest_batch(spec, target.gpu, total=target.total)
    row = GpuEstimate(target.name, target.gpu if isinstance(target.gpu, Gpu) else None, memory, most)
    if row.gpu is None:
        return replace(row, reason="not known for --memory-gb: name a GPU of `ftbench list gpus` with --gpu")
    try:
        return replace(row, time=estimate_duration(spec, row.gpu, history))
    except SpecError as error:
        reason = str(error)
        fits = memory.verdict != VERDICTS[-1]
        return replace(row, reason=reason if fits else f"{reason.partition(': ')[0]}, and the spec does not fit")


def _scope(request: EstimateRequest) -> Scope:
    """Return the number of samples, the hours and the prices of a request. Raise SpecError for impossible amounts."""
    samples, hours = request.samples, request.hours
    prices = None if request.prices is None else load_prices(request.prices)
    if samples is not None and not 1 <= samples <= MOST_SAMPLES:
        raise SpecError(f"--samples {samples}: must be from 1 to 10^15, for example --samples 20000")
    if hours is not None and not 0 < hours <= _MOST_HOURS:
        raise SpecError(f"--hours {hours:g}: must be above 0 and at most {_MOST_HOURS:,}")
    return Scope(samples, NIGHT_H if hours is None else hours, prices)


def _compare_strategies(request: EstimateRequest, history: RunHistory) -> Answer:
    """Return a table of strategies and numbers of GPUs of one kind."""
    from ftbench.estimate import strategies_table

    given = {"--samples": request.samples, "--hours": request.hours, "--prices": request.prices}
    if unused := [name for name, value in given.items() if value is not None]:
        raise SpecError(
            f"--strategy {ALL} compares memory and speed only: remove {' and '.join(unused)}, or name one strategy"
        )
    spec = history.with_sample_count(load(request.spec, request.sets))
    target, *others = _targets(request, history.path)
    if others:
        raise SpecError(f"--strategy {ALL} compares strategies on one kind of GPU: name one, such as {target.name}")
    most = request.gpus or (spec.launch.gpus if spec.launch.gpus > 1 else _USUAL_NODE)
    if not 2 <= most <= _MOST_COMPARED:
        raise SpecError(f"--gpus {most}: --strategy {ALL} compares 2 to {_MOST_COMPARED} GPUs")
    rows = strategies_table.rows(spec, target.gpu, most, history, target.total)
    best = min(VERDICTS.index(row.memory.verdict) for row in rows if row.memory and not row.problems)
    return Answer(
        strategies_table.as_text(spec, target.name, rows), strategies_table.as_document(spec, target.name, rows), best
    )


def _alternative(
    spec: Experiment, target: Target, request: EstimateRequest, history: RunHistory
) -> tuple[str, dict[str, Any] | None]:
    """Return the fastest settings that fit with the same samples per step, as text and as a record."""
    from ftbench.estimate.recommend import ranking, spec_file  # most specs fit

    if not isinstance(target.gpu, Gpu):
        return "Name a GPU with --gpu to get settings that fit.", None
    best = ranking.alternative(spec, target.gpu, history)
    if best is None:
        return "No batch, optimization or method of `ftbench recommend` is sure to fit.", None
    memory, command = best.memory, spec_file.run_command(request.spec, request.sets, best.spec)
    where = "" if request.gpu is None or len(gpus_named(request.gpu)) == 1 else f" on {target.name}"
    needed = f"{gibibytes(memory.device.expected)} of {gibibytes(memory.total)} GiB{where}"
    record = {"command": command, "device_gb": asdict(memory.device)}
    return f"The fastest settings that fit take {needed}:\n{folded_command(command)}", record


def launched(spec: Experiment, gpus: int | None, strategy: str | None) -> Experiment:
    """Return the spec with this number of GPUs and this strategy. None keeps the spec's value."""
    known = ", ".join([*strategies.STRATEGIES, ALL])
    if gpus is not None and not 1 <= gpus <= MOST_GPUS:
        raise SpecError(f"--gpus {gpus}: must be from 1 to {MOST_GPUS:,}")
    if strategy is not None and strategy not in STRATEGIES:
        raise SpecError(f"--strategy {strategy}: unknown; allowed: {known}")
    count = spec.launch.gpus if gpus is None else gpus
    how = strategy or ("none" if count == 1 else spec.launch.strategy)
    if count > 1 and how == "none":
        raise SpecError(f"--gpus {count}: add --strategy with one of {known}")
    if how != "none" and count == 1:
        raise SpecError(f"--strategy {how}: needs several GPUs: add --gpus 2, or remove it")
    offload = spec.launch.offload if how == spec.launch.strategy else "none"
    try:
        shared = on_gpus(spec, count, how, offload)
    except ValueError:
        raise SpecError(f"--strategy {how}: {count} GPUs cannot be divided like this: give another --gpus") from None
    if refused := strategies.incompatibilities(shared):
        raise SpecError(*refused)
    return shared


def _targets(request: EstimateRequest, store: Path | None) -> list[Target]:
    """Return the requested GPUs, or this machine's GPU, with what the store's probes and the driver report."""
    if request.memory_gb is not None:
        if request.gpu is not None:
            raise SpecError("--memory-gb and --gpu exclude each other: give one")
        if not 0 < request.memory_gb <= _MOST_MEMORY_GB:
            raise SpecError(f"--memory-gb {request.memory_gb:g}: must be above 0 and at most {_MOST_MEMORY_GB:,} GiB")
        return [Target(f"a GPU of {request.memory_gb:g} GiB", request.memory_gb)]
    if request.gpu is not None:
        return [Target(gpu.name, probed(gpu, store)) for gpu in gpus_named(request.gpu)]
    described = machine.gpu()
    if described is None or not described.get("memory_gb"):
        raise SpecError("this machine has no GPU: name one with --gpu (`ftbench list gpus`), or give --memory-gb")
    return [Target(described["name"], machine_gpu(described, store), described["memory_gb"])]


def as_document(spec: Experiment, rows: Sequence[GpuEstimate], scope: Scope) -> dict[str, Any]:
    """Return the document for --json: sizes in GiB, times in seconds."""
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
    if row.gpu is None or time is None:
        return {"why": row.reason}
    samples, seconds, cost = totals(spec, row.gpu, time, scope)
    return {
        "step_s": asdict(time.step_s), "samples_per_step": time.samples,
        "tokens_per_s": time.tokens_per_s, "mean_tokens": time.mean_tokens,
        "samples_per_hour": time.samples_per_hour, "real_tokens_per_step": time.tokens,
        "padding": time.padding, "start_s": time.start_s, "first_s": time.first_s,
        "bound": time.bound, "parts_s": time.parts,
        "basis": time.basis, "confidence": time.confidence, "lengths": time.lengths,
        "upper_bound": time.upper_bound, "hours": scope.hours,
        "samples_in_hours": asdict(time.samples_in(3600 * scope.hours)), "samples": samples,
        "training_s": None if seconds is None else asdict(seconds),
        "joules": None if samples is None else asdict(time.joules_for(samples)), "watts": asdict(time.watts),
        "watts_source": time.watts_source, "gpus": time.gpus, "exposed_s": time.exposed_s,
        "cost": None if cost is None else asdict(cost),
    }  # fmt: skip

"""An estimate for one or several GPUs, and its JSON document."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ftbench.core.hardware import Gpu
from ftbench.estimate.memory.estimate import Band, MemoryEstimate
from ftbench.estimate.time.duration import DurationEstimate, epochs_samples
from ftbench.spec.experiment import Experiment
from ftbench.spec.prices import Amount, Prices, amount


@dataclass(frozen=True, slots=True)
class Scope:
    """What to estimate in addition to the step: the time for `samples` (None: the samples of the spec), the samples in
    `hours`, and with `prices` the cost."""

    samples: float | None
    hours: float
    prices: Prices | None


@dataclass(frozen=True, slots=True)
class GpuEstimate:
    """Memory, largest batch that fits, and time on a GPU; `reason` explains a missing time."""

    name: str
    gpu: Gpu | None
    memory: MemoryEstimate
    largest: int | None
    time: DurationEstimate | None = None
    reason: str = ""


def totals(
    spec: Experiment, gpu: Gpu, time: DurationEstimate, scope: Scope
) -> tuple[float | None, Band | None, Amount | None]:
    """Return the requested samples (by default the samples of the spec), their time and their cost, as far as known."""
    if (samples := scope.samples or epochs_samples(spec, time.samples)) is None:
        return None, None, None
    seconds = time.seconds_for(samples)
    return samples, seconds, _cost(gpu, time, scope, seconds.expected)


def cost_of_1k(gpu: Gpu, time: DurationEstimate, scope: Scope) -> Amount | None:
    return _cost(gpu, time, scope, 3600 * 1000 / time.samples_per_hour)


def _cost(gpu: Gpu, time: DurationEstimate, scope: Scope, seconds: float) -> Amount | None:
    price = scope.prices.of(gpu.name) if scope.prices else None
    return amount(price, time.gpus * seconds, time.watts.expected) if price else None


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

"""The time half of `ftbench estimate`: of each GPU how long a spec takes there, or why that is not known."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ftbench.core import units
from ftbench.core.grouping import grouped_by
from ftbench.core.hardware import Gpu
from ftbench.core.table import folded, text_table
from ftbench.core.units import JOULES_PER_KWH
from ftbench.errors import SpecError
from ftbench.estimate.memory.estimate import Band
from ftbench.estimate.time.communication import COMMUNICATION, OFFLOADED
from ftbench.estimate.time.duration import FLUSHES, DurationEstimate, epochs_samples, estimate_duration
from ftbench.estimate.time.history import RunHistory
from ftbench.estimate.time.rates import shipped_terms
from ftbench.spec.experiment import Experiment
from ftbench.spec.prices import Amount, Prices, amount

NIGHT_H = 8.0
MOST_SAMPLES = 10**15
_MOST_HOURS = 1_000_000
_SHOWN = 4  # terms of a step that are named
_NAMED = 4  # GPUs without a price that are
_BASIS = "samples/h, nights and costs follow from tokens/s and the mean length of the data: {} tokens ({})"


@dataclass(frozen=True, slots=True)
class Scope:
    """What is estimated beside the step: how long `samples` take (None for those of the spec), and what `hours` are
    good for; with `prices` what it costs."""

    samples: float | None
    hours: float
    prices: Prices | None


@dataclass(frozen=True, slots=True)
class GpuTime:
    """A GPU with its estimate, or the reason why there is none."""

    name: str
    gpu: Gpu | None
    estimate: DurationEstimate | None
    reason: str = ""


def scope_of(samples: float | None, hours: float | None, prices: Prices | None) -> Scope:
    """Raise SpecError for amounts that are none."""
    if samples is not None and not 1 <= samples <= MOST_SAMPLES:
        raise SpecError(f"--samples {samples:g}: how many samples to train on, from 1 to 10^15")
    if samples is not None and samples % 1:
        raise SpecError(f"--samples {samples:g}: samples are whole: ask for {math.ceil(samples)}")
    if hours is not None and not 0 < hours <= _MOST_HOURS:
        raise SpecError(f"--hours {hours:g}: how long a night is, in hours, above 0, at most {_MOST_HOURS:,}")
    return Scope(samples, NIGHT_H if hours is None else hours, prices)


def time_on(
    spec: Experiment, name: str, gpu: Gpu | float, store: RunHistory, config: dict[str, Any] | None, fits: bool = True
) -> GpuTime:
    """Return the estimate of a GPU of the table, or of as many as `launch` asks for. Where that is not known and the
    spec does not fit, the reason is without its way out, which would lead nowhere."""
    if not isinstance(gpu, Gpu):
        return GpuTime(
            name, None, None, "how fast this GPU is is not known: name one of `ftbench list gpus` with --gpu"
        )
    try:
        return GpuTime(name, gpu, estimate_duration(spec, gpu, store, config=config))
    except SpecError as error:
        reason = str(error)
        return GpuTime(
            name, gpu, None, reason if fits else f"{reason.partition(': ')[0]}, and the spec does not fit there"
        )


def as_text(spec: Experiment, rows: Sequence[GpuTime], scope: Scope) -> str:
    """Return the section of one GPU, or a line a GPU."""
    if len(rows) > 1:
        return _table(spec, rows, scope)
    (only,) = rows
    if only.gpu is None or only.estimate is None:
        return folded(f"time: {only.reason}")
    return text_table(["", ""], _lines(spec, only.gpu, only.estimate, scope))


def _lines(spec: Experiment, gpu: Gpu, estimate: DurationEstimate, scope: Scope) -> list[tuple[str, str]]:
    night, each = estimate.samples_in(3600 * scope.hours), "the" if estimate.gpus == 1 else "each"
    of_each = "" if estimate.gpus == 1 else f"; {units.rate(estimate.tokens_per_s / estimate.gpus)} tokens/s a GPU"
    return [
        ("step", _band(estimate.step_s, units.seconds)),
        ("speed", f"{units.rate(estimate.tokens_per_s)} tokens/s, so {units.count(estimate.samples_per_hour)} "
                  f"samples/h of {units.rate(estimate.mean_tokens)} tokens each{of_each}"),
        *([("generation", f"{units.seconds(estimate.generation_s)} of the step, before its first forward pass")]
          if estimate.generation_s else []),
        ("known from", estimate.confidence),
        ("lengths", f"{estimate.lengths}; {units.percent(estimate.padding)} padding"),
        *([("", "so these times are upper bounds: a short run on this data tells its lengths")]
          if estimate.upper_bound else []),
        (f"{scope.hours:g} h", _band(night, units.count, " samples")),
        *_training(spec, gpu, estimate, scope),
        ("power", f"{estimate.watts.expected:.0f} W of {each} GPU ({estimate.watts_source})"),
        ("spent on", _parts(estimate)),
    ]  # fmt: skip


def _band(band: Band, written: Any, unit: str = "") -> str:
    return f"{written(band.expected)}{unit} ({written(band.low)} to {written(band.high)})"


def _training(spec: Experiment, gpu: Gpu, estimate: DurationEstimate, scope: Scope) -> list[tuple[str, str]]:
    """Return the lines on the samples asked for, or those of the spec; where neither is known, what a thousand cost."""
    samples, seconds, cost = _whole(spec, gpu, estimate, scope)
    lines, of_what = [], ""
    if samples is None or seconds is None:
        cost, of_what = _cost_of_1k(gpu, estimate, scope), " for 1,000 samples; --samples N says of how many"
    else:
        kwh = estimate.joules_for(samples).expected / JOULES_PER_KWH
        took = f"{units.some(round(samples), 'sample')} in {_band(seconds, units.seconds)}, {kwh:.3g} kWh"
        lines.append(("training", took))
    if cost is not None:
        lines.append(("cost", f"{cost} ({cost.way}){of_what}"))
    elif scope.prices is not None:
        lines.append(("cost", f"{scope.prices.path} has no price for {gpu.name}"))
    return lines


def _whole(
    spec: Experiment, gpu: Gpu, estimate: DurationEstimate, scope: Scope
) -> tuple[float | None, Band | None, Amount | None]:
    """Return the samples asked for, or those of the spec, how long they take and what that costs, as far as known."""
    if (samples := scope.samples or epochs_samples(spec, estimate.samples)) is None:
        return None, None, None
    seconds = estimate.seconds_for(samples)
    return samples, seconds, _cost(gpu, estimate, scope, seconds.expected)


def _cost_of_1k(gpu: Gpu, estimate: DurationEstimate, scope: Scope) -> Amount | None:
    return _cost(gpu, estimate, scope, 3600 * 1000 / estimate.samples_per_hour)


def _cost(gpu: Gpu, estimate: DurationEstimate, scope: Scope, seconds: float) -> Amount | None:
    price = scope.prices.of(gpu.name) if scope.prices else None
    return amount(price, estimate.gpus * seconds, estimate.watts.expected) if price else None


def _parts(estimate: DurationEstimate) -> str:
    if estimate.bound == "images":
        return (
            "images: the GPU waits until they are processed; image_cache or loader_processes take that out of the step"
        )
    if estimate.bound == "host":
        return "Python: the GPU waits for its kernels to be started, so a larger batch costs little"
    total = sum(estimate.parts.values())
    terms = sorted(estimate.parts.items(), key=lambda pair: -pair[1])[:_SHOWN]
    words = {name: term.word for name, term in shipped_terms().items()}
    words |= {COMMUNICATION: "waiting for other GPUs", OFFLOADED: "waiting for the host's memory and optimizer"}
    words |= {FLUSHES: "flushes of a full pool"}
    return ", ".join(f"{words[name]} {units.percent(value / total, 0)}" for name, value in terms)


def _table(spec: Experiment, rows: Sequence[GpuTime], scope: Scope) -> str:
    """Return a line a GPU; columns that none has a value for are left out, and what has no price is named."""
    known = [row.estimate for row in rows if row.estimate]
    samples = scope.samples or epochs_samples(spec, known[0].samples if known else 0.0)
    training = "" if samples is None else f">{units.count(samples)} samples"
    columns = [
        "GPU", ">step", ">tokens/s", training, ">cost of 1k samples" if samples is None else ">cost", ">samples/h",
        f">in {scope.hours:g} h", "known from",
    ]  # fmt: skip
    cells = [_row(spec, row, scope) for row in rows]
    kept = [at for at in range(len(columns)) if any(row[at] for row in cells)]
    table = text_table([columns[at] for at in kept], [[row[at] for at in kept] for row in cells])
    notes = dict.fromkeys(_BASIS.format(units.rate(each.mean_tokens), each.lengths) for each in known)
    return "\n".join([table, *map(folded, (*_unknown(rows), *_unpriced(rows, scope), *notes))])


def _unpriced(rows: Sequence[GpuTime], scope: Scope) -> list[str]:
    """Return a sentence on the GPUs that have a time and no price, where prices are given."""
    if scope.prices is None:
        return []
    names = [row.name for row in rows if row.gpu and row.estimate and scope.prices.of(row.gpu.name) is None]
    return [f"{scope.prices.path} has no price for {units.listed(names, _NAMED)}"] if names else []


def _unknown(rows: Sequence[GpuTime]) -> list[str]:
    """Return why GPUs have no estimate: a sentence for those that lack it for one reason, which names the first."""
    unknown = (row for row in rows if row.estimate is None)
    names = grouped_by(unknown, lambda row: row.reason.replace(row.name, ""))
    return [
        f"{first.name}: {first.reason}" + (f"; the same holds of {', '.join(row.name for row in more)}" if more else "")
        for first, *more in names.values()
    ]


def _row(spec: Experiment, row: GpuTime, scope: Scope) -> list[str]:
    estimate = row.estimate
    if row.gpu is None or estimate is None:
        return [row.name, "", "", "", "", "", "", "not known"]
    samples, seconds, cost = _whole(spec, row.gpu, estimate, scope)
    cost = _cost_of_1k(row.gpu, estimate, scope) if samples is None else cost
    return [
        row.name, units.seconds(estimate.step_s.expected), units.rate(estimate.tokens_per_s),
        units.seconds(seconds.expected) if seconds else "", str(cost or ""), units.count(estimate.samples_per_hour),
        units.count(estimate.samples_in(3600 * scope.hours).expected), estimate.basis,
    ]  # fmt: skip


def as_record(spec: Experiment, row: GpuTime, scope: Scope) -> dict[str, Any]:
    """Return the `time` section of the JSON document; its `why` where there is no estimate."""
    estimate = row.estimate
    if row.gpu is None or estimate is None:
        return {"why": row.reason}
    samples, seconds, cost = _whole(spec, row.gpu, estimate, scope)
    return {
        "step_s": asdict(estimate.step_s), "samples_per_step": estimate.samples,
        "tokens_per_s": estimate.tokens_per_s, "mean_tokens": estimate.mean_tokens,
        "samples_per_hour": estimate.samples_per_hour, "real_tokens_per_step": estimate.tokens,
        "padding": estimate.padding, "start_s": estimate.start_s, "bound": estimate.bound, "parts_s": estimate.parts,
        "basis": estimate.basis, "confidence": estimate.confidence, "lengths": estimate.lengths,
        "upper_bound": estimate.upper_bound, "hours": scope.hours,
        "samples_in_hours": asdict(estimate.samples_in(3600 * scope.hours)), "samples": samples,
        "training_s": None if seconds is None else asdict(seconds),
        "joules": None if samples is None else asdict(estimate.joules_for(samples)), "watts": asdict(estimate.watts),
        "watts_source": estimate.watts_source, "gpus": estimate.gpus, "exposed_s": estimate.exposed_s,
        "generation_s": estimate.generation_s,
        "cost": None if cost is None else asdict(cost),
    }  # fmt: skip

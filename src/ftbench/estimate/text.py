"""Write an estimate as text and as a JSON document."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any

from ftbench.core import units
from ftbench.core.hardware import Gpu
from ftbench.core.stats import grouped_by
from ftbench.core.table import folded, text_table
from ftbench.core.units import JOULES_PER_KWH, gibibytes
from ftbench.estimate.memory.estimate import HOST, Band, MemoryEstimate
from ftbench.estimate.time.communication import COMMUNICATION, OFFLOADED
from ftbench.estimate.time.duration import FLUSHES, DurationEstimate, epochs_samples
from ftbench.estimate.time.rates import shipped_terms
from ftbench.estimate.workload.sharding import shared_how
from ftbench.spec.experiment import Experiment, Launch
from ftbench.spec.prices import Amount, Prices, amount

_BAR = 32  # characters of the longest bar
_SHOWN = 4  # terms of a step, and GPUs without a price, that are named


@dataclass(frozen=True, slots=True)
class Scope:
    """What to estimate besides the step: the time for `samples` (None for the spec's own), the samples in `hours`, and
    with `prices` the cost."""

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


@dataclass(frozen=True, slots=True)
class SizeRow:
    """Pictures of one size: tokens and tiles per sample, the largest batch that fits, and images per second."""

    width: int
    height: int
    tokens: int
    tiles: int
    largest_batch: int | None
    images_per_s: float | None


def memory_text(spec: Experiment, rows: Sequence[GpuEstimate]) -> str:
    """Return the details of one GPU, or one line per GPU."""
    if len(rows) == 1:
        return _memory_card(spec, rows[0])
    columns = ["GPU", "verdict", ">largest batch", ">device memory, GiB", ">for a process"]
    table = text_table(columns, [
        (row.name, row.memory.verdict, _largest(spec, row.largest) or "none",
         _band(row.memory.device, gibibytes), gibibytes(row.memory.usable - row.memory.margin))
        for row in rows
    ])  # fmt: skip
    margin = max(row.memory.margin for row in rows)
    kept = f", less a margin of {gibibytes(margin)} GiB on cards that may drive a display" if margin else ""
    note = f"device memory: expected (range). for a process: GiB that CUDA gives one, as probed or published{kept}"
    return f"{table}\n" + folded(note)


def _memory_card(spec: Experiment, row: GpuEstimate) -> str:
    memory = row.memory
    count, length = memory.batch
    tiers = [(tier, *map(gibibytes, astuple(getattr(memory, tier)))) for tier in ("allocated", "reserved", "device")]
    most = _largest(spec, row.largest)
    lines = [
        f"{spec.model.id}, {spec.method.name}, batch {spec.train.batch_size}{_on_gpus(spec.launch)}",
        folded(f"heaviest batch: {count} x {length:,} positions ({memory.basis})"),
        "",
        text_table(["GiB", ">low", ">expected", ">high"], tiers),
        "",
        f"peak: {memory.peak_phase}, mostly {memory.peak_term}",
        _bars(memory.parts),
        "",
        folded(f"{row.name} has {memory.capacity.words}: {memory.verdict}"),
        f"largest batch that fits: {most}" if most else "no batch is sure to fit",
        *([f"host memory: about {gibibytes(memory.host)} GiB"] if memory.host > HOST else []),
    ]
    return "\n".join(lines)


def _on_gpus(launch: Launch) -> str:
    machines = f" of {launch.nodes} machines" if launch.nodes > 1 else ""
    return "" if launch.gpus == 1 else f" per GPU, on {launch.gpus} GPUs{machines} ({shared_how(launch)})"


def _largest(spec: Experiment, largest: int | None) -> str:
    every = largest and not spec.objective.prompts and largest == spec.dataset.samples
    return f"{largest} (all samples)" if every else str(largest or "")


def _bars(parts: Mapping[str, float]) -> str:
    longest = max(parts.values(), default=1.0)
    return text_table(["", ">", ""], [
        (f"  {name}", gibibytes(size), "█" * max(1, round(_BAR * size / longest)))
        for name, size in sorted(parts.items(), key=lambda pair: -pair[1]) if size >= 0.0005
    ])  # fmt: skip


def _band(band: Band, written: Callable[[float], str], unit: str = "") -> str:
    return f"{written(band.expected)}{unit} ({written(band.low)} to {written(band.high)})"


def time_text(spec: Experiment, rows: Sequence[GpuEstimate], scope: Scope) -> str:
    """Return the details of one GPU, or one line per GPU."""
    if len(rows) > 1:
        return _time_table(spec, rows, scope)
    (only,) = rows
    if only.gpu is None or only.time is None:
        return folded(f"time: {only.reason}")
    return text_table(["", ""], _time_lines(spec, only.gpu, only.time, scope))


def _time_lines(spec: Experiment, gpu: Gpu, time: DurationEstimate, scope: Scope) -> list[tuple[str, str]]:
    night, each = time.samples_in(3600 * scope.hours), "the" if time.gpus == 1 else "each"
    per_gpu = "" if time.gpus == 1 else f"; {units.rate(time.tokens_per_s / time.gpus)} tokens/s per GPU"
    return [
        ("step", _band(time.step_s, units.seconds)),
        ("speed", f"{units.rate(time.tokens_per_s)} tokens/s, so {units.count(time.samples_per_hour)} "
                  f"samples/h of {units.rate(time.mean_tokens)} tokens each{per_gpu}"),
        *([("generation", f"{units.seconds(time.generation_s)} of the step, before its first forward pass")]
          if time.generation_s else []),
        ("known from", time.confidence),
        ("lengths", f"{time.lengths}; {units.percent(time.padding)} padding"),
        *([("", "so these times are upper bounds: a short run on this data measures its lengths")]
          if time.upper_bound else []),
        (f"{scope.hours:g} h", _band(night, units.count, " samples")),
        *_training(spec, gpu, time, scope),
        ("power", f"{time.watts.expected:.0f} W of {each} GPU ({time.watts_source})"),
        ("spent on", _parts(time)),
    ]  # fmt: skip


def _training(spec: Experiment, gpu: Gpu, time: DurationEstimate, scope: Scope) -> list[tuple[str, str]]:
    """Return the lines on the requested samples or the spec's own; if neither is known, the cost of 1,000 samples."""
    samples, seconds, cost = _totals(spec, gpu, time, scope)
    lines, of_what = [], ""
    if samples is None or seconds is None:
        cost, of_what = _cost_of_1k(gpu, time, scope), " for 1,000 samples; use --samples N for another number"
    else:
        kwh = time.joules_for(samples).expected / JOULES_PER_KWH
        took = f"{units.some(round(samples), 'sample')} in {_band(seconds, units.seconds)}, {kwh:.3g} kWh"
        lines.append(("training", took))
    if cost is not None:
        lines.append(("cost", f"{cost} ({cost.way}){of_what}"))
    elif scope.prices is not None:
        lines.append(("cost", f"{scope.prices.path} has no price for {gpu.name}"))
    return lines


def _totals(
    spec: Experiment, gpu: Gpu, time: DurationEstimate, scope: Scope
) -> tuple[float | None, Band | None, Amount | None]:
    """Return the requested samples or the spec's own, their time and their cost, as far as known."""
    if (samples := scope.samples or epochs_samples(spec, time.samples)) is None:
        return None, None, None
    seconds = time.seconds_for(samples)
    return samples, seconds, _cost(gpu, time, scope, seconds.expected)


def _cost_of_1k(gpu: Gpu, time: DurationEstimate, scope: Scope) -> Amount | None:
    return _cost(gpu, time, scope, 3600 * 1000 / time.samples_per_hour)


def _cost(gpu: Gpu, time: DurationEstimate, scope: Scope, seconds: float) -> Amount | None:
    price = scope.prices.of(gpu.name) if scope.prices else None
    return amount(price, time.gpus * seconds, time.watts.expected) if price else None


def _parts(time: DurationEstimate) -> str:
    if time.bound == "images":
        return "images: the GPU waits for image processing; image_cache or loader_processes avoid that"
    if time.bound == "host":
        return "Python: the GPU waits for kernels to be started, so a larger batch costs little"
    total = sum(time.parts.values())
    terms = sorted(time.parts.items(), key=lambda pair: -pair[1])[:_SHOWN]
    words = {name: term.word for name, term in shipped_terms().items()}
    words |= {COMMUNICATION: "waiting for other GPUs", OFFLOADED: "waiting for the host's memory and optimizer"}
    words |= {FLUSHES: "flushes of a full pool"}
    return ", ".join(f"{words[name]} {units.percent(value / total, 0)}" for name, value in terms)


def _time_table(spec: Experiment, rows: Sequence[GpuEstimate], scope: Scope) -> str:
    """Return one line per GPU, without empty columns, and notes on unknown times, prices and lengths."""
    known = [row.time for row in rows if row.time]
    samples = scope.samples or epochs_samples(spec, known[0].samples if known else 0.0)
    training = "" if samples is None else f">{units.count(samples)} samples"
    columns = [
        "GPU", ">step", ">tokens/s", training, ">cost of 1k samples" if samples is None else ">cost", ">samples/h",
        f">in {scope.hours:g} h", "limited by", "known from",
    ]  # fmt: skip
    cells = [_time_row(spec, row, scope) for row in rows]
    kept = [at for at in range(len(columns)) if any(row[at] for row in cells)]
    table = text_table([columns[at] for at in kept], [[row[at] for at in kept] for row in cells])
    notes = dict.fromkeys(
        f"mean sample length: {units.rate(each.mean_tokens)} tokens ({each.lengths}), which decides samples/h and costs"
        for each in known
    )
    return "\n".join([table, *map(folded, (*_unknown(rows), *_unpriced(rows, scope), *notes))])


def _time_row(spec: Experiment, row: GpuEstimate, scope: Scope) -> list[str]:
    time = row.time
    if row.gpu is None or time is None:
        return [row.name, "", "", "", "", "", "", "", "not known"]
    samples, seconds, cost = _totals(spec, row.gpu, time, scope)
    cost = _cost_of_1k(row.gpu, time, scope) if samples is None else cost
    return [
        row.name, units.seconds(time.step_s.expected), units.rate(time.tokens_per_s),
        units.seconds(seconds.expected) if seconds else "", str(cost or ""), units.count(time.samples_per_hour),
        units.count(time.samples_in(3600 * scope.hours).expected),
        {"host": "the CPU (launch-bound)", "images": "image processing"}.get(time.bound, ""), time.basis,
    ]  # fmt: skip


def _unpriced(rows: Sequence[GpuEstimate], scope: Scope) -> list[str]:
    if scope.prices is None:
        return []
    names = [row.name for row in rows if row.gpu and row.time and scope.prices.of(row.gpu.name) is None]
    return [f"{scope.prices.path} has no price for {units.listed(names, _SHOWN)}"] if names else []


def _unknown(rows: Sequence[GpuEstimate]) -> list[str]:
    """Return why GPUs have no time: one sentence per reason."""
    groups = grouped_by((row for row in rows if row.time is None), lambda row: row.reason.replace(row.name, ""))
    return [
        f"{first.name}: {first.reason}" + (f"; also {', '.join(row.name for row in more)}" if more else "")
        for first, *more in groups.values()
    ]


def image_sizes_text(rows: Sequence[SizeRow], hours: float) -> str:
    """Return one line per image size."""
    columns = ["images of", ">tokens", ">tiles", ">largest batch", ">images/s", f">images in {hours:g} h"]
    return text_table(columns, [
        (f"{row.width} x {row.height}", units.count(row.tokens), units.count(row.tiles),
         str(row.largest_batch or "none"), units.rate(row.images_per_s),
         "" if row.images_per_s is None else units.count(row.images_per_s * 3600 * hours))
        for row in rows
    ])  # fmt: skip


def size_record(row: SizeRow, hours: float) -> dict[str, Any]:
    return asdict(row) | {"images_in_hours": row.images_per_s and row.images_per_s * 3600 * hours}


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
    samples, seconds, cost = _totals(spec, row.gpu, time, scope)
    return {
        "step_s": asdict(time.step_s), "samples_per_step": time.samples,
        "tokens_per_s": time.tokens_per_s, "mean_tokens": time.mean_tokens,
        "samples_per_hour": time.samples_per_hour, "real_tokens_per_step": time.tokens,
        "padding": time.padding, "start_s": time.start_s, "bound": time.bound, "parts_s": time.parts,
        "basis": time.basis, "confidence": time.confidence, "lengths": time.lengths,
        "upper_bound": time.upper_bound, "hours": scope.hours,
        "samples_in_hours": asdict(time.samples_in(3600 * scope.hours)), "samples": samples,
        "training_s": None if seconds is None else asdict(seconds),
        "joules": None if samples is None else asdict(time.joules_for(samples)), "watts": asdict(time.watts),
        "watts_source": time.watts_source, "gpus": time.gpus, "exposed_s": time.exposed_s,
        "generation_s": time.generation_s,
        "cost": None if cost is None else asdict(cost),
    }  # fmt: skip

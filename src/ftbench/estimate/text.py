"""Format the estimates of `ftbench estimate` as text."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from statistics import NormalDist

from ftbench.core import units
from ftbench.core.stats import grouped_by
from ftbench.core.table import folded, text_table
from ftbench.core.units import JOULES_PER_KWH, gibibytes
from ftbench.estimate.gpus import RESERVE
from ftbench.estimate.memory.estimate import HOST, VERDICTS, Band, MemoryEstimate
from ftbench.estimate.time.duration import MEASURED, DurationEstimate
from ftbench.estimate.workload.batches import epochs_samples
from ftbench.estimate.workload.sharding import shared_how
from ftbench.spec.experiment import Experiment
from ftbench.spec.prices import Amount, Prices, amount

_Z = 1.645  # 95 % quantile of the standard normal distribution, which is the upper end of a 90 % range
_BAR = 32  # characters of the longest bar
LIMITS = {"host": "launch-bound", "images": "image loading"}  # text for each bottleneck except the GPU
_OTHERS = "`ftbench recommend` finds the best settings for each GPU."
GENERATED = "this command trains on generated samples: for a real training, give yours with --dataset FILE"
AMD = "ftbench cannot train on AMD GPUs, so the command only estimates"
LAUNCH_BOUND = "launch-bound: the CPU starts kernels too slowly, so a faster GPU gains little"


@dataclass(frozen=True, slots=True)
class Scope:
    """The totals to print: the time to train `samples` samples, the samples trained in `hours`, and the cost by
    `prices`. If `samples` is None, the spec gives the number of samples."""

    samples: float | None
    hours: float
    prices: Prices | None


@dataclass(frozen=True, slots=True)
class GpuEstimate:
    """The estimate for one GPU. `largest` is the largest batch size that fits. `reason` explains an unknown time."""

    name: str
    memory: MemoryEstimate
    largest: int | None
    time: DurationEstimate | None = None
    reason: str = ""


def totals(
    spec: Experiment, name: str, time: DurationEstimate, scope: Scope
) -> tuple[float | None, Band | None, Amount | None]:
    """Return the number of samples to train, the time in seconds, and the cost. An unknown value is None."""
    if (samples := scope.samples or epochs_samples(spec, time.samples)) is None:
        return None, None, None
    seconds, price = time.seconds_for(samples), scope.prices.of(name) if scope.prices else None
    cost = amount(price, time.gpus * seconds.expected, time.watts.expected) if price else None
    return samples, seconds, cost


def as_text(spec: Experiment, rows: Sequence[GpuEstimate], scope: Scope, nearest: str = "") -> str:
    """Return details of one GPU, or a table of several GPUs. `nearest` is a text about settings that fit."""
    more = [nearest] if nearest else []
    if len(rows) > 1:
        return "\n".join([_fitting(rows), "", _table(spec, rows, scope), *more])
    (row,), launch = rows, spec.launch
    machines = f" of {launch.nodes} machines" if launch.nodes > 1 else ""
    on = "" if launch.gpus == 1 else f" per GPU, on {launch.gpus} GPUs{machines} ({shared_how(launch)})"
    title = f"{spec.model.id}, {spec.method.name}, batch {spec.train.batch_size}{on} on {row.name}"
    details = ["", _memory_details(row.memory), *(_time_details(row.time) if row.time else [])]
    return "\n".join([f"{title}: {fit_words(row.memory)}", _summary(spec, row, scope), *more, *details])


def fit_words(memory: MemoryEstimate) -> str:
    """Return `fits`, `does not fit`, or words with the probability of fitting, such as `likely fits (about 70 %)`.

    The probability is computed from two values: the range of the estimated memory, and the usable memory of the GPU."""
    if memory.verdict != "uncertain":
        return memory.verdict
    device, room = memory.device, memory.usable - memory.margin + RESERVE
    side = device.high - device.expected if room > device.expected else device.expected - device.low
    chance = NormalDist().cdf(_Z * (room - device.expected) / side) if side else 0.5
    percent = min(90, max(10, 10 * round(10 * chance)))
    return f"{'likely fits' if percent >= 50 else 'may fit'} (about {percent} %)"


def _fitting(rows: Sequence[GpuEstimate]) -> str:
    """Return a sentence that counts the GPUs with enough memory, and names the smallest and the fastest of them."""
    fit = [row for row in rows if row.memory.verdict == VERDICTS[0]]
    if not fit:
        verb = "does" if all(row.memory.verdict == VERDICTS[-1] for row in rows) else "may"
        return folded(f"It {verb} not fit any of these {len(rows)} GPUs. {_OTHERS}")
    text = f"It fits {len(fit)} of {len(rows)} GPUs. The smallest is {min(fit, key=lambda row: row.memory.total).name}"
    if timed := [(row.time.step_s.expected, row.name) for row in fit if row.time]:
        seconds, name = min(timed)
        text += f", the fastest {name} ({units.seconds(seconds)} per step)"
    return folded(f"{text}. {_OTHERS}")


def _summary(spec: Experiment, row: GpuEstimate, scope: Scope) -> str:
    """Return a text table with memory, largest batch, time and cost on one GPU."""
    memory, time = row.memory, row.time
    lines = [
        ("memory", f"{_band(memory.device, gibibytes, ' GiB')} as nvidia-smi shows; {row.name} has "
                   f"{memory.capacity.words}"),
        ("batch", f"largest that fits: {_largest(spec, row.largest) or 'none, even batch 1 may not fit'}"),
    ]  # fmt: skip
    if time is None:
        return text_table(["", ""], [*lines, ("time", row.reason)])
    samples, seconds, cost = totals(spec, row.name, time, scope)
    if samples is not None and seconds is not None:
        energy = f"{time.joules_for(samples).expected / JOULES_PER_KWH:.3g} kWh without the start"
        took = f"{units.some(round(samples), 'sample')} in {_band(seconds, units.seconds)}, {energy}"
        lines.append(("training", "if it fitted: " * (memory.verdict == VERDICTS[-1]) + took))
    if scope.prices is not None:
        unknown = f"{scope.prices.path} has no price for {row.name}" if samples else "not known: use --samples N"
        lines.append(("cost", f"{cost} ({cost.way})" if cost else unknown))
    per_gpu = "" if time.gpus == 1 else f"; {units.rate(time.tokens_per_s / time.gpus)} tokens/s per GPU"
    limit = f"; {LIMITS[time.bound]}" if time.bound in LIMITS else ""
    lines += [
        (f"{scope.hours:g} h", _band(time.samples_in(3600 * scope.hours), units.count, " samples")),
        ("speed", f"{units.rate(time.tokens_per_s)} tokens/s, {units.count(time.samples_per_hour)} samples/h of "
                  f"{units.rate(time.mean_tokens)} tokens{per_gpu}{limit}"),
        ("known from", time.confidence),
    ]  # fmt: skip
    return text_table(["", ""], lines)


def _memory_details(memory: MemoryEstimate) -> str:
    count, length = memory.batch
    tiers = [(tier, *map(gibibytes, astuple(getattr(memory, tier)))) for tier in ("allocated", "reserved", "device")]
    lines = [
        text_table(["GiB", ">low", ">expected", ">high"], tiers), "",
        folded(f"largest batch in this data: {count} x {length:,} tokens with padding ({memory.basis})"),
        *([f"stages: {', '.join(map(gibibytes, memory.stages))} GiB; the largest:"] if memory.stages else []),
        f"peak: {memory.peak_phase}, mostly {memory.peak_term}", _bars(memory.parts),
        *([f"host memory: about {gibibytes(memory.host)} GiB"] if memory.host > HOST else []),
    ]  # fmt: skip
    return "\n".join(lines)


def _largest(spec: Experiment, largest: int | None) -> str:
    every = largest and largest == spec.dataset.samples
    return f"{largest} (all samples)" if every else str(largest or "")


def _bars(parts: Mapping[str, float]) -> str:
    longest = max(parts.values(), default=1.0)
    return text_table(["", ">", ""], [
        (f"  {name}", gibibytes(size), "█" * max(1, round(_BAR * size / longest)))
        for name, size in sorted(parts.items(), key=lambda pair: -pair[1]) if size >= 0.0005
    ])  # fmt: skip


def _band(band: Band, written: Callable[[float], str], unit: str = "") -> str:
    """Return an expected value and its 90 % range as text."""
    return f"{written(band.expected)}{unit} (90 %: {written(band.low)} to {written(band.high)})"


def _time_details(time: DurationEstimate) -> list[str]:
    each = "the" if time.gpus == 1 else "each"
    return ["", text_table(["", ""], [
        ("step", _band(time.step_s, units.seconds)),
        ("lengths", f"{time.lengths}; {units.percent(time.padding)} padding"),
        *([("", "so these times are upper bounds. A short run on this data measures the real lengths")]
          if time.upper_bound else []),
        ("start", f"{_band(time.start_s, units.seconds)} to import, load and compile; the first step takes "
                  f"{units.seconds(time.first_s)} longer than a steady one"),
        ("power", f"{time.watts.expected:.0f} W of {each} GPU ({time.watts_source})"),
    ])]  # fmt: skip


def _table(spec: Experiment, rows: Sequence[GpuEstimate], scope: Scope) -> str:
    """Return a table with one row per GPU. Notes below the table explain sample lengths and unknown times."""
    known = [row.time for row in rows if row.time]
    samples = scope.samples or epochs_samples(spec, known[0].samples if known else 0.0)
    cells = [_cells(spec, row, scope, f">{units.count(samples)} samples" if samples else "") for row in rows]
    columns = [name for name in cells[0] if any(row[name] for row in cells)]
    table = text_table(columns, [[row[name] for name in columns] for row in cells])
    margin = max(row.memory.margin for row in rows)
    notes = [
        f"mean sample length: {units.rate(each.mean_tokens)} tokens ({each.lengths}); it determines samples/h and costs"
        for each in known
    ]
    notes.append("GiB: device memory, as nvidia-smi shows. For a process: the memory that CUDA gives one process" + (
        f", less {gibibytes(margin)} GiB for a display" if margin else ""))  # fmt: skip
    if (host := max(row.memory.host for row in rows)) > HOST:
        notes.append(f"host memory: about {gibibytes(host)} GiB")
    if MEASURED in (bases := {time.basis for time in known}) and len(bases) > 1:
        notes.append("Measured rows come from your runs, others from formulas. Ignore differences within the ranges.")
    if any(time.bound == "host" for time in known):
        notes.append(LAUNCH_BOUND)
    if any(row.memory.verdict == VERDICTS[-1] and row.time for row in rows):
        notes.append("If a spec does not fit on a GPU, its time is that of such a GPU with more memory.")
    return "\n".join([table, *map(folded, dict.fromkeys((*_unknown(rows), *notes)))])


def _cells(spec: Experiment, row: GpuEstimate, scope: Scope, training: str) -> dict[str, str]:
    """Return the table row of one GPU as {column heading: text}. `training` is the heading of the time column."""
    memory, time = row.memory, row.time
    _, seconds, cost = totals(spec, row.name, time, scope) if time else (None, None, None)
    return {
        "GPU": row.name, "fit": fit_words(memory), ">GiB": gibibytes(memory.device.expected),
        training: units.seconds(seconds.expected) if seconds else "",
        "known from": time.basis if time else "not known",
        ">cost": str(cost or ("no price" if seconds and scope.prices else "")),
        ">largest batch": _largest(spec, row.largest) or "none",
        "limited by": LIMITS.get(time.bound, "") if time else "",
        ">GiB (90 %)": f"{gibibytes(memory.device.low)} to {gibibytes(memory.device.high)}",
        ">for a process": gibibytes(memory.usable - memory.margin),
        ">step": units.seconds(time.step_s.expected) if time else "",
        ">tokens/s": units.rate(time.tokens_per_s) if time else "",
        ">samples/h": units.count(time.samples_per_hour) if time else "",
        f">in {scope.hours:g} h": units.count(time.samples_in(3600 * scope.hours).expected) if time else "",
    }  # fmt: skip


def _unknown(rows: Sequence[GpuEstimate]) -> list[str]:
    """Return one sentence per reason for an unknown time. Each sentence names the GPUs with this reason."""
    groups = grouped_by((row for row in rows if row.time is None), lambda row: row.reason.replace(row.name, ""))
    return [
        f"{first.name}: {first.reason}" + (f"; also {', '.join(row.name for row in more)}" if more else "")
        for first, *more in groups.values()
    ]

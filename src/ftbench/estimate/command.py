"""`ftbench estimate`: what was asked for → GPUs, their estimates, a text, an exit code."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ftbench.core.hardware import Gpu, find_gpu, gpus, gpus_called
from ftbench.core.table import folded
from ftbench.core.units import gibibytes
from ftbench.errors import SpecError
from ftbench.estimate import view
from ftbench.estimate.by_image_size import as_text as image_sizes_text
from ftbench.estimate.by_image_size import by_image_size
from ftbench.estimate.memory.capacity import machine_gpu, probed
from ftbench.estimate.memory.estimate import VERDICTS, MemoryEstimate, estimate_memory
from ftbench.estimate.memory.memory_cache import largest_batch
from ftbench.estimate.time import text as time_text
from ftbench.estimate.time.history import RunHistory
from ftbench.estimate.workload.model import shape_of
from ftbench.estimate.workload.sharding import STRATEGIES, on_gpus, problem
from ftbench.spec import strategies
from ftbench.spec.base import nearest
from ftbench.spec.experiment import Experiment
from ftbench.spec.launch import MOST_GPUS
from ftbench.spec.load import load
from ftbench.spec.prices import load_prices
from ftbench.spec.reading import read_config
from ftbench.store import machine

ALL, _MOST_COMPARED = "all", 64  # of --strategy, of --gpus beside it
_USUAL_NODE = 8  # GPUs
_MOST_MEMORY_GB = 1_000_000


@dataclass(frozen=True, slots=True)
class EstimateRequest:
    """The command line. `gpu` is a name of the table, as the driver says it, or all; `memory_gb` is in GiB. `gpus` and
    `strategy` stand in for the spec's `launch`."""

    spec: Path
    sets: Sequence[str] = ()
    gpu: str | None = None
    memory_gb: float | None = None
    gpus: int | None = None
    strategy: str | None = None
    config: Path | None = None
    samples: float | None = None
    hours: float | None = None
    prices: Path | None = None
    store: Path = Path("results")


@dataclass(frozen=True, slots=True)
class Answer:
    """What is printed, and the exit code of --check: the verdict of the GPU, or of the best of them."""

    text: str
    document: str
    code: int


def estimate(request: EstimateRequest) -> Answer:
    """Raise SpecError for what is wrong or cannot be known, with a way to say it."""
    store = RunHistory.read(request.store)
    if request.strategy == ALL:
        return _every_strategy(request, store)
    spec = store.with_sample_count(launched(load(request.spec, request.sets), request.gpus, request.strategy))
    prices = None if request.prices is None else load_prices(request.prices)
    scope = time_text.scope_of(request.samples, request.hours, prices)
    config = None if request.config is None else read_config(request.config)
    if why := problem(shape_of(spec.model, config), spec.launch):
        raise SpecError(f"launch.gpus: {why}: take another number, or another strategy")
    gpus = gpus_of(request, store.path)
    options: dict[str, Any] = {} if config is None else {"config": config}
    rows: list[tuple[str, MemoryEstimate, int | None]] = [
        (name, estimate_memory(spec, gpu, total=total, **options), largest_batch(spec, gpu, total=total, **options))
        for name, gpu, total in gpus
    ]
    best = min(VERDICTS.index(memory.verdict) for _, memory, _ in rows)
    times = [
        time_text.time_on(spec, name, gpu, store, config, memory.verdict != VERDICTS[-1])
        for (name, gpu, _), (_, memory, _) in zip(gpus, rows, strict=True)
    ]
    document = view.as_document(spec, rows)
    for record, time in zip(document["gpus"], times, strict=True):
        record["time"] = time_text.as_record(spec, time, scope)
    text = [view.as_text(spec, rows), "", time_text.as_text(spec, times, scope)]
    if len(gpus) == 1 and (sizes := by_image_size(spec, gpus[0][1], store, scope.hours, config, gpus[0][2])):
        document["gpus"][0]["by_image_size"] = sizes
        text += ["", image_sizes_text(sizes, scope.hours)]
    if any(memory.verdict == VERDICTS[-1] and time.estimate for (_, memory, _), time in zip(rows, times, strict=True)):
        text.append(folded("Where it does not fit, times are those that the GPU would reach with more memory."))
    if best:
        closest = min(range(len(rows)), key=lambda at: rows[at][1].device.high - rows[at][1].usable)
        sentence, document["gpus"][closest]["nearest"] = _nearest(spec, gpus[closest], request, config)
        text.append(sentence)
    return Answer("\n".join(text), json.dumps(document), best)


def _every_strategy(request: EstimateRequest, store: RunHistory) -> Answer:
    """Return a table of strategies and numbers of GPUs, of one kind of GPU."""
    from ftbench.estimate import strategies_table

    given = {"--samples": request.samples, "--hours": request.hours, "--prices": request.prices}
    if unused := [name for name, value in given.items() if value is not None]:
        raise SpecError(
            f"--strategy {ALL} compares memory and speed alone: leave {' and '.join(unused)} out, or name one strategy"
        )
    spec = store.with_sample_count(load(request.spec, request.sets))
    config = None if request.config is None else read_config(request.config)
    (name, gpu, total), *others = gpus_of(request, store.path)
    if others:
        raise SpecError(f"--strategy {ALL} compares strategies on one kind of GPU: name one with --gpu, {name} say")
    most = request.gpus or (spec.launch.gpus if spec.launch.gpus > 1 else _USUAL_NODE)
    if not 2 <= most <= _MOST_COMPARED:
        raise SpecError(
            f"--gpus {most}: --strategy {ALL} compares ways to share the work of 2 to {_MOST_COMPARED} GPUs"
        )
    table = strategies_table.rows(spec, gpu, most, store, config, total)
    best = min(VERDICTS.index(row.memory.verdict) for row in table if row.memory and not row.problems)
    text, document = (write(spec, name, table) for write in (strategies_table.as_text, strategies_table.as_document))
    return Answer(text, document, best)


def _nearest(
    spec: Experiment,
    chosen: tuple[str, Gpu | float, float | None],
    request: EstimateRequest,
    config: dict[str, Any] | None,
) -> tuple[str, dict[str, Any] | None]:
    """Return the nearest way that fits a GPU as a sentence with its command, and for --json."""
    from ftbench.estimate.recommend.nearest import nearest_fit  # most estimates fit

    name, gpu, _ = chosen
    fit = nearest_fit(spec, gpu, config)
    if fit is None:
        return "No batch, optimization or method of `ftbench recommend` is sure to make it fit.", None
    where = "" if request.gpu is None or len(listed(request.gpu)) == 1 else f" on {name}"
    needed = f"{gibibytes(fit.memory.device.expected)} of {gibibytes(fit.memory.total)} GiB{where}"
    command = fit.command(request.spec, request.sets, load(request.spec, request.sets))
    record = {"set": fit.sets, "command": command, "device_gb": asdict(fit.memory.device)}
    return f"The nearest that fits takes {needed}:\n  {command}", record


def launched(spec: Experiment, gpus: int | None, strategy: str | None) -> Experiment:
    """Return the spec on so many GPUs that share the work in this way; its own `launch` says what is left out."""
    if gpus is not None and not 1 <= gpus <= MOST_GPUS:
        raise SpecError(f"--gpus {gpus}: how many GPUs there are, from 1 to {MOST_GPUS:,}")
    if strategy is not None and strategy not in STRATEGIES:
        raise SpecError(f"--strategy {strategy}: is none of {', '.join([*strategies.STRATEGIES, ALL])}")
    count = spec.launch.gpus if gpus is None else gpus
    how = strategy or ("none" if count == 1 else spec.launch.strategy)
    if count > 1 and how == "none":
        known = "|".join([*strategies.STRATEGIES, ALL])
        raise SpecError(f"--gpus {count}: say how they share the work: --strategy {known}")
    if how != "none" and count == 1:
        raise SpecError(f"--strategy {how}: says how several GPUs share the work: add --gpus 2, or leave it out")
    offload = spec.launch.offload if how == spec.launch.strategy else "none"
    shared = on_gpus(spec, count, how, offload)
    if refused := strategies.incompatibilities(shared):
        raise SpecError(*refused)
    return shared


def gpus_of(request: EstimateRequest, store: Path | None) -> list[tuple[str, Gpu | float, float | None]]:
    """Return the GPUs asked about, else this machine's, as the store's probes and the driver know them."""
    if request.memory_gb is not None:
        if request.gpu is not None:
            raise SpecError("--memory-gb and --gpu both say how much memory there is: give one")
        if not 0 < request.memory_gb <= _MOST_MEMORY_GB:
            raise SpecError(
                f"--memory-gb {request.memory_gb:g}: must be a number of GiB above 0, at most {_MOST_MEMORY_GB:,}"
            )
        return [(f"a GPU of {request.memory_gb:g} GiB", request.memory_gb, None)]
    if request.gpu is not None:
        return [(gpu.name, probed(gpu, store), None) for gpu in listed(request.gpu)]
    described = machine.gpu()
    if described is None or not described.get("memory_gb"):
        raise SpecError("this machine has no GPU: name one with --gpu (`ftbench list gpus`), or give --memory-gb")
    return [(described["name"], machine_gpu(described, store), described["memory_gb"])]


_APPLE = re.compile(r"\b(apple|mps|metal|m[1-9]( (pro|max|ultra))?)\b")


def listed(text: str) -> list[Gpu]:
    """Return the GPUs of `--gpu NAME[,NAME]` or `--gpu all`, each once. Raise SpecError as `named`."""
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names:
        raise SpecError("--gpu: name GPUs of `ftbench list gpus`, separated by commas, or all")
    return [*dict.fromkeys(gpu for part in names for gpu in (gpus() if part == "all" else [named(part)]))]


def named(name: str) -> Gpu:
    """Return a GPU of the table by its name there, by the driver's, or by words of it that no other has."""
    plain = name.casefold()
    if (exact := next((gpu for gpu in gpus() if plain == gpu.name.casefold()), None)) is not None:
        return exact
    if _APPLE.search(plain):
        raise SpecError(
            f"--gpu {name}: ftbench trains with CUDA, and on Apple's chips not at all; name a card that you could rent "
            "(`ftbench list gpus`)"
        )
    near = gpus_called(name)
    drivers = next((gpu for gpu in gpus() if plain in map(str.casefold, gpu.match)), None) or find_gpu(name)
    if drivers is not None and len({gpu.memory_gb for gpu in near}) < 2:
        return drivers
    if len(near) == 1:
        return near[0]
    if near:
        several = ", ".join(f"{gpu.name} ({gpu.memory_gb:g} GB)" for gpu in near)
        raise SpecError(f"--gpu {name}: there are several: {several}; say which")
    raise SpecError(
        f"--gpu {name}: no such GPU is in the table{nearest(name, [gpu.name for gpu in gpus()])} (`ftbench list gpus` "
        "has them all; --memory-gb does for any other)"
    )

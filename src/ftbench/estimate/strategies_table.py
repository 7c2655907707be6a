"""All strategies for a spec on several GPUs: the memory per GPU, and the speed of all GPUs together."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ftbench.core import units
from ftbench.core.hardware import Gpu
from ftbench.core.stats import grouped_by
from ftbench.core.table import folded, text_table
from ftbench.errors import SpecError
from ftbench.estimate.memory.constants import constants
from ftbench.estimate.memory.estimate import SHARDED_SPREAD, MemoryEstimate, estimate_memory
from ftbench.estimate.recommend.candidates import Way, switched_off
from ftbench.estimate.time.duration import MEASURED, DurationEstimate, estimate_duration
from ftbench.estimate.time.history import RunHistory
from ftbench.estimate.workload.model import shape_of
from ftbench.estimate.workload.sharding import STRATEGIES, counts, fewest, on_gpus, problem, shared_how
from ftbench.spec import strategies
from ftbench.spec.experiment import Experiment, Launch

_MARKS = {"fits": "", "uncertain": " ?", "does not fit": " no"}


@dataclass(frozen=True, slots=True)
class Row:
    """A strategy on a number of GPUs: memory and time as far as known, problems that prevent it, and disabled parts of
    `measure`."""

    launch: Launch
    memory: MemoryEstimate | None
    time: DurationEstimate | None
    problems: tuple[str, ...]
    switched_off: str = ""

    @property
    def strategy(self) -> str:
        return self.launch.strategy

    @property
    def gpus(self) -> int:
        return self.launch.gpus

    @property
    def name(self) -> str:
        return shared_how(self.launch)


def rows(
    spec: Experiment, gpu: Gpu | float, most: int, store: RunHistory, config: dict[str, Any] | None, total: float | None
) -> list[Row]:
    """Return a row for one GPU, and for each strategy on 2, 4, ... and `most` GPUs.

    The spec's offloading is kept if the strategy supports it."""
    mesh = {"tp+fsdp": 2 * (spec.launch.tp or 1)}
    pairs = [("none", 1), *((strategy, count) for strategy in STRATEGIES[1:] for count in counts(most)[1:]
                            if count >= max(fewest(strategy), mesh.get(strategy, 2)))]  # fmt: skip
    single = Way(on_gpus(spec, 1, "none"))
    ways = (single.on(on_gpus(spec, count, strategy, _offload(spec, strategy)).launch) for strategy, count in pairs)
    return [replace(_row(way, gpu, store, config, total), switched_off=switched_off(spec, way.spec)) for way in ways]


def _offload(spec: Experiment, strategy: str) -> str:
    known = strategies.STRATEGIES.get(strategy)
    return spec.launch.offload if known and spec.launch.offload in known.offloads else "none"


def _row(way: Way, gpu: Gpu | float, store: RunHistory, config: dict[str, Any] | None, total: float | None) -> Row:
    spec, launch, time = way.spec, way.spec.launch, None
    if why := problem(shape_of(spec.model, config), launch):
        return Row(launch, None, None, (why,))
    memory = estimate_memory(spec, gpu, config=config, total=total)
    if isinstance(gpu, Gpu):
        try:
            time = estimate_duration(spec, gpu, store, config=config)
        except SpecError:  # the memory is known
            time = None
    return Row(launch, memory, time, way.problems)


def as_text(spec: Experiment, name: str, table: Sequence[Row]) -> str:
    """Return two tables, with one line per strategy and one column per number of GPUs."""
    columns = sorted({row.gpus for row in table})
    headings = ["strategy", *(f">{count} GPUs" if count > 1 else ">1 GPU" for count in columns)]
    known = [row for row in table if not row.problems]
    memory = {(row.name, row.gpus): units.gibibytes(row.memory.device.expected) + _MARKS[row.memory.verdict]
              for row in known if row.memory}  # fmt: skip
    speeds = {(row.name, row.gpus): units.rate(row.time.tokens_per_s) for row in known if row.time}
    refused: dict[str, dict[str, None]] = {}
    fewest = {row.strategy: row for row in sorted(table, key=lambda row: -row.gpus) if row.problems}
    for row in fewest.values():  # the problem is the same on more GPUs
        for why in row.problems:
            refused.setdefault(why.removeprefix(f"{row.strategy}: "), {})[row.strategy] = None

    def cells(texts: Mapping[tuple[str, int], str]) -> list[list[str]]:
        names = dict.fromkeys(name for name, _ in texts)
        return [[name, *(texts.get((name, count), "") for count in columns)] for name in names]

    lines = [
        f"{spec.model.id}, {spec.method.name}, batch {spec.train.batch_size} per GPU, on {name}",
        "", "GiB per GPU, expected (`?` may not fit, `no` does not)", text_table(headings, cells(memory)),
        *_confirmed(dict.fromkeys(row.strategy for row in known if row.memory)),
        *(["", "real tokens per second of all GPUs", text_table(headings, cells(speeds))] if speeds else []),
        *_factors(table),
        *_without(known),
        *(["", "not supported:"] if refused else []),
        *(folded(f"{', '.join(names)}: {why}") for why, names in refused.items()),
    ]  # fmt: skip
    return "\n".join(lines)


def _confirmed(names: Iterable[str]) -> list[str]:
    """Return the strategies with memory estimates that runs confirm, and the margin of the others."""
    seen = [name for name in names if name in constants().strategies]
    unseen = [name for name in names if name not in ("none", *seen)]
    more = f"{', '.join(unseen)}, which may take {units.percent(SHARDED_SPREAD, 0)} more" if unseen else ""
    return _sentence({"confirmed by runs: ": ", ".join(seen), "not confirmed by runs: ": more})


def _factors(table: Sequence[Row]) -> list[str]:
    """Return which speeds were measured, and the largest factor between estimate and range of the others."""
    known = [(row, row.time) for row in table if row.time and not row.problems]
    measured = [f"{row.strategy} on {units.some(row.gpus, 'GPU')}" for row, time in known if time.basis == MEASURED]
    largest: dict[str, float] = {}
    for row, time in known:
        if time.basis != MEASURED:
            factor = float(f"{time.step_s.high / time.step_s.expected:.3g}")
            largest[row.strategy] = max(factor, largest.get(row.strategy, 1.0))
    alike: dict[str, list[str]] = {}
    for strategy, factor in sorted(largest.items(), key=lambda pair: pair[1]):
        alike.setdefault(f"{factor:g}", []).append(strategy)
    within = ", ".join(f"{factor} ({', '.join(names)})" for factor, names in alike.items())
    return _sentence({"measured: ": ", ".join(measured), "estimated within a factor of ": within})


def _without(known: Iterable[Row]) -> list[str]:
    """Return which strategies do not support other parts of the spec."""
    by_what = grouped_by((row for row in known if row.switched_off), lambda row: row.switched_off)
    names = {what: ", ".join(dict.fromkeys(row.strategy for row in rows)) for what, rows in by_what.items()}
    return [line for what in names for line in _sentence({f"without {what}: ": names[what]})]


def _sentence(parts: Mapping[str, str]) -> list[str]:
    """Return the non-empty parts after their words, as one line."""
    return [folded(text)] if (text := "; ".join(words + what for words, what in parts.items() if what)) else []


def as_document(spec: Experiment, name: str, table: Sequence[Row]) -> str:
    """Return the document for --json: sizes in GiB, times in seconds."""
    records = [
        {
            "strategy": row.strategy, "gpus": row.gpus, "offload": row.launch.offload, "problems": list(row.problems),
            "left_out": row.switched_off,
            "device": None if row.memory is None else asdict(row.memory.device),
            "verdict": None if row.memory is None else row.memory.verdict,
            "parts": None if row.memory is None else row.memory.parts,
            "step_s": None if row.time is None else asdict(row.time.step_s),
            "exposed_s": None if row.time is None else row.time.exposed_s,
            "tokens_per_s": None if row.time is None else row.time.tokens_per_s,
            "basis": None if row.time is None else row.time.basis,
            "memory_measured": row.gpus == 1 or row.strategy in constants().strategies,
        }
        for row in table
    ]  # fmt: skip
    return json.dumps({"schema": 1, "model": spec.model.id, "gpu": name, "strategies": records})

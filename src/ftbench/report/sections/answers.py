"""The questions of the founding study, answered from any runs: how much is trained in a night, how memory goes, which
batch fits, what is trained, what the model says before and after. Each answer is a section, left out where no run can
tell."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ftbench.core import units
from ftbench.core.stats import quantile
from ftbench.report.compare.pairs import in_order
from ftbench.report.data.curves import read_columns
from ftbench.report.data.groups import HEADINGS, PEAK, SAMPLES, TOKENS, Cell, Run, first_of, shown, who
from ftbench.report.data.layout import known
from ftbench.report.render.document import Section
from ftbench.report.render.tables import Table
from ftbench.report.sections import generations
from ftbench.store.rundir import read_json

NIGHT_H = 8.0
_BEFORE = ("import", "prepare_data", "load", "setup")  # weights are made once on a machine


def answers(cells: Sequence[Cell], hours: float = NIGHT_H, *, curves: bool = True) -> list[Section]:
    """Every answer that these cells can give; `curves` with memory and time over progress, which reads every step."""
    parts = [night(cells, hours), frontier(cells), memory(cells) if curves else None, trained(cells)]
    parts += [generations.generations(cells)]
    return [part for part in parts if part is not None]


# --- a night ---------------------------------------------------------------------------------------------------------


def night(cells: Sequence[Cell], hours: float = NIGHT_H) -> Section | None:
    """Samples an hour at steady speed, and in `hours` from the start of the process: what is spent before the first
    step and until speed is steady is taken off, and what those first steps train is not counted."""
    records = []
    for cell in cells:
        rate = cell.figure(SAMPLES)
        if rate is None:
            continue
        start = max((_start_s(run) for run in cell.ok), default=0.0)
        left = max(0.0, hours * 3600 - start)
        tokens = cell.figure(TOKENS)
        records.append({
            **who(cell), "samples_per_hour": rate * 3600, "start_s": start, "hours": hours,
            "samples": rate * left, "real_tokens": None if tokens is None else tokens * left,
        })  # fmt: skip
    if not records:
        return None
    label = f"in {hours:g} h"
    headings = [*HEADINGS, "samples/h", "start", f"samples {label}", f"tokens {label}"]
    rows = [
        [*shown(record), units.rate(record["samples_per_hour"]), units.seconds(record["start_s"]),
         units.count(record["samples"]), _millions(record["real_tokens"])]
        for record in records
    ]  # fmt: skip
    return Section(
        "night", f"Samples an hour and in {hours:g} hours", Table({}, headings, rows, [], HEADINGS), (), records
    )


def _start_s(run: Run) -> float:
    names = [f"phases_s.{name}" for name in _BEFORE]
    return sum(value for name in (*names, "time_to_steady_s") for value in known([run.record], name))


def _millions(tokens: float | None) -> str:
    return "" if tokens is None else f"{tokens / 1e6:,.1f} M"


# --- memory and time over progress -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Series:
    """One run over its progress (0 to 1), a value a step: seconds elapsed, and GiB allocated, reserved and at the
    step's peak; NaN is unknown."""

    run_id: str
    label: str
    progress: list[float]
    elapsed_s: list[float]
    allocated_gb: list[float]
    reserved_gb: list[float]
    peak_gb: list[float]


_SERIES = ("progress_ratio", "elapsed_time_sec", "memory_allocated_gb", "memory_reserved_gb", "peak_memory_gb")


def series(run: Run, label: str) -> Series | None:
    """The curves of a run; None for one without a step that knows its progress."""
    found = read_columns(run.dir.steps, _SERIES)
    columns = [found.get(name, []) for name in _SERIES]
    keep = [i for i, share in enumerate(columns[0]) if share == share]
    if not keep:
        return None
    return Series(run.run_id, label, *([column[i] for i in keep] for column in columns))


def memory(cells: Sequence[Cell]) -> Section | None:
    """For the first run of each cell that ended well: GiB allocated and reserved halfway (the median step) and at
    their highest, the highest peak, and seconds until a quarter, half and all of the steps."""
    records = []
    for cell in cells:
        found = series(cell.ok[0], cell.name) if cell.ok else None
        if found is not None:
            records.append(who(cell) | _over_progress(found))
    if not records:
        return None
    gib = ("allocated_gb", "reserved_gb", "peak_gb")
    times = ("elapsed_25_s", "elapsed_50_s", "elapsed_100_s")
    headings = [*HEADINGS, "allocated", "reserved", "peak", "at 25 %", "at 50 %", "at the end"]
    rows = [
        [*shown(r), *(units.gibibytes(r[name]) for name in gib), *(units.seconds(r[name]) for name in times)]
        for r in records
    ]
    words = ("GiB allocated and reserved at the end of the median step, peak within a step; "
             "time from the first step on.",)  # fmt: skip
    return Section("memory", "Memory and time over progress", Table({}, headings, rows, [], HEADINGS), words, records)


def _over_progress(found: Series) -> dict[str, float | None]:
    def middle(values: Sequence[float]) -> float | None:
        finite = [value for value in values if value == value]
        return quantile(finite, 0.5) if finite else None

    def at(share: float) -> float | None:
        reached = (s for p, s in zip(found.progress, found.elapsed_s, strict=True) if p >= share and s == s)
        return next(reached, None)

    def highest(values: Iterable[float]) -> float | None:
        return max((value for value in values if value == value), default=None)

    return {
        "allocated_gb": middle(found.allocated_gb), "reserved_gb": middle(found.reserved_gb),
        "reserved_max_gb": highest(found.reserved_gb), "peak_gb": highest(found.peak_gb),
        "elapsed_25_s": at(0.25), "elapsed_50_s": at(0.5), "elapsed_100_s": at(1.0),
    }  # fmt: skip


# --- which batch fits ------------------------------------------------------------------------------------------------


def frontier(cells: Sequence[Cell]) -> Section | None:
    """Method × GPU against batch: the peak in GiB where it fits, `oom` or another end where it does not. Needs two
    batches, or one that did not fit."""
    spots: dict[tuple[str, ...], dict[str, list[Cell]]] = {}
    for cell in cells:
        named = who(cell)
        spots.setdefault(tuple(shown(named)[:-1]), {}).setdefault(str(named["batch"]), []).append(cell)
    batches = in_order("train.batch_size", (batch for line in spots.values() for batch in line))
    if len(batches) < 2 and all(cell.ok for cell in cells):
        return None
    headings = [*HEADINGS[:-1], *batches, "fits"]
    rows, records = [], []
    for names, line in spots.items():
        fitting = [batch for batch in batches if any(cell.ok for cell in line.get(batch, []))]
        rows.append([*names, *(_spot(line.get(batch, [])) for batch in batches), fitting[-1] if fitting else "none"])
        found = [cell for batch in batches for cell in line.get(batch, [])]
        records += [who(cell) | {"state": cell.state, "peak_gb": cell.figure(PEAK)} for cell in found]
    words = ("Columns are batch sizes: peak GiB of tensors where it fits.",)
    return Section("frontier", "Which batch fits", Table({}, headings, rows, [], HEADINGS[:-1]), words, records)


def _spot(cells: Sequence[Cell]) -> str:
    peaks = [peak for cell in cells if (peak := cell.figure(PEAK)) is not None]
    failed = list(dict.fromkeys(str(run.record["state"]) for cell in cells for run in cell.runs if not run.ok))
    shown = [units.gibibytes(max(peaks))] if peaks else ["fits"] if any(cell.ok for cell in cells) else []
    return " / ".join([*shown, *failed])


# --- what is trained -------------------------------------------------------------------------------------------------


def trained(cells: Sequence[Cell]) -> Section | None:
    """Trainable parameters per module kind, a row for each way of training."""
    found: dict[tuple[str, ...], dict[str, int]] = {}
    for cell in cells:
        by_kind = first_of(cell, _by_kind)
        if by_kind:
            facts = cell.facts
            model = facts.get("model.id", "").rsplit("/", 1)[-1]
            found.setdefault((model, facts.get("method.name", ""), facts.get("method.rank", "")), by_kind)
    kinds = [kind for kind in dict.fromkeys(k for line in found.values() for k in line)
             if any(line.get(kind) for line in found.values())]  # fmt: skip
    if not kinds:
        return None
    headings = ["model", "method", "rank", *kinds, "all"]
    rows = [
        [*way, *(units.parameters(line.get(kind)) for kind in kinds), units.parameters(sum(line.values()))]
        for way, line in found.items()
    ]
    records = [dict(zip(("model", "method", "rank"), way, strict=True)) | line for way, line in found.items()]
    return Section(
        "trained", "Trained parameters by kind of module", Table({}, headings, rows, [], ("model",)), (), records
    )


def _by_kind(run: Run) -> dict[str, int]:
    parameters = read_json(run.dir.applied).get("parameters")
    kinds = parameters.get("by_kind") if isinstance(parameters, dict) else None
    lines = kinds.items() if isinstance(kinds, dict) else ()
    return {kind: line["trainable"] for kind, line in lines
            if isinstance(line, dict) and isinstance(line.get("trainable"), int)}  # fmt: skip

"""The questions of the founding study, answered from any runs: how much is trained in a night, how memory goes, which
batch fits, what is trained, what the model says before and after. Each answer is a section, left out where no run can
tell."""

from __future__ import annotations

from collections.abc import Sequence

from ftbench.core import units
from ftbench.core.stats import quantile
from ftbench.report.data.axes import in_order
from ftbench.report.data.collect import known
from ftbench.report.data.groups import HEADINGS, PEAK, SAMPLES, TOKENS, Cell, Run, first_of, shown, who
from ftbench.report.render.document import Section, Table
from ftbench.report.sections import generations
from ftbench.report.sections.cost import NIGHT_H
from ftbench.store.rundir import read_json
from ftbench.store.steps import read_columns

_BEFORE = ("import", "prepare_data", "load", "setup")  # weights are made once on a machine


def answers(cells: Sequence[Cell], hours: float = NIGHT_H, *, curves: bool = True) -> list[Section]:
    """Return every answer that these cells can give; `curves` with memory and time over progress, which reads every
    step."""
    parts = [night(cells, hours), frontier(cells), memory(cells) if curves else None, trained(cells),
             generations.generations(cells)]  # fmt: skip
    return [part for part in parts if part is not None]


# --- a night ---------------------------------------------------------------------------------------------------------


def night(cells: Sequence[Cell], hours: float = NIGHT_H) -> Section | None:
    """Return samples an hour at steady speed, and in `hours` from the start of the process: what is spent before the
    first step and until speed is steady is taken off, and what those first steps train is not counted. Samples are real
    tokens over the mean length of the data."""
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
    words = ("Samples are real tokens over the mean length of the data.",)
    title = f"Samples an hour and in {hours:g} hours"
    return Section("night", title, Table({}, headings, rows, [], HEADINGS), words, records)


def _start_s(run: Run) -> float:
    names = [f"phases_s.{name}" for name in _BEFORE]
    return sum(value for name in (*names, "time_to_steady_s") for value in known([run.record], name))


def _millions(tokens: float | None) -> str:
    return "" if tokens is None else f"{tokens / 1e6:,.1f} M"


# --- memory and time over progress -----------------------------------------------------------------------------------


_COLUMNS = ("progress_ratio", "elapsed_time_sec", "memory_allocated_gb", "memory_reserved_gb", "peak_memory_gb")


def memory(cells: Sequence[Cell]) -> Section | None:
    """Return, for the first run of each cell that ended well, GiB allocated and reserved halfway (the median step) and
    at their highest, the highest peak, and seconds until a quarter, half and all of the steps."""
    records = [
        who(cell) | progress for cell in cells if cell.ok and (progress := _over_progress(cell.ok[0])) is not None
    ]
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


def _over_progress(run: Run) -> dict[str, float | None] | None:
    """Return memory and time of a run over its progress; None for one without a step that knows its progress."""
    columns = read_columns(run.dir.steps, _COLUMNS)
    rows = [row for row in zip(*columns.values(), strict=True) if row[0] is not None and row[0] == row[0]]
    if not rows:
        return None
    allocated, reserved, peak = ([gib for row in rows if (gib := row[column]) is not None] for column in (2, 3, 4))

    def at(share: float) -> float | None:
        return next((row[1] for row in rows if (row[0] or 0.0) >= share and row[1] is not None), None)

    return {
        "allocated_gb": quantile(allocated, 0.5) if allocated else None,
        "reserved_gb": quantile(reserved, 0.5) if reserved else None,
        "reserved_max_gb": max(reserved, default=None), "peak_gb": max(peak, default=None),
        "elapsed_25_s": at(0.25), "elapsed_50_s": at(0.5), "elapsed_100_s": at(1.0),
    }  # fmt: skip


# --- which batch fits ------------------------------------------------------------------------------------------------


def frontier(cells: Sequence[Cell]) -> Section | None:
    """Return each way of training × GPU against batch: the peak in GiB where it fits, `oom` or another end where it
    does not. Needs two batches, or one that did not fit."""
    lines: dict[tuple[str, ...], dict[str, Cell]] = {}
    for cell in cells:
        texts = shown(who(cell))
        lines.setdefault(tuple(texts[:-1]), {})[texts[-1]] = cell
    batches = in_order("train.batch_size", (batch for line in lines.values() for batch in line))
    if len(batches) < 2 and all(cell.ok for cell in cells):
        return None
    rows, records = [], []
    for names, line in lines.items():
        fitting = [batch for batch in batches if batch in line and line[batch].ok]
        rows.append([*names, *(_spot(line.get(batch)) for batch in batches), fitting[-1] if fitting else "none"])
        tried = [line[batch] for batch in batches if batch in line]
        records += [who(cell) | {"state": cell.state, "peak_gb": cell.figure(PEAK)} for cell in tried]
    headings = [*HEADINGS[:-1], *batches, "fits"]
    words = ("Columns are batch sizes: peak GiB of tensors where it fits.",)
    return Section("frontier", "Which batch fits", Table({}, headings, rows, [], HEADINGS[:-1]), words, records)


def _spot(cell: Cell | None) -> str:
    if cell is None:
        return ""
    peaks = cell.values(PEAK)
    failed = dict.fromkeys(str(run.record["state"]) for run in cell.runs if not run.ok)
    return " / ".join([*([units.gibibytes(max(peaks))] if peaks else ["fits"] if cell.ok else []), *failed])


# --- what is trained -------------------------------------------------------------------------------------------------


def trained(cells: Sequence[Cell]) -> Section | None:
    """Return trainable parameters per module kind, a row for each way of training."""
    trainable: dict[tuple[str, ...], dict[str, int]] = {}
    for cell in cells:
        by_kind = first_of(cell, _by_kind)
        if by_kind:
            facts = cell.facts
            model = facts.get("model.id", "").rsplit("/", 1)[-1]
            trainable.setdefault((model, facts.get("method.name", ""), facts.get("method.rank", "")), by_kind)
    kinds = [kind for kind in dict.fromkeys(k for line in trainable.values() for k in line)
             if any(line.get(kind) for line in trainable.values())]  # fmt: skip
    if not kinds:
        return None
    headings = ["model", "method", "rank", *kinds, "all"]
    rows = [
        [*way, *(units.parameters(line.get(kind)) for kind in kinds), units.parameters(sum(line.values()))]
        for way, line in trainable.items()
    ]
    records = [dict(zip(("model", "method", "rank"), way, strict=True)) | line for way, line in trainable.items()]
    return Section(
        "trained", "Trained parameters by kind of module", Table({}, headings, rows, [], ("model",)), (), records
    )


def _by_kind(run: Run) -> dict[str, int]:
    parameters = read_json(run.dir.applied).get("parameters")
    kinds = parameters.get("by_kind") if isinstance(parameters, dict) else None
    lines = kinds.items() if isinstance(kinds, dict) else ()
    return {kind: line["trainable"] for kind, line in lines
            if isinstance(line, dict) and isinstance(line.get("trainable"), int)}  # fmt: skip

"""What the page shows of each run: the frame and the comparison table, joined row by row."""

from __future__ import annotations

import dataclasses
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ftbench.core.redact import redact
from ftbench.report.render.tables import CONTEXT, FIGURES, Table
from ftbench.store.summary import PROFILED

if TYPE_CHECKING:
    import pandas as pd

NUMBERS = {
    "step": "step_time_s.median",
    "samples": "samples_per_hour",
    "tokens": "tokens_per_s.real",
    "peak": "memory_gb.allocated_peak",
    "energy": "energy.joules_per_1k_samples",
    "mfu": "mfu",
}
_SORTED_BY = {column.heading: column.source for column in FIGURES}
_TURNING = dict.fromkeys((0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)))


@dataclass(frozen=True, slots=True)
class Run:
    """A run as the page's sections see it. `cells` are the texts of its row, `order` what each sorts by (None: its
    text), `values` its NUMBERS where it ended well and they are known, `interval` the 95 % interval of its median step
    in seconds, `place` the varying things that name it."""

    run_id: str
    label: str
    workload: str
    gpu: str
    method: str
    batch: int
    accumulation: int
    optimizations: str
    state: str
    reason: str
    warnings: tuple[str, ...]
    values: dict[str, float]
    interval: tuple[float, float] | None
    steady: int
    cells: tuple[str, ...]
    order: tuple[float | None, ...]
    record: Mapping[str, Any]

    @property
    def profiled(self) -> bool:
        """Whether its steps were recorded, so that their times are no measurement."""
        return PROFILED in self.warnings


@dataclass(frozen=True, slots=True)
class View:
    """All runs, with the headings of their cells, what they share, and the notes below."""

    runs: list[Run]
    headings: list[str]
    context: dict[str, str]
    notes: list[str]
    footnote: str

    @property
    def workloads(self) -> list[str]:
        """Model, weights and data, that of most runs first: only runs that share these are compared."""
        return [name for name, _ in Counter(run.workload for run in self.runs).most_common()]

    def of(self, workload: str) -> list[Run]:
        return [run for run in self.runs if run.workload == workload]


def view(frame: pd.DataFrame, table: Table, footnote: str) -> View:
    """The frame's rows and the table's are the same runs in the same order. Text is free of secrets; the state stands
    before the figures, so that a row without figures says why."""
    table = _state_first(clean(table))
    records = frame.to_dict("records")
    labels = _labels(table, records)
    runs = [
        _run({str(key): value for key, value in record.items()}, table, row, label)
        for record, row, label in zip(records, table.rows, labels, strict=True)
    ]
    return View(runs, table.headings, table.context, table.notes, footnote)


@lru_cache(maxsize=65536)
def secretless(text: str) -> str:
    """Text that may leave the machine, and reads in the order in which it is written."""
    return redact(text.translate(_TURNING), os.environ)[0]


def clean(table: Table) -> Table:
    """A table without secrets in any of its texts."""
    context = {secretless(key): secretless(value) for key, value in table.context.items()}
    rows = [list(map(secretless, map(str, row))) for row in table.rows]
    headings, notes = list(map(secretless, table.headings)), list(map(secretless, table.notes))
    return dataclasses.replace(table, context=context, headings=headings, rows=rows, notes=notes)


def _state_first(table: Table) -> Table:
    figures = [place for place, heading in enumerate(table.headings) if heading in _SORTED_BY]
    if not figures or "state" not in table.headings:
        return table
    order = [place for place, heading in enumerate(table.headings) if heading != "state"]
    order.insert(order.index(figures[0]), table.headings.index("state"))
    headings, rows = [table.headings[i] for i in order], [[row[i] for i in order] for row in table.rows]
    return dataclasses.replace(table, headings=headings, rows=rows)


def _run(record: dict[str, Any], table: Table, row: Sequence[str], label: str) -> Run:
    shown = dict(zip(table.headings, row, strict=True))
    context = {name: table.context.get(heading, shown.get(heading, "")) for name, heading in CONTEXT.items()}
    ok = record["state"] == "ok" and PROFILED not in record["warnings"]
    found = {name: number(record.get(source)) for name, source in NUMBERS.items()}
    interval = record.get("step_time_s.ci95")
    reason = record.get("reason")
    return Run(
        run_id=secretless(str(record["run_id"])),
        label=label,
        workload=", ".join(filter(None, (context["model"], f"{context['weights']} weights", context["data"]))),
        gpu=context["gpu"],
        method=secretless(str(record["method"])),
        batch=int(number(record["batch_size"]) or 0),
        accumulation=int(number(record["gradient_accumulation_steps"]) or 1),
        optimizations=context["optimizations"],
        state=str(record["state"]),
        reason=secretless(reason) if isinstance(reason, str) else "",
        warnings=tuple(secretless(str(warning)) for warning in record["warnings"]),
        values={name: value for name, value in found.items() if ok and value is not None},
        interval=(interval[0], interval[1]) if ok and isinstance(interval, (list, tuple)) else None,
        steady=int(number(record.get("steps.steady")) or 0),
        cells=tuple(row),
        order=tuple(_order(record, heading, text) for heading, text in zip(table.headings, row, strict=True)),
        record=record,
    )


def number(value: Any) -> float | None:
    """A finite number, or None."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _order(record: Mapping[str, Any], heading: str, text: str) -> float | None:
    if heading in _SORTED_BY:
        return number(record.get(_SORTED_BY[heading])) if text else None
    try:
        return float(text.partition("x")[0].replace(",", ""))
    except ValueError:
        return None


def _labels(table: Table, records: Sequence[Mapping[Any, Any]]) -> list[str]:
    """What names a run among the others: the cells before its first figure; its run id where that is not enough."""
    figures = {*_SORTED_BY, "state"}
    named = [i for i, heading in enumerate(table.headings) if heading not in figures]
    texts = [
        ", ".join(
            f"{table.headings[i]} {row[i]}" if table.headings[i] in ("batch", "with") else row[i]
            for i in named
            if row[i] and not (table.headings[i] == "with" and row[i] == "none")
        )
        for row in table.rows
    ]
    count: dict[str, int] = {}
    for text in texts:
        count[text] = count.get(text, 0) + 1
    return [
        text if count[text] == 1 else f"{text} ({secretless(str(record['run_id']))})"
        for text, record in zip(texts, records, strict=True)
    ]

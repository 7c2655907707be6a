"""What the page shows of each run: the records and the table of runs, joined row by row."""

from __future__ import annotations

import dataclasses
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ftbench.core.redact import redact
from ftbench.report.data.collect import Record
from ftbench.report.data.groups import Cell, Run, cells_of, runs_of
from ftbench.report.render.document import Table
from ftbench.report.render.runs_table import CONTEXT, FIGURES
from ftbench.store.summary import PROFILED

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
class RunRow:
    """A run as the page's sections see it. `cell` is the group of repeats that it belongs to, `label` its name among
    all runs; `cells` are the texts of its row, `order` what each sorts by (None: its text), `values` its NUMBERS where
    it ended well and they are known."""

    cell: Cell
    label: str
    workload: str
    gpu: str
    state: str
    reason: str
    warnings: tuple[str, ...]
    values: dict[str, float]
    interval: tuple[float, float] | None
    cells: tuple[str, ...]
    order: tuple[float | None, ...]
    record: Record

    @property
    def run_id(self) -> str:
        return secretless(str(self.record["run_id"]))

    @property
    def profiled(self) -> bool:
        """Whether its steps were recorded, so that their times are no measurement."""
        return PROFILED in self.warnings


@dataclass(frozen=True, slots=True)
class View:
    """All runs, with the headings of their cells, what they share, and the notes below."""

    rows: list[RunRow]
    headings: list[str]
    context: dict[str, str]
    notes: list[str]
    footnote: str

    @property
    def workloads(self) -> list[str]:
        """Model, weights and data, that of most runs first: only runs that share these are compared."""
        return [name for name, _ in Counter(row.workload for row in self.rows).most_common()]

    def cells_of(self, workload: str) -> list[Cell]:
        """Return the groups of repeats of a workload, in the order of their first, without profiled runs."""
        rows = (row for row in self.rows if row.workload == workload and not row.profiled)
        return list({id(row.cell): row.cell for row in rows}.values())


def view(records: Sequence[Record], table: Table, footnote: str) -> View:
    """Return the records and the rows of their table, which are the same runs in the same order. Text is free of
    secrets; the state stands before the figures, so that a row without figures says why."""
    table = _state_first(clean(table))
    apart: dict[bool, list[Run]] = {False: [], True: []}  # profiled runs are of specs of their own, and no measurement
    for run in runs_of(records):
        apart[PROFILED in run.record["warnings"]].append(run)
    groups = [*cells_of(apart[False]), *cells_of(apart[True])]
    cells = {run.record["path"]: cell for cell in groups for run in cell.runs}
    labels = _labels([cells[record["path"]] for record in records], records)
    rows = [
        _row(record, cells[record["path"]], label, table, texts)
        for record, label, texts in zip(records, labels, table.rows, strict=True)
    ]
    return View(rows, table.headings, table.context, table.notes, footnote)


@lru_cache(maxsize=65536)
def secretless(text: str) -> str:
    """Return text that may leave the machine, and reads in the order in which it is written."""
    return redact(text.translate(_TURNING), os.environ)[0]


def clean(table: Table) -> Table:
    """Return a table without secrets in any of its texts."""
    context = {secretless(key): secretless(value) for key, value in table.context.items()}
    rows = [list(map(secretless, map(str, row))) for row in table.rows]
    headings, notes = list(map(secretless, table.headings)), list(map(secretless, table.notes))
    return dataclasses.replace(table, context=context, headings=headings, rows=rows, notes=notes)


def _state_first(table: Table) -> Table:
    figures = [column for column, heading in enumerate(table.headings) if heading in _SORTED_BY]
    if not figures or "state" not in table.headings:
        return table
    order = [column for column, heading in enumerate(table.headings) if heading != "state"]
    order.insert(order.index(figures[0]), table.headings.index("state"))
    headings, rows = [table.headings[i] for i in order], [[row[i] for i in order] for row in table.rows]
    return dataclasses.replace(table, headings=headings, rows=rows)


def _row(record: Record, cell: Cell, label: str, table: Table, texts: Sequence[str]) -> RunRow:
    shown = dict(zip(table.headings, texts, strict=True))
    context = {name: table.context.get(heading, shown.get(heading, "")) for name, heading in CONTEXT.items()}
    ok = record["state"] == "ok" and PROFILED not in record["warnings"]
    values = {name: value for name, source in NUMBERS.items() if (value := number(record.get(source))) is not None}
    interval, reason = record.get("step_time_s.ci95"), record.get("reason")
    return RunRow(
        cell=cell,
        label=label,
        workload=", ".join(filter(None, (context["model"], f"{context['weights']} weights", context["data"]))),
        gpu=context["gpu"],
        state=str(record["state"]),
        reason=secretless(reason) if isinstance(reason, str) else "",
        warnings=tuple(secretless(str(warning)) for warning in record["warnings"]),
        values=values if ok else {},
        interval=(interval[0], interval[1]) if ok and isinstance(interval, (list, tuple)) else None,
        cells=tuple(texts),
        order=tuple(_order(record, heading, text) for heading, text in zip(table.headings, texts, strict=True)),
        record=record,
    )


def number(value: Any) -> float | None:
    """Return a finite number, or None."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _order(record: Mapping[str, Any], heading: str, text: str) -> float | None:
    if heading in _SORTED_BY:
        return number(record.get(_SORTED_BY[heading])) if text else None
    try:
        return float(text.partition("x")[0].replace(",", ""))
    except ValueError:
        return None


def _labels(cells: Sequence[Cell], records: Sequence[Record]) -> list[str]:
    """Return what names a run among the others: its cell's name, with its workload and GPU where these vary, and its
    run id where the cell has several runs."""
    places = {(*cell.workload[::2], cell.facts["gpu"]) for cell in cells}
    varying = [i for i in range(3) if len({labels[i] for labels in places}) > 1]
    texts = []
    for cell, record in zip(cells, records, strict=True):
        labels = (cell.workload[0].rsplit("/", 1)[-1], cell.workload[2], cell.facts["gpu"])
        text = ", ".join([*(labels[i] for i in varying), cell.name])
        texts.append(secretless(f"{text} ({record['run_id']})" if len(cell.runs) > 1 else text))
    return texts

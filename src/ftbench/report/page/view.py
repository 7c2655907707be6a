"""What the page shows of each run: the records and the table of runs, joined row by row."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ftbench.report.data.collect import Record
from ftbench.report.data.groups import Cell, Run, cells_of, runs_of
from ftbench.report.render.document import Report
from ftbench.report.render.runs_table import CONTEXT, FIGURES, NAME, runs_table
from ftbench.store.summary import PROFILED

NUMBERS = {
    "step": "step_time_s.median", "samples": "samples_per_hour", "tokens": "tokens_per_s.real",
    "peak": "memory_gb.allocated_peak", "energy": "energy.joules_per_1k_samples",
}  # fmt: skip
_SORTED_BY = {column.heading: column.source for column in FIGURES}


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run as the page's sections see it. `cell` is the group of repeats that it belongs to, `label` its name among
    all runs; `texts` are those of its row, `order` what each sorts by (None: its text)."""

    record: Record
    cell: Cell
    label: str
    workload: str
    gpu: str
    texts: Sequence[str]
    order: Sequence[float | None]

    @property
    def run_id(self) -> str:
        return str(self.record["run_id"])

    @property
    def state(self) -> str:
        return str(self.record["state"])

    @property
    def profiled(self) -> bool:
        """Whether its steps were recorded, so that their times are no measurement."""
        return PROFILED in self.record["warnings"]

    @property
    def values(self) -> dict[str, float]:
        """NUMBERS where it ended well and they are known."""
        if self.state != "ok" or self.profiled:
            return {}
        known = {name: number(self.record.get(source)) for name, source in NUMBERS.items()}
        return {name: value for name, value in known.items() if value is not None}

    @property
    def interval(self) -> tuple[float, float] | None:
        """Low and high end of the median step."""
        ends = self.record.get("step_time_s.ci95")
        return (ends[0], ends[1]) if self.values and isinstance(ends, (list, tuple)) else None


@dataclass(frozen=True, slots=True)
class View:
    """All runs, with the headings of their texts, what they share, and the notes below."""

    rows: list[RunRow]
    headings: list[str]
    context: str
    notes: list[str]

    @property
    def workloads(self) -> list[str]:
        """Model, weights and data, that of most runs first: only runs that share these are compared."""
        return [name for name, _ in Counter(row.workload for row in self.rows).most_common()]

    @property
    def in_words(self) -> list[bool]:
        """Whether a column sorts by its texts."""
        return [all(row.order[column] is None for row in self.rows) for column in range(len(self.headings))]

    def cells_of(self, workload: str) -> list[Cell]:
        """Return the groups of repeats of a workload, in the order of their first, without profiled runs."""
        rows = (row for row in self.rows if row.workload == workload and not row.profiled)
        return list({id(row.cell): row.cell for row in rows}.values())


def view(report: Report) -> View:
    """Return the records and the rows of their table, which are the same runs in the same order. The state stands
    before the figures, so that a row without figures says why."""
    records, table = report.records, runs_table(report.records, report.axes)
    shown_columns = [column for column, heading in enumerate(table.headings) if heading != NAME]
    order = sorted(shown_columns, key=lambda column: _column_order(table.headings[column]))
    headings = [table.headings[column] for column in order]
    apart: dict[bool, list[Run]] = {False: [], True: []}  # profiled runs are of specs of their own, and no measurement
    for run in runs_of(records):
        apart[PROFILED in run.record["warnings"]].append(run)
    groups = [*cells_of(apart[False]), *cells_of(apart[True])]
    by_path = {run.record["path"]: cell for cell in groups for run in cell.runs}
    cells = [by_path[record["path"]] for record in records]
    rows = []
    for record, cell, label, texts in zip(records, cells, _labels(cells, records), table.rows, strict=True):
        shown = dict(zip(table.headings, texts, strict=True))
        context = {name: table.context.get(heading, shown.get(heading, "")) for name, heading in CONTEXT.items()}
        workload = ", ".join(filter(None, (context["model"], f"{context['weights']} weights", context["data"])))
        own = [shown[heading] for heading in headings]
        sorts_by = [_order(record, heading, shown[heading]) for heading in headings]
        rows.append(RunRow(record, cell, label, workload, context["gpu"], own, sorts_by))
    return View(rows, headings, table.title, table.notes)


def _column_order(heading: str) -> int:
    return 1 if heading == "state" else 2 if heading in (*_SORTED_BY, "runs") else 0


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
    contexts = [(cell.workload[0].rsplit("/", 1)[-1], cell.workload[2], cell.facts["gpu"]) for cell in cells]
    varying = [i for i in range(3) if len({context[i] for context in contexts}) > 1]
    texts = [
        ", ".join([*(context[i] for i in varying), cell.name]) for context, cell in zip(contexts, cells, strict=True)
    ]
    return [
        f"{text} ({record['run_id']})" if len(cell.runs) > 1 else text
        for text, cell, record in zip(texts, cells, records, strict=True)
    ]

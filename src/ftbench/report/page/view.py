"""The runs of the page, and the columns of the table of all runs."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ftbench.report.data.axes import MOST_AXES, headings
from ftbench.report.data.cells import Cell, Run, number_of
from ftbench.report.data.collect import Record, long_reason, state_of
from ftbench.report.data.groups import cells_of, runs_of
from ftbench.report.document import Column, Report
from ftbench.report.runs_table import FIGURES, group_similar
from ftbench.store.summary import PROFILED


def number(value: Any) -> float | None:
    """Return a finite number, or None."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


@dataclass(frozen=True)
class RunRow:
    """A run on the page: its number in the table, and its cell."""

    number: int
    run: Run
    cell: Cell

    @property
    def record(self) -> Record:
        return self.run.record

    @property
    def run_id(self) -> str:
        return str(self.record["run_id"])

    @cached_property
    def folder(self) -> Path:
        return Path(str(self.record["path"]))

    @property
    def state(self) -> str:
        return str(self.record["state"])

    @property
    def profiled(self) -> bool:
        """Whether the run was profiled, so that its step times are not valid."""
        return PROFILED in self.record["warnings"]

    @property
    def rate(self) -> float:
        """Samples per hour, 0 if unknown."""
        return number(self.record.get("samples_per_hour")) or 0.0 if self.run.valid else 0.0

    @property
    def workload(self) -> str:
        model, weights, data = self.cell.workload
        return ", ".join(filter(None, (model.rsplit("/", 1)[-1], f"{weights} weights" if weights else "", data)))


@dataclass(frozen=True)
class RunColumn:
    """A column of the table of all runs: texts, and sort keys (None: sort by text)."""

    heading: str
    texts: Sequence[str]
    order: Sequence[float | None]

    @cached_property
    def in_words(self) -> bool:
        """Whether the column sorts by text."""
        return all(value is None for value in self.order)


@dataclass(frozen=True)
class View:
    """All runs of the page, the columns of their table, and what they have in common."""

    rows: list[RunRow]
    columns: list[RunColumn]
    context: str

    @cached_property
    def by_path(self) -> dict[str, RunRow]:
        return {str(row.record["path"]): row for row in self.rows}

    @cached_property
    def notes(self) -> list[tuple[str, list[RunRow]]]:
        """The warnings and long failure reasons, each once with its runs, the most frequent first.

        Sentences that differ only in figures are shown once.
        """
        sentences = [(text, row) for row in self.rows
                for text in filter(None, [long_reason(row.record), *map(str, row.record["warnings"])])]  # fmt: skip
        kinds = group_similar(sentences)
        notes = [(f"{text} (others: similar)" if others else text, own + others) for text, own, others in kinds]
        return sorted(notes, key=lambda note: -len(note[1]))


def view(report: Report) -> View:
    """Return the records of a report as rows, in their order."""
    runs = runs_of(report.records)
    by_path = {run.record["path"]: cell for cell in cells_of(runs) for run in cell.runs}
    rows = [
        RunRow(int(number_of(run.record) or row_number), run, by_path[run.record["path"]])
        for row_number, run in enumerate(runs, start=1)
    ]
    shared = [*_only(row.workload for row in rows), *_only(str(row.cell.facts["gpu"]) for row in rows)]
    return View(rows, _columns(rows, report), ", on ".join(shared))


def _only(texts: Iterable[str]) -> list[str]:
    """Return a list with the shared text, or an empty list if the texts differ."""
    distinct = list(dict.fromkeys(texts))
    return distinct if len(distinct) == 1 else []


def _columns(rows: Sequence[RunRow], report: Report) -> list[RunColumn]:
    """Return the columns named on the command line, or the default ones.

    Defaults: name, state (unless all are ok), figures, varying settings.
    """
    if report.columns:
        return [_figures(column, [row.record for row in rows]) for column in report.columns]
    axes = report.axes
    columns = [_words("recipe", [row.cell.way for row in rows]), _counts("batch", [row.cell.batch for row in rows])]
    states = [state_of(row.record) for row in rows]
    columns += [_words("state", states)] if set(states) != {"ok"} else []
    ended_well = [row.record if row.state == "ok" else {} for row in rows]
    figures = (_figures(column, ended_well) for column in FIGURES)
    columns += [column for column in figures if not column.in_words]
    more = {"GPU": [str(row.cell.facts["gpu"]) for row in rows], "method": [str(row.record["method"]) for row in rows],
            "workload": [row.workload for row in rows]}  # fmt: skip
    columns += [_words(name, texts) for name, texts in more.items() if len(set(texts)) > 1]
    shown = {column.heading for column in columns}
    for key, heading in zip(axes[:MOST_AXES], headings(axes[:MOST_AXES]), strict=True):
        if heading not in shown:
            columns.append(_counts(heading, [str(row.record[key]) for row in rows]))
    return columns


def _figures(column: Column, records: Sequence[Record]) -> RunColumn:
    values = [record.get(column.source) for record in records]
    texts = ["" if value is None else column.text(value) for value in values]
    return RunColumn(column.heading, texts, [number(value) for value in values])


def _words(heading: str, texts: Sequence[str]) -> RunColumn:
    return RunColumn(heading, texts, [None] * len(texts))


def _counts(heading: str, texts: Sequence[str]) -> RunColumn:
    return RunColumn(heading, texts, [leading_number(text) for text in texts])


def leading_number(text: str) -> float | None:
    """Return the number at the start of a text such as `4x2`, or None."""
    try:
        return number(float(text.partition("x")[0].replace(",", "")))
    except ValueError:
        return None

"""Parts of a report whose table has a row for each record, under columns that say how a record becomes text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ftbench.report.data.axes import OPTIMIZATIONS, value_at
from ftbench.report.data.groups import Cell, Run
from ftbench.report.render.document import Section, Table

Record = dict[str, Any]
Columns = Mapping[str, Callable[[Record], str]]
HEADINGS = ("model", "GPU", "data", "trained by", "batch")


def section(
    key: str, title: str, records: Sequence[Record], columns: Columns, words: Sequence[str] = (), *,
    named: bool = True, text: Sequence[str] = (), notes: Sequence[str] = (), pictures: Sequence[str] = (),
) -> Section | None:  # fmt: skip
    """Return a part with a row for each record; None without records. `named` puts the names of a record's cell first;
    `text` are headings whose columns hold words."""
    if not records:
        return None
    headings = [*(HEADINGS if named else ()), *columns]
    rows = [
        [*(_names(record) if named else ()), *(text_of(record) for text_of in columns.values())] for record in records
    ]
    table = Table({}, headings, rows, list(notes), (*(HEADINGS if named else ()), *text))
    return Section(key, title, table, words, records, pictures)


def field(name: str, text: Callable[[Any], str] = str) -> Callable[[Record], str]:
    """Return how a field of a record becomes text."""
    return lambda record: text(record[name])


def first_of(cell: Cell, read: Callable[[Run], Any]) -> Any:
    """Return what the first of a cell's runs that has something has; None where none has."""
    return next((content for run in (*cell.ok, *cell.runs) if (content := read(run))), None)


def names_of(cell: Cell) -> Record:
    """Return what names a cell, as fields of a flat record."""
    facts = cell.facts
    return {
        "model": facts.get("model.id", ""), "gpu": facts["gpu"], "data": cell.runs[0].data, "name": cell.name,
        "trained_by": cell.way, "method": facts.get("method.name", ""), "with": value_at(OPTIMIZATIONS, facts) or "",
        "batch": facts.get("train.batch_size", ""), "run_ids": " ".join(run.run_id for run in cell.runs),
    }  # fmt: skip


def _names(record: Record) -> list[str]:
    model, batch = str(record["model"]).rsplit("/", 1)[-1], str(record["name"]).rpartition(" ")[2]
    return [model, *(str(record[name]) for name in ("gpu", "data", "trained_by")), batch]

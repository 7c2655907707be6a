"""Parts of a report whose table has a row for each record, under columns that say how a record becomes text."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ftbench.report.data.axes import OPTIMIZATIONS, value_at
from ftbench.report.data.groups import Cell, Run
from ftbench.report.data.names import number_of, row_names
from ftbench.report.render.document import Point, Section, table_of

Record = dict[str, Any]
Columns = Mapping[str, Callable[[Record], str]]
_CONTENDED = "contended"
SETTINGS = {"model": "model", "gpu": "GPU", "data": "data"}  # stand in the title where they are the same for all rows


def section(
    key: str, title: str, records: Sequence[Record], columns: Columns, words: Sequence[str] = (), *,
    named: bool = True, text: Sequence[str] = (), notes: Sequence[str] = (),
) -> Section | None:  # fmt: skip
    """Return a part with a row for each record; None without records. `named` puts the number and the name of a
    record's cell first, and behind the others where it ran, and how it ended where one ran beside other work; `text`
    are headings whose columns hold words."""
    if not records:
        return None
    cells = {heading: [text_of(record) for record in records] for heading, text_of in columns.items()}
    context: dict[str, str] = {}
    if named:
        context, before, behind = named_rows(records)
        if any(_CONTENDED in str(record.get("state")) for record in records):
            behind = {"state": [str(record["state"]) for record in records]} | behind
        cells = before | cells | behind
    return Section(key, title, table_of(cells, notes, text, context), words, records)


def named_rows(records: Sequence[Record]) -> tuple[dict[str, str], dict[str, list[str]], dict[str, list[str]]]:
    """Return what all records share of where they ran, the columns that name each, and those of what they do not."""
    settings = {name: [_setting(record, name) for record in records] for name in SETTINGS}
    shared = {SETTINGS[name]: texts[0] for name, texts in settings.items() if len(set(texts)) == 1}
    names = [
        (_setting(record, "model"), str(record["name"]), str(record["gpu"]), str(record["data"])) for record in records
    ]
    first = {"#": [number_of(record) for record in records], "name": row_names(names)}
    others = {SETTINGS[name]: texts for name, texts in settings.items() if SETTINGS[name] not in shared}
    return shared, {heading: texts for heading, texts in first.items() if any(texts)}, others


def _setting(record: Record, name: str) -> str:
    return str(record[name]).rsplit("/", 1)[-1] if name == "model" else str(record[name])


def field(name: str, text: Callable[[Any], str] = str, part: str | None = None) -> Callable[[Record], str]:
    """Return how a field of a record becomes text, or a part of one that has several."""
    return lambda record: text(record[name] if part is None else record[name].get(part))


def point(text: str, *cells: Cell, also: str = "") -> Point:
    """Return what the runs of some cells show."""
    return Point(text, tuple(str(run.record["path"]) for cell in cells for run in cell.runs), also)


def first_of(cell: Cell, read: Callable[[Run], Any]) -> Any:
    """Return what the first of a cell's runs that has something has; None where none has."""
    return next((content for run in sorted(cell.runs, key=lambda run: not run.ok) if (content := read(run))), None)


def names_of(cell: Cell) -> Record:
    """Return what names a cell, as fields of a flat record."""
    facts = cell.facts
    return {
        "model": facts.get("model.id", ""), "gpu": facts["gpu"], "data": cell.runs[0].data, "name": cell.name,
        "trained_by": cell.way, "method": facts.get("method.name", ""), "with": value_at(OPTIMIZATIONS, facts) or "",
        "batch": facts.get("train.batch_size", ""), "run_ids": " ".join(run.run_id for run in cell.runs),
        "number": cell.runs[0].record.get("number"), "state": cell.state,
    }  # fmt: skip

"""Build sections whose table has one row per record."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ftbench.report.data.axes import OPTIMIZATIONS, value_at
from ftbench.report.data.cells import Cell, number_of
from ftbench.report.data.names import row_names
from ftbench.report.document import Section, table_of

Record = dict[str, Any]
Columns = Mapping[str, Callable[[Record], str]]
_CONTENDED = "contended"
SETTINGS = {"model": "model", "gpu": "GPU", "data": "data"}  # in the title if all rows agree


def section(
    key: str, title: str, records: Sequence[Record], columns: Columns, words: Sequence[str] = (), *,
    named: bool = True, text: Sequence[str] = (), notes: Sequence[str] = (),
) -> Section | None:  # fmt: skip
    """Return a section with a row per record, or None without records.

    Args:
        key: name of the section for programs.
        title: heading.
        records: flat records, usually with the fields of `names_of`.
        columns: heading → function that formats a record.
        words: paragraphs.
        named: add columns with number, name, model, GPU and data, and the state if a run was contended.
        text: headings of left-aligned columns.
        notes: notes below the table.
    """
    if not records:
        return None
    cells = {heading: [text_of(record) for record in records] for heading, text_of in columns.items()}
    context: dict[str, str] = {}
    if named:
        context, before, after = named_rows(records)
        if any(_CONTENDED in str(record.get("state")) for record in records):
            after = {"state": [str(record["state"]) for record in records]} | after
        cells = before | cells | after
    return Section(key, title, table_of(cells, notes, text, context), words, records)


def named_rows(records: Sequence[Record]) -> tuple[dict[str, str], dict[str, list[str]], dict[str, list[str]]]:
    """Return the shared model, GPU and data, the columns that name each record, and the columns of varying settings."""
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
    """Return a function that formats a field of a record, or one `part` of a field that is a dict."""
    return lambda record: text(record[name] if part is None else record[name].get(part))


def names_of(cell: Cell) -> Record:
    """Return the fields of a flat record that identify a cell."""
    facts = cell.facts
    return {
        "model": facts.get("model.id", ""), "gpu": facts["gpu"], "data": cell.runs[0].data, "name": cell.name,
        "trained_by": cell.way, "method": facts.get("method.name", ""), "with": value_at(OPTIMIZATIONS, facts) or "",
        "batch": facts.get("train.batch_size", ""), "run_ids": " ".join(run.run_id for run in cell.runs),
        "number": cell.runs[0].record.get("number"), "state": cell.state,
    }  # fmt: skip

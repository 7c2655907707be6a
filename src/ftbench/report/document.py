"""Classes for the parts of a report before formatting: tables, sections, and the report."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ftbench.report.data.axes import OPTIMIZATIONS, value_at
from ftbench.report.data.cells import Cell, number_of
from ftbench.report.data.collect import Record
from ftbench.report.data.groups import row_names

_WORDS = ("name", "recipe", "model", "weights", "GPU", "data", "with", "method", "state", "where it fails", "note")
_CONTENDED = "contended"
_SETTINGS = {"model": "model", "gpu": "GPU", "data": "data"}  # in the title if all rows agree

ANSWER = "answer"  # the key of the section that a report begins with


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text.

    `context` has values that are equal in all rows, for the title. `notes` are shown below the table. The columns in
    `_WORDS` and in `text` are left-aligned, other columns right-aligned.
    """

    context: dict[str, str]
    headings: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)
    text: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """One line with the values that are equal in all rows."""
        shared = [(key, value) for key, value in self.context.items() if value]
        return " · ".join("without optimizations" if each == ("with", "none") else " ".join(each) for each in shared)

    @property
    def words(self) -> list[bool]:
        """One bool per column: True for words, False for numbers."""
        return [heading in (*_WORDS, *self.text) for heading in self.headings]


def table_of(
    columns: Mapping[str, Sequence[str]], notes: Sequence[str] = (), text: Sequence[str] = (),
    context: Mapping[str, str] | None = None,
) -> Table:  # fmt: skip
    """Return a table. `columns` maps each heading to the texts of its column."""
    rows = [list(row) for row in zip(*columns.values(), strict=True)]
    return Table(dict(context or {}), list(columns), rows, list(notes), tuple(text))


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table of runs. `source` is a field of a record. `text` is a function to format its values."""

    heading: str
    source: str
    text: Callable[[Any], str] = str
    more_is_better: bool = False


@dataclass(frozen=True, slots=True)
class Section:
    """One part of a report.

    `key` is the name of the section in JSON. `records` contain the values of the table as plain numbers (None if
    unknown). `left_out` has the number of ignored runs for each reason.
    """

    key: str
    title: str
    table: Table | None = None
    paragraphs: Sequence[str] = ()
    records: Sequence[dict[str, Any]] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Report:
    """A report before formatting.

    `axes` are record fields, one column each. If `runs` is true, the report includes the table of runs.
    """

    records: Sequence[dict[str, Any]]
    axes: Sequence[str] = ()
    sections: Sequence[Section] = ()
    runs: bool = True


# --- sections with a row per record ----------------------------------------------------------------------------------


def section(
    key: str, title: str, records: Sequence[Record], columns: Mapping[str, Callable[[Record], str]],
    words: Sequence[str] = (), text: Sequence[str] = (), notes: Sequence[str] = (),
) -> Section | None:  # fmt: skip
    """Return a section with one row per record, or None without records.

    The first columns are number and name. Model, GPU and data are in the title if all rows agree, otherwise in columns.
    If a run is contended (disturbed by other processes), the state has a column.

    Args:
        records: flat records with the fields of `names_of`. `key` is the name of the section in JSON.
        columns: {heading: function that returns the text of a record}.
        words: paragraphs of text.
        text: headings of left-aligned columns.
        notes: notes below the table.
    """
    if not records:
        return None
    settings = {heading: [str(record[name]) for record in records] for name, heading in _SETTINGS.items()}
    settings["model"] = [text.rsplit("/", 1)[-1] for text in settings["model"]]
    shared = {heading: texts[0] for heading, texts in settings.items() if len(set(texts)) == 1}
    names = [str(record["name"]) for record in records]
    rows = list(zip(settings["model"], names, settings["GPU"], settings["data"], strict=True))
    numbers = [number_of(record) for record in records]
    cells = ({"#": numbers} if any(numbers) else {}) | {"name": row_names(rows)}
    cells |= {heading: [text_of(record) for record in records] for heading, text_of in columns.items()}
    if any(_CONTENDED in str(record["state"]) for record in records):
        cells |= {"state": [str(record["state"]) for record in records]}
    cells |= {heading: texts for heading, texts in settings.items() if heading not in shared}
    return Section(key, title, table_of(cells, notes, text, shared), words, records)


def formatted(name: str, text: Callable[[Any], str] = str) -> Callable[[Record], str]:
    """Return a function that formats the field `name` of a record."""
    return lambda record: text(record[name])


def names_of(cell: Cell) -> Record:
    """Return a flat dict that identifies a cell (repeated runs of one spec): `model`, `gpu`, `run_ids`, `state`, …."""
    facts, first = cell.facts, cell.runs[0]
    return {
        "model": facts.get("model.id", ""), "gpu": facts["gpu"], "data": first.data, "name": cell.name,
        "trained_by": cell.variant, "method": facts.get("method.name", ""),
        "with": value_at(OPTIMIZATIONS, facts) or "", "batch": facts.get("train.batch_size", ""),
        "run_ids": " ".join(run.run_id for run in cell.runs), "number": first.record.get("number"), "state": cell.state,
    }  # fmt: skip

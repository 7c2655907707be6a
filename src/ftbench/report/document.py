"""The parts of a report, independent of the output format: tables, sections, and the report."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_WORDS = ("name", "recipe", "model", "weights", "GPU", "data", "with", "method", "state", "where it fails", "note")


ANSWER = "answer"  # the key of the section that a report begins with


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text.

    `context` holds the values that all rows share, for the title. `notes` are shown below the table. `text` names the
    headings of left-aligned columns, in addition to the usual ones.
    """

    context: dict[str, str]
    headings: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)
    text: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The shared values in one line."""
        return " · ".join(f"{key} {value}" for key, value in self.context.items() if value)

    @property
    def words(self) -> list[bool]:
        """For each column, whether it contains words rather than figures."""
        return [heading in (*_WORDS, *self.text) for heading in self.headings]


def table_of(
    columns: Mapping[str, Sequence[str]], notes: Sequence[str] = (), text: Sequence[str] = (),
    context: Mapping[str, str] | None = None,
) -> Table:  # fmt: skip
    """Return a table from columns of text by heading."""
    rows = [list(row) for row in zip(*columns.values(), strict=True)]
    return Table(dict(context or {}), list(columns), rows, list(notes), tuple(text))


def table_of_rows(
    rows: Sequence[Mapping[str, Any]], notes: Sequence[str] = (), text: Sequence[str] = (),
    headings: Sequence[str] = (), shared: Sequence[str] = (),
) -> Table:  # fmt: skip
    """Return a table from rows of values by heading. `shared` headings with one value move into the title."""
    columns = {name: [str(row[name]) for row in rows] for name in headings or rows[0]}
    context = {name: columns.pop(name)[0] for name in shared if len(set(columns[name])) == 1}
    return table_of(columns, notes, text, context)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table of runs: heading, record field, formatter, and whether higher values are better."""

    heading: str
    source: str
    text: Callable[[Any], str] = str
    more_is_better: bool = False


@dataclass(frozen=True, slots=True)
class Point:
    """One conclusion from runs.

    `runs` are the paths of the runs that support it.
    """

    text: str
    runs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Section:
    """One part of a report.

    `key` names it for programs. `records` hold the table's values as plain numbers (None if unknown). The page also
    uses `points`, the paragraphs one by one. The answer counts the runs that it does not use, by reason, in `left_out`.
    """

    key: str
    title: str
    table: Table | None = None
    paragraphs: Sequence[str] = ()
    records: Sequence[dict[str, Any]] = ()
    points: Sequence[Point] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Report:
    """A report before formatting.

    `axes` are record fields that get a column. With `runs`, the table of runs is included.
    """

    records: Sequence[dict[str, Any]]
    axes: Sequence[str] = ()
    sections: Sequence[Section] = ()
    runs: bool = True

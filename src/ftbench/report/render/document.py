"""What a report consists of, for any format: tables of text, sections, and the report itself."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_WORDS = ("name", "model", "weights", "GPU", "data", "with", "method", "state", "where it fails", "note")


@dataclass(frozen=True, slots=True)
class Table:
    """What all rows share (`context`, for the title), headings, rows of text, and notes below."""

    context: dict[str, str]
    headings: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)
    text: tuple[str, ...] = ()  # headings whose columns hold words, beside those every table has

    @property
    def title(self) -> str:
        """What all rows share, in one line."""
        return " · ".join(f"{key} {value}" for key, value in self.context.items() if value)

    @property
    def words(self) -> list[bool]:
        """Whether each column holds words, not figures."""
        return [heading in (*_WORDS, *self.text) for heading in self.headings]


def table_of(
    columns: Mapping[str, Sequence[str]], notes: Sequence[str] = (), text: Sequence[str] = (),
    context: Mapping[str, str] | None = None,
) -> Table:  # fmt: skip
    """Return the table of columns of text by their headings."""
    rows = [list(row) for row in zip(*columns.values(), strict=True)]
    return Table(dict(context or {}), list(columns), rows, list(notes), tuple(text))


def table_of_rows(
    rows: Sequence[Mapping[str, Any]], notes: Sequence[str] = (), text: Sequence[str] = (),
    headings: Sequence[str] = (), shared: Sequence[str] = (),
) -> Table:  # fmt: skip
    """Return the table of rows that hold what stands under each heading; all of the first row's if none are named. Of
    the `shared` headings what is the same in all rows stands in the title."""
    columns = {name: [str(row[name]) for row in rows] for name in headings or rows[0]}
    context = {name: columns.pop(name)[0] for name in shared if len(set(columns[name])) == 1}
    return table_of(columns, notes, text, context)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table of runs: its heading, the field of a record that it shows, how that becomes text, and
    whether more of it is better."""

    heading: str
    source: str
    text: Callable[[Any], str] = str
    more_is_better: bool = False


@dataclass(frozen=True, slots=True)
class Point:
    """One thing that runs say: the sentence, the paths of the runs that show it, what the runs it holds against each
    other `also` differ in, and the workload and GPU that it is `about`."""

    text: str
    runs: tuple[str, ...] = ()
    also: str = ""
    about: str = ""

    @property
    def sentence(self) -> str:
        """The text with what else differs, before its full stop."""
        return f"{self.text.removesuffix('.')} ({self.also})." if self.also else self.text


@dataclass(frozen=True, slots=True)
class Section:
    """One part of a report. `key` names it for programs; `records` is what the table shows, in full and as plain
    numbers (unknown is None); a section may have words only. `points` are the paragraphs one by one, and `curves` the
    lines of a chart (name and points): both are for the page."""

    key: str
    title: str
    table: Table | None = None
    paragraphs: Sequence[str] = ()
    records: Sequence[dict[str, Any]] = ()
    points: Sequence[Point] = ()
    curves: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Report:
    """A report before it has a format: a record a run, the fields that its table has columns for (`axes`), the columns
    that were asked for instead, and the sections. `runs` says whether the table of single runs is part of it."""

    records: Sequence[dict[str, Any]]
    axes: Sequence[str] = ()
    columns: Sequence[Column] = ()
    sections: Sequence[Section] = ()
    runs: bool = True

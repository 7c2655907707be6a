"""What a report consists of, for any format: tables of text, sections, and the report itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_WORDS = ("model", "weights", "GPU", "data", "with", "method", "state", "where it fails", "note")


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
        return " · ".join(f"{key} {value}" for key, value in self.context.items())

    @property
    def words(self) -> list[bool]:
        """Whether each column holds words, not figures."""
        return [heading in (*_WORDS, *self.text) for heading in self.headings]


@dataclass(frozen=True, slots=True)
class Section:
    """One part of a report. `key` names it for programs; `records` is what the table shows, in full and as plain
    numbers (unknown is None); a section may have words only. `pictures` are SVG elements, their text escaped, for a
    page."""

    key: str
    title: str
    table: Table | None = None
    paragraphs: Sequence[str] = ()
    records: Sequence[dict[str, Any]] = ()
    pictures: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """A report before it has a format: a record a run, the fields that its table has columns for (`axes`), and the
    sections. `runs` says whether the table of single runs is part of it."""

    records: Sequence[dict[str, Any]]
    axes: Sequence[str] = ()
    sections: Sequence[Section] = ()
    runs: bool = True

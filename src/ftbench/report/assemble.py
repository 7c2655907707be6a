"""The parts of a report → one text in a format: the table of runs, where it is wanted, and the sections."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ftbench.core.rows import SCHEMA
from ftbench.report.render import formats
from ftbench.report.render.document import Section
from ftbench.report.render.latex import escape, latex
from ftbench.report.render.tables import comparison

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class Parts:
    """A report before it has a format. `runs` says whether the table of single runs is part of it."""

    frame: pd.DataFrame
    axes: Sequence[str]
    sections: Sequence[Section]
    runs: bool = True


def assembled(parts: Parts, format_name: str) -> str:
    """The report as text. Raises SpecError for an unknown format."""
    formats.known_format(format_name)
    if not parts.sections:
        return formats.render(parts.frame, format_name, parts.axes)
    return _FORMATS[format_name](parts)


def _runs(parts: Parts, format_name: str) -> list[str]:
    return [formats.render(parts.frame, format_name, parts.axes)] if parts.runs else []


def _terminal(parts: Parts) -> str:
    found = _runs(parts, "table")
    for section in parts.sections:
        lines = [section.title.upper()] if len(parts.sections) > 1 or parts.runs else []
        lines += [formats.terminal(section.table).rstrip("\n")] if section.table else []
        lines += [formats.folded(text) for text in section.paragraphs]
        found.append("\n".join(lines) + "\n")
    return "\n".join(found)


def _markdown(parts: Parts) -> str:
    found = _runs(parts, "md")
    for section in parts.sections:
        table = [formats.markdown(section.table)] if section.table else []
        found.append(
            "\n".join([f"## {section.title}\n", *table, *(f"{formats.cell(t)}\n" for t in section.paragraphs)])
        )
    return "\n".join(found)


def _latex(parts: Parts) -> str:
    found = _runs(parts, "latex")
    for section in parts.sections:
        words = (*formats.TEXT, *section.table.text) if section.table else ()
        table = [latex(section.table, words)] if section.table else []
        found.append("\n".join([rf"\subsection*{{{escape(section.title)}}}", *table, *map(escape, section.paragraphs)]))
    return "\n\n".join(found) + "\n"


def _csv(parts: Parts) -> str:
    """A CSV holds one table: the runs, or else the first section that has records, in full."""
    import pandas as pd

    if parts.runs:
        return formats.render(parts.frame, "csv", parts.axes)
    records = next((section.records for section in parts.sections if section.records), ())
    return formats.csv(pd.DataFrame.from_records(list(records)))


def _json(parts: Parts) -> str:
    """`{schema, runs, <section>: {title, records, text, notes}}`; unknown is null."""
    document: dict[str, Any] = {"schema": SCHEMA}
    if parts.runs:
        document |= json.loads(formats.render(parts.frame, "json", parts.axes))
    for section in parts.sections:
        notes = section.table.notes if section.table else []
        document[section.key] = {
            "title": section.title, "records": [_finite(record) for record in section.records],
            "text": list(section.paragraphs), "notes": list(notes),
        }  # fmt: skip
    return json.dumps(document, ensure_ascii=False, indent=1, allow_nan=False) + "\n"


def _finite(record: dict[str, Any]) -> dict[str, Any]:
    return {key: None if isinstance(value, float) and value - value != 0 else value for key, value in record.items()}


def _html(parts: Parts) -> str:
    from ftbench.report.page.document import page

    return page(parts.frame, comparison(parts.frame, parts.axes), formats.FOOTNOTE, parts.sections)


_FORMATS: dict[str, Callable[[Parts], str]] = {
    "table": _terminal, "md": _markdown, "csv": _csv, "json": _json, "latex": _latex, "html": _html,
}  # fmt: skip

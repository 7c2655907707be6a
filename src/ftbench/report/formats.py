"""Render a report in each format. `FORMATS` lists one function per format."""

import csv
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ftbench.core.rows import SCHEMA
from ftbench.core.table import folded, plain, text_table
from ftbench.errors import SpecError
from ftbench.report.data.collect import Record, named_paths
from ftbench.report.document import ANSWER, Report, Table
from ftbench.report.runs_table import FOOTNOTE, NUMBER, runs_table
from ftbench.spec.base import nearest

MOST_NOTES = 10  # largest number of notes below a table in text formats


def render(report: Report, format_name: str) -> str:
    """Return the report as text."""
    return FORMATS[format_name](report)


def format_of(file: Path | None) -> str:
    """Return the format for a file name: `table` without a suffix. Raise SpecError for an unknown suffix."""
    suffix = file.suffix.lower().lstrip(".") if file else ""
    name = {"": "table", "txt": "table", "log": "table", "htm": "html"}.get(suffix, suffix)
    if name not in FORMATS:
        raise SpecError(
            f"-o {file}: cannot write a report as .{suffix}{nearest(suffix, FORMATS)}: use .txt, .md, .csv, .json or "
            ".html, or choose a --format"
        )
    return name


# --- tables ----------------------------------------------------------------------------------------------------------


def terminal(table: Table, footnote: str = "") -> str:
    """Return a table as text that fits the width of the terminal."""
    headings = [heading if words else f">{heading}" for heading, words in zip(table.headings, table.words, strict=True)]
    parts = [folded(table.title)] if table.context else []
    parts.append(text_table(headings, table.rows))
    left = len(table.notes) - MOST_NOTES
    more = [f"{left} more note{'s' if left > 1 else ''}: use --format json"] if left > 0 else []
    notes = (f"note: {note}" for note in [*table.notes[:MOST_NOTES], *more])
    below = [text for text in (footnote, *notes) if text]
    return "\n".join([*parts, *(["", *map(folded, below)] if below else [])]) + "\n"


def markdown(table: Table, footnote: str = "") -> str:
    """Return a GitHub-flavored Markdown table."""
    lines = [
        cell(table.title),
        "",
        "| " + " | ".join(map(cell, table.headings)) + " |",
        "|" + "|".join("---" if words else "--:" for words in table.words) + "|",
        *("| " + " | ".join(map(cell, row)) + " |" for row in table.rows),
        "",
        footnote,
        *(f"- {cell(note)}" for note in table.notes),
    ]
    return "\n".join(lines).strip() + "\n"


def cell(text: str) -> str:
    """Escape a text for one cell of a Markdown table."""
    text = " ".join(plain(text).split()).replace("&", "&amp;").replace("<", "&lt;")
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("[", "\\[")


# --- reports ---------------------------------------------------------------------------------------------------------


def _text(report: Report, table: Callable[..., str], title: str, paragraph: Callable[[str], str], end: str) -> str:
    """Return the answer, tables and paragraphs of a report as text. `title` is the format string of headings."""
    runs = runs_table(report.records, report.axes) if report.runs else None
    answer = [text for section in report.sections if section.key == ANSWER for text in section.paragraphs]
    parts = ["\n".join(map(paragraph, answer)).rstrip("\n") + "\n"] if answer else []
    parts += [table(runs, FOOTNOTE)] if runs else []
    for section in (each for each in report.sections if each.key != ANSWER):
        lines = [title.format(section.title)] if title else []
        lines += [table(section.table)] if section.table else []
        parts.append("\n".join([*lines, *map(paragraph, section.paragraphs)]) + end)
    return "\n".join(parts)


def _terminal(report: Report) -> str:
    several = len(report.sections) > 1 or report.runs
    upper = [replace(section, title=section.title.upper()) for section in report.sections]
    return _text(replace(report, sections=upper), _terminal_lines, "{}" if several else "", folded, "\n")


def _terminal_lines(table: Table, footnote: str = "") -> str:
    if footnote and NUMBER in table.headings:
        footnote += " `ftbench show NUMBER PATHS` prints the details of a row and what to try next."
    return terminal(table, footnote).rstrip("\n") + "\n" * bool(footnote)


def _csv(report: Report) -> str:
    """Return one table as CSV: the table of runs, or the first section with records after the answer."""
    others = (each.records for each in report.sections if each.records and not each.key.startswith(ANSWER))
    return csv_text(report.records if report.runs else next(others, ()))


def csv_text(records: Sequence[Record]) -> str:
    """Return the records as CSV, without lists and dicts. Numbers that are not finite give empty cells."""
    records = named_paths(records)
    names = dict.fromkeys(name for record in records for name in record)
    flat = [n for n in names if not any(isinstance(record.get(n), (list, dict)) for record in records)]
    lines: list[str] = []
    rows: list[list[Any]] = [flat, *([record.get(name) for name in flat] for record in records)]
    writer = csv.writer(SimpleNamespace(write=lines.append), lineterminator="\r\n")  # quotes cells with \r or \n
    writer.writerows([None if isinstance(x, float) and not math.isfinite(x) else x for x in row] for row in rows)
    return "".join(line.removesuffix("\r\n") + "\n" for line in lines)


def _json(report: Report) -> str:
    """Return the JSON document `{schema, runs, <section>: {title, records, text, notes}}`. Unknown values are null."""
    document: dict[str, Any] = {"schema": SCHEMA}
    if report.runs:
        document["runs"] = named_paths(report.records)
    for section in report.sections:
        notes = section.table.notes if section.table else []
        left_out = {"left_out": section.left_out} if section.key == ANSWER else {}
        document[section.key] = {
            "title": section.title, "records": section.records, "text": section.paragraphs, "notes": notes, **left_out,
        }  # fmt: skip
    return json.dumps(_finite(document), ensure_ascii=False, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _html(report: Report) -> str:
    from ftbench.report.page import page

    return page(report)


FORMATS: dict[str, Callable[[Report], str]] = {
    "table": _terminal, "csv": _csv, "json": _json, "html": _html,
    "md": lambda report: _text(report, markdown, "## {}\n", lambda text: f"{cell(text)}\n", ""),
}  # fmt: skip

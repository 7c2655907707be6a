"""A frame of runs → text in a format: one function each, FORMATS the table."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ftbench.core.rows import SCHEMA
from ftbench.errors import SpecError
from ftbench.report.tables import CONTEXT, Table, comparison
from ftbench.spec.base import nearest

if TYPE_CHECKING:
    import pandas as pd

_FOOTNOTE = (
    "Median step, samples and real (non-padding) tokens of the steady window; GiB of tensors at the peak "
    "(on a CPU: of the process)."
)
_TEXT = (*CONTEXT.values(), "method", "state", "where it fails", "note")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def render(frame: pd.DataFrame, format_name: str, axes: Sequence[str] = ()) -> str:
    """The comparison of the frame's runs as text, with a column for each of `axes`. Raises SpecError for an unknown
    format."""
    if format_name not in FORMATS:
        raise SpecError(f"--format {format_name}: allowed are {', '.join(FORMATS)}{nearest(format_name, FORMATS)}")
    return FORMATS[format_name](frame, axes)


def _terminal(frame: pd.DataFrame, axes: Sequence[str]) -> str:
    return terminal(comparison(frame, axes), _FOOTNOTE)


def terminal(found: Table, footnote: str = "") -> str:
    """A table as wide as the terminal, without colours."""
    from rich.console import Console
    from rich.table import Table as Grid
    from rich.text import Text

    table = Grid(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for heading in found.headings:
        text = heading in _TEXT
        table.add_column(heading, overflow="fold", no_wrap=not text, justify="left" if text else "right")
    for row in found.rows:
        table.add_row(*map(Text, row))
    out = io.StringIO()
    console = Console(file=out, width=_width(), highlight=False, color_system=None)
    below = [text for text in (footnote, *(f"note: {note}" for note in found.notes)) if text]
    console.print(Text(_title(found.context)), table, *(["", *map(Text, below)] if below else []), sep="\n")
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _width() -> int:
    import shutil

    return max(80, shutil.get_terminal_size((120, 24)).columns)


def _title(context: dict[str, str]) -> str:
    return " · ".join(f"{key} {value}" for key, value in context.items())


def _markdown(frame: pd.DataFrame, axes: Sequence[str]) -> str:
    return markdown(comparison(frame, axes), _FOOTNOTE)


def markdown(found: Table, footnote: str = "") -> str:
    """A table of GitHub's kind."""
    right = [heading not in _TEXT for heading in found.headings]
    lines = [
        _cell(_title(found.context)),
        "",
        "| " + " | ".join(map(_cell, found.headings)) + " |",
        "|" + "|".join("--:" if is_right else "---" for is_right in right) + "|",
        *("| " + " | ".join(map(_cell, row)) + " |" for row in found.rows),
        "",
        footnote,
        *(f"- {_cell(note)}" for note in found.notes),
    ]
    return "\n".join(lines).strip() + "\n"


def _cell(text: str) -> str:
    """Text that stays one cell and one line, and is no markup."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    return text.replace("\\", "\\\\").replace("|", "\\|")


def _csv(frame: pd.DataFrame, axes: Sequence[str]) -> str:
    """Every scalar column in full. Text that a spreadsheet would take for a formula gets a leading apostrophe."""
    keep = [name for name in frame.columns if not any(isinstance(v, (list, dict)) for v in frame[name])]
    texts = frame[keep].select_dtypes(["object", "string"]).columns
    safe = frame[keep].assign(**{name: frame[name].map(_harmless) for name in texts})
    return str(safe.to_csv(index=False, lineterminator="\n"))


def _harmless(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def _json(frame: pd.DataFrame, axes: Sequence[str]) -> str:
    """One document: `{schema, runs: [...]}`; unknown is null."""
    records = json.loads(frame.to_json(orient="records", force_ascii=False, double_precision=15))
    return json.dumps({"schema": SCHEMA, "runs": records}, ensure_ascii=False, indent=1) + "\n"


FORMATS: dict[str, Callable[[pd.DataFrame, Sequence[str]], str]] = {
    "table": _terminal,
    "md": _markdown,
    "csv": _csv,
    "json": _json,
}

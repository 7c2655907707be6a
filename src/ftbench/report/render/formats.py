"""A frame of runs → text in a format: one function each, FORMATS the table."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftbench.core.rows import SCHEMA
from ftbench.errors import SpecError
from ftbench.report.data.collect import as_asked
from ftbench.report.render.latex import latex
from ftbench.report.render.tables import CONTEXT, Table, comparison
from ftbench.report.render.text import fold, grid, plain
from ftbench.spec.base import nearest

if TYPE_CHECKING:
    import pandas as pd

FOOTNOTE = (
    "Median step, samples and real (non-padding) tokens of the steady window; GiB of tensors at the peak "
    "(on a CPU: of the process)."
)
TEXT = (*CONTEXT.values(), "method", "state", "where it fails", "note")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def render(frame: pd.DataFrame, format_name: str, axes: Sequence[str] = ()) -> str:
    """The comparison of the frame's runs as text, with a column for each of `axes`. Raises SpecError for an unknown
    format."""
    known_format(format_name)
    return FORMATS[format_name](frame, axes)


def known_format(format_name: str) -> None:
    """Raises SpecError, naming those that there are, for an unknown format."""
    if format_name not in FORMATS:
        raise SpecError(f"--format {format_name}: allowed are {', '.join(FORMATS)}{nearest(format_name, FORMATS)}")


def format_of(file: Path | None) -> str:
    """The format that a file's name asks for: `table` for none, and for a name that asks for nothing."""
    suffix = file.suffix.lower().lstrip(".") if file else ""
    return {"tex": "latex", "htm": "html"}.get(suffix, suffix if suffix in FORMATS else "table")


def _terminal(frame: pd.DataFrame, axes: Sequence[str]) -> str:
    return terminal(comparison(frame, axes), FOOTNOTE)


def terminal(found: Table, footnote: str = "") -> str:
    """A table as wide as the terminal, without colours."""
    folds = [heading in (*TEXT, *found.text) for heading in found.headings]
    width = _width()
    lines = [*fold(plain(_title(found.context)), width), *grid(found.headings, found.rows, folds, width)]
    below = [text for text in (footnote, *(f"note: {note}" for note in found.notes)) if text]
    lines += ["", *(line for text in below for line in fold(plain(text), width))] if below else []
    return "\n".join(lines) + "\n"


def folded(text: str) -> str:
    """A paragraph in lines of the terminal's width."""
    return "\n".join(fold(plain(text), _width()))


def _width() -> int:
    import shutil

    return max(80, shutil.get_terminal_size((120, 24)).columns)


def _title(context: dict[str, str]) -> str:
    return " · ".join(f"{key} {value}" for key, value in context.items())


def _markdown(frame: pd.DataFrame, axes: Sequence[str]) -> str:
    return markdown(comparison(frame, axes), FOOTNOTE)


def markdown(found: Table, footnote: str = "") -> str:
    """A table of GitHub's kind."""
    right = [heading not in (*TEXT, *found.text) for heading in found.headings]
    lines = [
        cell(_title(found.context)),
        "",
        "| " + " | ".join(map(cell, found.headings)) + " |",
        "|" + "|".join("--:" if is_right else "---" for is_right in right) + "|",
        *("| " + " | ".join(map(cell, row)) + " |" for row in found.rows),
        "",
        footnote,
        *(f"- {cell(note)}" for note in found.notes),
    ]
    return "\n".join(lines).strip() + "\n"


def cell(text: str) -> str:
    """Text that stays one cell and one line, and is no markup."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    return text.replace("\\", "\\\\").replace("|", "\\|")


def _csv(frame: pd.DataFrame, axes: Sequence[str]) -> str:
    return csv(frame)


def csv(frame: pd.DataFrame) -> str:
    """Every scalar column in full. Text that a spreadsheet would take for a formula gets a leading apostrophe."""
    frame = as_asked(frame)
    keep = [name for name in frame.columns if not any(isinstance(v, (list, dict)) for v in frame[name])]
    texts = frame[keep].select_dtypes(["object", "string"]).columns
    safe = frame[keep].assign(**{name: frame[name].map(_harmless) for name in texts})
    return str(safe.to_csv(index=False, lineterminator="\n"))


def _harmless(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def _json(frame: pd.DataFrame, axes: Sequence[str]) -> str:
    """One document: `{schema, runs: [...]}`; unknown is null."""
    records = json.loads(as_asked(frame).to_json(orient="records", force_ascii=False, double_precision=15))
    return json.dumps({"schema": SCHEMA, "runs": records}, ensure_ascii=False, indent=1) + "\n"


def _latex(frame: pd.DataFrame, axes: Sequence[str]) -> str:
    return latex(comparison(frame, axes), TEXT, FOOTNOTE)


def _html(frame: pd.DataFrame, axes: Sequence[str]) -> str:
    from ftbench.report.page.document import page

    return page(frame, comparison(frame, axes), FOOTNOTE)


FORMATS: dict[str, Callable[[pd.DataFrame, Sequence[str]], str]] = {
    "table": _terminal,
    "md": _markdown,
    "csv": _csv,
    "json": _json,
    "latex": _latex,
    "html": _html,
}

"""A table of text for a terminal or a file."""

import os
import re
import sys
from collections.abc import Sequence

from ftbench.core.redact import clean

NARROWEST = 12  # a column of words is not folded below this
_NAME = 28  # nor the first one, which names the row, unless a line is shorter than three of it
_LEAST_TERMINAL, _PAGE = 40, 120
_UNLIMITED = 10_000
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_CURSOR = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_in_full = False


def show_in_full(wanted: bool) -> None:
    """Say whether tables are shown in full whatever the terminal's width (`--wide`)."""
    global _in_full
    _in_full = wanted


def terminal_width() -> int | None:
    """Return how many characters a line may have; None for a pipe or a file without COLUMNS, and with `--wide`."""
    if _in_full or not (sys.stdout.isatty() or os.environ.get("COLUMNS")):
        return None
    import shutil

    return max(_LEAST_TERMINAL, shutil.get_terminal_size().columns)


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Return aligned lines without colour, each ended by a newline but the last.

    A heading that begins with `>` names a column of figures: right-aligned, never folded nor cut. Other columns are
    folded between words until a line takes at most `width` columns (the terminal's if None), as far as `NARROWEST`
    allows; then the last columns are left out, and named below. Columns without headings are none of these. Without any
    heading no row is printed for them. Wide characters count as two, and those that would move the cursor or turn the
    text are left out.
    """
    width = width or terminal_width()
    # Secrets first: of what is folded or loses its line feeds none would be known any more.
    columns, rows = [plain(name) for name in columns], [[plain(cell) for cell in row] for row in clean(list(rows))]
    least = _least_widths(columns, rows, width or _UNLIMITED)
    kept = len(columns) if width is None or not all(columns) else _fitting(least, width)
    rows = [row[:kept] for row in rows]
    most = _UNLIMITED if width is None else max(width, _total(least[:kept]))
    lines = _lines(columns[:kept], rows, most)
    if left := ", ".join(name.removeprefix(">") for name in columns[kept:]):
        lines.append(folded(f"left out for want of width: {left} (--wide shows all)", width))
    return "\n".join(lines)


def _lines(columns: Sequence[str], rows: Sequence[Sequence[str]], most: int) -> list[str]:
    """Return the lines of a table, folded where they would be wider than `most`."""
    headings = [name.removeprefix(">") for name in columns]
    cells = [*([headings] if any(headings) else []), *rows]
    widths = [max(map(_width, column)) for column in zip(*cells, strict=True)]
    if _total(widths) > most:
        return _folded_lines(columns, rows, most)

    def padded(cell: str, width: int, name: str) -> str:
        room = " " * (width - _width(cell))
        return room + cell if name.startswith(">") else cell + room

    return ["  ".join(map(padded, row, widths, columns)).rstrip() for row in cells]


def _folded_lines(columns: Sequence[str], rows: Sequence[Sequence[str]], most: int) -> list[str]:
    from rich.console import Console  # what is not folded does without: it takes a tenth of a short command's time
    from rich.table import Table
    from rich.text import Text

    headed = any(name.removeprefix(">") for name in columns)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=headed, header_style="")
    for heading in columns:
        figures = heading.startswith(">")
        table.add_column(
            Text(heading.removeprefix(">")), justify="right" if figures else "left", no_wrap=figures, overflow="fold"
        )
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console(width=most, height=1, color_system=None, force_terminal=False, legacy_windows=False)
    with console.capture() as capture:
        console.print(table)
    return [line.rstrip() for line in capture.get().splitlines()]


def folded(text: str, width: int | None = None) -> str:
    """Return a paragraph in lines of the terminal's width; of a page's where there is none. One of a list (`- …`), and
    one that is indented (by two), has its lines below its words."""
    mark, _, words = text.partition(" ")
    cells = [mark, words.lstrip()] if mark in ("-", "") else [text]
    return text_table([""] * len(cells), [cells], width or terminal_width() or _PAGE)


def _least_widths(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Return the width of each column of figures, and how far each other one is folded at the most."""
    texts = [name.removeprefix(">") for name in columns]
    widths = [max(map(_width, cells)) for cells in zip(texts, *rows, strict=True)]
    words = [at for at, heading in enumerate(columns) if not heading.startswith(">")]
    name = max(NARROWEST, min(_NAME, width // 3))
    limits = dict.fromkeys(words, NARROWEST) | dict.fromkeys(words[:1] if all(columns) else (), name)
    return [min(wide, limits.get(at, wide)) for at, wide in enumerate(widths)]


def _width(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + 2 * (len(widths) - 1)


def _fitting(least: Sequence[int], width: int) -> int:
    """Return how many of the columns fit, from the first on; two at the least."""
    return next((count for count in range(len(least), 2, -1) if _total(least[:count]) <= width), min(2, len(least)))


def plain(text: str) -> str:
    """Return one line without control characters, also without those that turn the direction of writing."""
    return text if text.isascii() and text.isprintable() else _CONTROL.sub("", " ".join(text.split()))


def printable(text: str) -> str:
    """Return text without control characters but for line feeds and tabs."""
    return _CURSOR.sub("", text)

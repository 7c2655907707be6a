"""Draw text tables for a terminal or a file, without colour."""

import io
import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

NARROWEST = 12  # minimum width of a column with words
_LONGEST = 15  # words up to this width are not broken
_NAME = 28  # minimum width of the first column; it never takes more than a third of the line
_LEAST_TERMINAL, _PAGE, _UNLIMITED = 40, 120, 10_000
_PIPE: int | None = _PAGE  # maximum line length of a table without a terminal
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_CURSOR = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
# A command, or an option with its value.
_COMMAND = re.compile(r"""`[^`]*`|--[a-z-]+ (?:"[^"]*"|[^\s:]+)|(?:\S+ -m )?pip install (?:-U )?(?:'[^']*'|\S+)""")
_KEPT_SPACE = "\ue000"  # for a space where a line must not be broken
_wide = False


def show_in_full(wanted: bool) -> None:
    """Set whether tables ignore the width of the terminal (`--wide`)."""
    global _wide
    _wide = wanted


def terminal_width() -> int | None:
    """Return the maximum line length: the width of the terminal or COLUMNS, 120 for a pipe, or None with `--wide`."""
    if _wide:
        return None
    if not (sys.stdout.isatty() or os.environ.get("COLUMNS")):
        return _PIPE
    return max(_LEAST_TERMINAL, shutil.get_terminal_size().columns)


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Return a table as aligned lines, separated by newlines.

    Words are wrapped to make each line fit. If a line is still too long, the last columns are hidden and a note shows
    their number. If a heading is empty, columns are never hidden.

    Args:
        columns: Headings. A heading that starts with `>` marks a column of numbers. Numbers are right-aligned and not
            wrapped. If all headings are empty, the header row is omitted.
        rows: Texts of the cells. Control characters are removed.
        width: Maximum line length, by default the width of the terminal.
    """
    width = width or terminal_width()
    names = [plain(name) for name in columns]
    cells = [[plain(cell) for cell in row] for row in rows]
    kept, least = len(names), _least_widths(names, cells, width or _UNLIMITED)
    total = [sum(least[:n]) + 2 * (n - 1) for n in range(kept + 1)]  # width of n columns with 2 spaces between
    if width is not None and all(names):
        kept = next((n for n in range(kept, 2, -1) if total[n] <= width), min(2, kept))
    text = _drawn(names[:kept], cells, _UNLIMITED if width is None else max(width, total[kept]))
    hidden = len(names) - kept
    return f"{text}\n{hidden} more column{'s' * (hidden > 1)}: use --wide" if hidden else text


def _drawn(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> str:
    headings = [name.removeprefix(">") for name in columns]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=any(headings), header_style="")
    for name, heading in zip(columns, headings, strict=True):
        number = name.startswith(">")
        table.add_column(Text(heading), justify="right" if number else "left", no_wrap=number, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row[: len(columns)]))
    out = io.StringIO()
    Console(file=out, width=width, height=1, color_system=None, force_terminal=False, legacy_windows=False).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def folded(text: str, width: int | None = None) -> str:
    """Wrap a paragraph at the width of the terminal, or at 120 characters for a pipe. List items (`- …`) and indented
    lines keep their indentation."""
    mark, _, words = text.partition(" ")
    cells = [mark, words.lstrip()] if mark in ("-", "") else [text]
    drawn = text_table([""] * len(cells), [[*map(_unbroken, cells)]], width or terminal_width() or _PAGE)
    return drawn.replace(_KEPT_SPACE, " ")


def wrapped(text: str, indent: int = 2) -> str:
    """Wrap log lines at the width of the terminal and indent continuation lines. Words and commands are not broken."""
    width = terminal_width() or _UNLIMITED
    options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False, "subsequent_indent": " " * indent}
    lines = [part for line in text.split("\n") for part in textwrap.wrap(_unbroken(line), width, **options) or [""]]
    return "\n".join(lines).replace(_KEPT_SPACE, " ")


def _unbroken(text: str) -> str:
    return _COMMAND.sub(lambda command: command[0].replace(" ", _KEPT_SPACE), text)


def folded_command(command: str, indent: int = 2) -> str:
    """Return a shell command in indented lines that fit the terminal. All lines but the last end with a backslash.

    An option and its value stay on one line. Words that are longer than a line are not broken.
    """
    width, lines, part = terminal_width() or _UNLIMITED, [""], ""
    words = shlex.split(command)
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        part = f"{part} {shlex.quote(word)}".lstrip()
        if following.startswith("--") or not word.startswith("--"):
            if lines[-1] and indent + cell_len(f"{lines[-1]} {part} \\") > width:
                lines.append(" ")
            lines[-1], part = f"{lines[-1]} {part}" if lines[-1] else part, ""
    return " \\\n".join(" " * indent + line for line in lines)


def _least_widths(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Return the minimum width of each column. Columns of numbers keep their width. Columns of words may shrink to
    NARROWEST, or to the longest word that is not broken."""
    first = max(NARROWEST, min(_NAME, width // 3)) if all(columns) else NARROWEST
    widths = [
        max(map(cell_len, cells)) for cells in zip([name.removeprefix(">") for name in columns], *rows, strict=True)
    ]
    words = [at for at, name in enumerate(columns) if not name.startswith(">")]
    unbroken = {at: [word for row in rows for word in row[at].split() if len(word) <= _LONGEST] for at in words}
    limits = {at: max(first if at == words[0] else NARROWEST, *map(cell_len, unbroken[at]), 0) for at in words}
    return [min(wide, limits.get(at, wide)) for at, wide in enumerate(widths)]


def plain(text: str) -> str:
    """Return a text as one line without control characters and without characters that change the writing direction."""
    return text if text.isascii() and text.isprintable() else _CONTROL.sub("", " ".join(text.split()))


def printable(text: str) -> str:
    """Return a text without control characters. Line feeds and tabs stay."""
    return _CURSOR.sub("", text)

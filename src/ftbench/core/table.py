"""A table of text for a terminal or a file."""

from __future__ import annotations

import re
from collections.abc import Sequence

NARROWEST = 12  # a column of words is not folded below this
_UNLIMITED = 10_000
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Return aligned lines without colour, each ended by a newline but the last.

    A heading that begins with `>` names a column of figures: right-aligned, never folded nor cut. Other columns are
    folded between words until a line takes at most `width` columns of the terminal, as far as `NARROWEST` and the
    figures allow. Without any heading no row is printed for them. Wide characters count as two, and those that would
    move the cursor or turn the text are left out.
    """
    from rich.console import Console  # `ftbench --help` begins without it
    from rich.table import Table
    from rich.text import Text

    headed = any(name.removeprefix(">") for name in columns)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=headed, header_style="")
    for heading in columns:
        figures = heading.startswith(">")
        table.add_column(
            Text(plain(heading.removeprefix(">"))), justify="right" if figures else "left", no_wrap=figures,
            overflow="fold",
        )  # fmt: skip
    for row in rows:
        table.add_row(*(Text(plain(cell)) for cell in row))
    most = _UNLIMITED if width is None else max(width, _least_width(columns, rows))
    console = Console(width=most, height=1, color_system=None, force_terminal=False, legacy_windows=False)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def _least_width(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """Return the columns of the terminal that the figures and the narrowest words take, gaps included."""
    from rich.cells import cell_len

    widths = [max(cell_len(plain(cell)) for cell in cells) for cells in zip(columns, *rows, strict=True)]
    least = (wide if name.startswith(">") else min(wide, NARROWEST) for name, wide in zip(columns, widths, strict=True))
    return sum(least) + 2 * (len(columns) - 1)


def plain(text: str) -> str:
    """Return one line without control characters, also without those that turn the direction of writing."""
    return text if text.isascii() and text.isprintable() else _CONTROL.sub("", " ".join(text.split()))

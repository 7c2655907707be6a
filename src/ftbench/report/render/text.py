"""A table of text for a terminal: aligned columns, wide characters counted as two, text columns folded to fit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

_GAP = "  "
_NARROWEST = 12  # a column is not folded below this
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def grid(headings: Sequence[str], rows: Sequence[Sequence[str]], folds: Sequence[bool], width: int) -> list[str]:
    """Lines of at most `width` columns of the terminal where folding the columns marked in `folds` allows it; those are
    left-aligned, the others right-aligned. Characters that would move the cursor or turn the text are left out."""
    cells = [[plain(text) for text in row] for row in (headings, *rows)]
    natural = [max(map(columns, column)) for column in zip(*cells, strict=True)]
    room = width - len(_GAP) * (len(natural) - 1)
    words = [max(columns(word) for text in column for word in text.split(" ")) for column in zip(*cells, strict=True)]
    widths = _fit(_fit(natural, folds, words, room), folds, [_NARROWEST] * len(natural), room)
    lines: list[str] = []
    for row in cells:
        parts = [
            fold(text, w) if wide > w else [text] for text, w, wide in zip(row, widths, map(columns, row), strict=True)
        ]
        for number in range(max(map(len, parts))):
            line = (part[number] if number < len(part) else "" for part in parts)
            padded = (_pad(text, w, left) for text, w, left in zip(line, widths, folds, strict=True))
            lines.append(_GAP.join(padded).rstrip())
    return lines


def plain(text: str) -> str:
    """One line without control characters, also without those that turn the direction of writing."""
    return text if text.isascii() and text.isprintable() else _CONTROL.sub("", " ".join(text.split()))


def fold(text: str, width: int) -> list[str]:
    """Lines of at most `width`, broken between words, and within a word that is longer."""
    lines, line = [], ""
    for word in text.split(" "):
        candidate = f"{line} {word}" if line else word
        if columns(candidate) <= width:
            line = candidate
            continue
        if line:
            lines.append(line)
        *whole, line = _chop(word, width)
        lines += whole
    return [*lines, line]


def _chop(word: str, width: int) -> list[str]:
    pieces, piece, used = [], "", 0
    for character in word:
        size = columns(character)
        if used + size > width and piece:
            pieces.append(piece)
            piece, used = "", 0
        piece, used = piece + character, used + size
    return [*pieces, piece]


def _fit(natural: Sequence[int], folds: Sequence[bool], floors: Sequence[int], room: int) -> list[int]:
    """Takes what is too much from the widest of the columns that fold, one by one, down to their floors."""
    widths = list(natural)
    while sum(widths) > room:
        wide = [i for i, may in enumerate(folds) if may and widths[i] > max(floors[i], _NARROWEST)]
        if not wide:
            break
        widest = max(wide, key=widths.__getitem__)
        widths[widest] -= 1
    return widths


def _pad(text: str, width: int, left: bool) -> str:
    space = " " * (width - columns(text))
    return text + space if left else space + text


def columns(text: str) -> int:
    """How many columns of a terminal a text takes."""
    return len(text) if text.isascii() else _wide(text)


@lru_cache(maxsize=4096)
def _wide(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(text)

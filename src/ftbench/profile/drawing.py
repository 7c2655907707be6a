"""What the pictures of a profile share: self-contained SVG whose every text is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable

WIDTH, LEFT = 960, 150
WIDE = WIDTH - LEFT - 10  # of the part with an axis, from LEFT on
_TICKS = ((0.0, "start"), (0.25, "middle"), (0.5, "middle"), (0.75, "middle"), (1.0, "end"))


def drawing(height: float, title: str, parts: Iterable[str]) -> str:
    """Return the SVG element of parts, as wide as there is room."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="100%" role="img" '
        f'font-family="sans-serif" font-size="11"><title>{escape(title)}</title>{"".join(parts)}</svg>\n'
    )


def label(text: str, x: float, y: float, colour: str = "currentColor", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}">{escape(text)}</text>'


def ticks(total: float, unit: str, y: float) -> list[str]:
    """Return labels of an axis from 0 to `total`."""
    return [label(f"{share * total:.4g} {unit}", LEFT + share * WIDE, y, anchor=anchor) for share, anchor in _TICKS]


def escape(text: str) -> str:
    return html.escape(str(text))

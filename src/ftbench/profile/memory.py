"""The memory of one step as a picture: what it is for, stacked, over time."""

from __future__ import annotations

from typing import Any

from ftbench.core.allocations import CATEGORIES
from ftbench.profile.drawing import LEFT, WIDE, drawing, escape, label, ticks

_TALL, _TOP = 150, 26
COLOURS = dict(zip(CATEGORIES, ("#3b6fb6", "#17a2a2", "#c0392b", "#b5446e", "#6aa84f", "#d9822b", "#8d8d8d"),
                   strict=True))  # fmt: skip


def svg(document: dict[str, Any], name: str) -> str:
    """Return a self-contained SVG of memory.json that says whose it is; every text in it is escaped."""
    points = document["timeline"]
    present = [kind for kind in CATEGORIES if any(point[kind] for point in points)]
    last = points[-1]["at_ms"] or 1.0
    highest = max(point["total_gb"] for point in points) or 1.0
    edges = [point["at_ms"] / last * WIDE + LEFT for point in points]
    below = [0.0] * len(points)
    parts = [label(f"{name}: memory of one step, {highest:.3g} GiB at the highest", 4, 14)]
    for kind in present:
        above = [base + point[kind] for base, point in zip(below, points, strict=True)]
        outline = [*_steps(edges, above, highest), *reversed(_steps(edges, below, highest))]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in outline)
        parts.append(f'<polygon points="{path}" fill="{COLOURS[kind]}"><title>{escape(kind)}</title></polygon>')
        below = above
    for row, kind in enumerate(reversed(present)):
        y = _TOP + 16 * row
        parts.append(f'<rect x="4" y="{y}" width="10" height="10" fill="{COLOURS[kind]}"/>')
        parts.append(label(f"{kind} {document['peak'][kind]:.3g}", 20, y + 9))
    parts += ticks(last, "ms", _TOP + _TALL + 16)
    return drawing(_TOP + _TALL + 22, f"Memory of one step by what it is for, {', '.join(present)}", parts)


def _steps(edges: list[float], values: list[float], highest: float) -> list[tuple[float, float]]:
    """Return corners of a line that keeps a value until the next that can be told from it."""
    heights = [round(_TOP + _TALL * (1 - value / highest), 1) for value in values]
    corners = [(edges[0], heights[0])]
    for x, before, after in zip(edges[1:], heights, heights[1:], strict=False):
        corners += [(x, before), (x, after)] if before != after else []
    return [*corners, (edges[-1], heights[-1])]

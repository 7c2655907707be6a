"""The pictures of a profile, one step each: self-contained SVG whose every text is escaped. What the device did by
group, what the training thread was in and where nothing ran (`step_svg`); what memory was for (`memory_svg`)."""

import html
from collections.abc import Iterable
from typing import Any

from ftbench.core.allocations import CATEGORIES
from ftbench.profile.groups import GROUPS
from ftbench.profile.trace import Trace
from ftbench.profile.work import DeviceWork, complement, union

WIDTH, LEFT = 960, 150
WIDE = WIDTH - LEFT - 10  # of the part with an axis, from LEFT on
_TICKS = ((0.0, "start"), (0.25, "middle"), (0.5, "middle"), (0.75, "middle"), (1.0, "end"))
SCHEMA = 1
BINS = 600  # stretches of the step that a lane tells apart
_LEAST_GAP = 0.004  # share of the step below which an idle stretch is not drawn
_LANE, _TOP = 18, 26
# Told apart by lightness too, and on both light and dark paper.
GROUP_COLOURS = dict(zip(GROUPS, ("#3b6fb6", "#d9822b", "#6aa84f", "#9b59b6", "#b5446e", "#c0392b", "#17a2a2",
                                  "#8d8d8d", "#5d5d5d"), strict=True))  # fmt: skip
_PHASE, _IDLE = "#8aa0b8", "#e0b000"
_TALL = 150
COLOURS = dict(zip(CATEGORIES, ("#3b6fb6", "#17a2a2", "#c0392b", "#b5446e", "#6aa84f", "#d9822b", "#8d8d8d"),
                   strict=True))  # fmt: skip


def reduce(trace: Trace, work: Iterable[DeviceWork]) -> dict[str, Any]:
    """Return the step in the middle: for each group stretches in which it ran, [begin, end, share of the stretch];
    phases and idle stretches as [begin, end, name]; all in ms from the step's beginning."""
    middle = len(trace.steps) // 2
    begin = trace.steps[middle][0]
    end = trace.steps[middle][1] if middle + 1 < len(trace.steps) else trace.window[1]
    work = [each for each in work if each.end > begin and each.begin < end]
    busy = union(((each.begin, each.end) for each in work), begin, end)
    gaps = [gap for gap in complement(busy, begin, end) if gap[1] - gap[0] >= _LEAST_GAP * (end - begin)]
    present = [group for group in GROUPS if any(each.group == group for each in work)]
    return {
        "schema": SCHEMA,
        "device": "GPU" if trace.kernels else "CPU",
        "step": middle + 1,
        "ms": end - begin,
        "groups": {group: _lane(work, group, begin, end) for group in present},
        "phases": [
            [max(start, begin) - begin, min(stop, end) - begin, name] for start, stop, name in trace.phases
            if stop > begin and start < end
        ],
        "idle": [[start - begin, stop - begin] for start, stop in gaps],
    }  # fmt: skip


def _lane(work: Iterable[DeviceWork], group: str, begin: float, end: float) -> list[list[float]]:
    """Return a share for each bin, neighbours of about the same share joined."""
    size = (end - begin) / BINS
    filled = [0.0] * BINS
    for start, stop in union(((each.begin, each.end) for each in work if each.group == group), begin, end):
        for column in range(int((start - begin) / size), min(BINS - 1, int((stop - begin) / size)) + 1):
            low, high = begin + column * size, begin + (column + 1) * size
            filled[column] += max(0.0, min(stop, high) - max(start, low)) / size
    lane: list[list[float]] = []
    for column, share in enumerate(filled):
        tenths = min(10, round(share * 10))
        if tenths and lane and lane[-1][1] == column and lane[-1][2] == tenths:
            lane[-1][1] = column + 1
        elif tenths:
            lane.append([column, column + 1, tenths])
    return [[round(first * size, 4), round(last * size, 4), tenths / 10] for first, last, tenths in lane]


def step_svg(picture: dict[str, Any], name: str) -> str:
    """Return a self-contained SVG that says whose it is; every text in it is escaped."""
    total = picture["ms"] or 1.0
    lanes = list(picture["groups"])
    height = _TOP + _LANE * (len(lanes) + 2) + 22
    scale = WIDE / total

    def row(lane: int, colour: str, boxes: Iterable[tuple[float, float, float, str]]) -> str:
        """Return boxes of begin, end, strength and title."""
        rects = [
            f'<rect x="{LEFT + begin * scale:.1f}" width="{max(0.4, (end - begin) * scale):.1f}" height="{_LANE - 4}" '
            f'opacity="{strength:.2f}"><title>{escape(title)}</title></rect>'
            for begin, end, strength, title in boxes
        ]
        return f'<g fill="{colour}" transform="translate(0 {_TOP + lane * _LANE + 2})">{"".join(rects)}</g>'

    parts = [label(f"{name}: one step on the {picture['device']}, {picture['ms']:.1f} ms with the profiler", 4, 14)]
    for lane, group in enumerate(lanes):
        parts.append(label(group, 4, _baseline(lane)))
        boxes = [(b, e, 0.25 + 0.75 * s, f"{b:.2f} to {e:.2f} ms") for b, e, s in picture["groups"][group]]
        parts.append(row(lane, GROUP_COLOURS.get(group, "#5d5d5d"), boxes))
    below = len(lanes)
    parts += [label("nothing", 4, _baseline(below)), label("training thread", 4, _baseline(below + 1))]
    parts.append(row(below, _IDLE, ((b, e, 1.0, f"idle for {e - b:.2f} ms") for b, e in picture["idle"])))
    parts.append(row(below + 1, _PHASE, ((b, e, 1.0, f"{n}, {e - b:.2f} ms") for b, e, n in picture["phases"])))
    parts += [
        label(n, LEFT + b * scale + 3, _baseline(below + 1), "#ffffff") for b, e, n in picture["phases"]
        if (e - b) * scale > 7 * len(n) + 6
    ]  # fmt: skip
    parts += ticks(total, "ms", height - 6)
    said = f"One step of {picture['ms']:.1f} ms on the {picture['device']}: {', '.join(lanes)}, and when nothing ran"
    return drawing(height, said, parts)


def _baseline(lane: int) -> int:
    return _TOP + lane * _LANE + 13


def memory_svg(document: dict[str, Any], name: str) -> str:
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

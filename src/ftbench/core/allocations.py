"""Split the memory of one step into categories, given the history of its allocations.

Categories: `weights` (of the model, including quantization constants), `adapters`, `gradients`, `optimizer` (its
state), `activations` (allocated in a forward pass and alive at the start of its backward pass), `temporary` (other
allocations of the step), `other` (allocated before the step: batches, workspaces, caches).
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ftbench.core import rows
from ftbench.core.units import GIB, MEMORY_CATEGORIES

CATEGORIES = MEMORY_CATEGORIES
_FORWARD = (rows.FORWARD, rows.LOSS, rows.METRICS)
_POINTS, _MOST_ALIVE = 240, 40


@dataclass(frozen=True, slots=True)
class Event:
    """An allocation of `size` bytes at `address`, or a free if `size` is negative; `time` in µs."""

    time: float
    address: int
    size: int
    frame: str = ""


@dataclass(slots=True)
class _Block:
    address: int
    size: int
    begin: int  # index of an event, -1 for before the first
    end: int  # len(events) for after the last
    frame: str
    category: str = "temporary"


@dataclass(frozen=True, slots=True)
class AllocationHistory:
    """The history of allocations.

    Attributes:
        events: Events in order of time.
        alive: (address, size) of the blocks that are allocated after the last event.
        marks: (µs, phase) of the start of each phase.
        owners: Category of each address that is allocated after the last event.
        gradients: Addresses of the gradients when the optimizer step began.
        gradients_at: When the optimizer step began, in µs.
    """

    events: Sequence[Event]
    alive: Sequence[tuple[int, int]]
    marks: Sequence[tuple[float, str]]
    owners: Mapping[int, str]
    gradients: Collection[int] = ()
    gradients_at: float = 0.0


def by_category(history: AllocationHistory) -> dict[str, Any]:
    """Return the memory by category as a JSON document.

    Args:
        history: The allocations.

    Returns:
        `timeline` (ms, phase, GiB by category; the maximum of each of about 240 intervals), `peak`, `alive` (the
        blocks at the peak by category and allocating line), `start` and `end`.
    """
    blocks = _blocks(history)
    _categorise(blocks, history)
    points = _points(blocks, len(history.events))
    origin = history.events[0].time if history.events else 0.0
    index = max(range(len(points)), key=lambda i: sum(points[i]))
    times = [origin, *(event.time for event in history.events)]
    phases = _Phases(history.marks)

    def shown(i: int) -> dict[str, Any]:
        return {"at_ms": (times[i] - origin) / 1e3, "phase": phases.at(times[i]), **_gib(points[i])}

    return {
        "categories": list(CATEGORIES),
        "start": _gib(points[0]),
        "end": _gib(points[-1]),
        "peak": shown(index),
        "alive": _alive(blocks, index - 1, phases, times),
        "timeline": [shown(i) for i in _chosen(points, times)],
    }


def _blocks(history: AllocationHistory) -> list[_Block]:
    last = len(history.events)
    blocks: list[_Block] = []
    taken: dict[int, _Block] = {}
    for index, event in enumerate(history.events):
        if event.size >= 0:
            taken[event.address] = _Block(event.address, event.size, index, last, event.frame)
            blocks.append(taken[event.address])
        elif (block := taken.pop(event.address, None)) is not None:
            block.end = index
        else:
            blocks.append(_Block(event.address, -event.size, -1, index, ""))
    return blocks + [_Block(address, size, -1, last, "") for address, size in history.alive if address not in taken]


def _categorise(blocks: Sequence[_Block], history: AllocationHistory) -> None:
    times = [event.time for event in history.events]
    backward = [bisect_left(times, time) for time, name in history.marks if name == rows.BACKWARD]
    update = bisect_left(times, history.gradients_at)
    phases, last = _Phases(history.marks), len(times)
    for block in blocks:
        next_backward = bisect_right(backward, block.begin)
        if block.end == last and block.address in history.owners:
            block.category = history.owners[block.address]
        elif block.address in history.gradients and block.begin < update <= block.end:
            block.category = "gradients"
        elif block.begin < 0:
            block.category = history.owners.get(block.address, "other")
        elif phases.at(times[block.begin]) in _FORWARD:
            needed = backward[next_backward] if next_backward < len(backward) else last
            block.category = "activations" if block.end >= needed > block.begin else "temporary"


class _Phases:
    def __init__(self, marks: Sequence[tuple[float, str]]) -> None:
        self._times, self._names = [time for time, _ in marks], [name for _, name in marks]

    def at(self, time: float) -> str | None:
        index = bisect_right(self._times, time) - 1
        return self._names[index] if index >= 0 else None


def _points(blocks: Sequence[_Block], count: int) -> list[list[int]]:
    """Return bytes by category before the first event and after each event."""
    change: dict[int, list[int]] = defaultdict(lambda: [0] * len(CATEGORIES))
    for block in blocks:
        column = CATEGORIES.index(block.category)
        change[block.begin][column] += block.size
        change[block.end][column] -= block.size
    points, now = [], [0] * len(CATEGORIES)
    for index in range(-1, count):
        now = [a + b for a, b in zip(now, change[index], strict=True)] if index in change else now
        points.append(now)
    return points


def _chosen(points: Sequence[Sequence[int]], times: Sequence[float]) -> list[int]:
    """Return the indices of the first, the last, and the highest point of each interval."""
    span = (times[-1] - times[0]) or 1.0
    highest: dict[int, int] = {}
    for index, time in enumerate(times):
        stretch = int((time - times[0]) / span * _POINTS)
        if stretch not in highest or sum(points[index]) > sum(points[highest[stretch]]):
            highest[stretch] = index
    return sorted({0, *highest.values(), len(points) - 1})


def _alive(blocks: Sequence[_Block], at: int, phases: _Phases, times: Sequence[float]) -> list[dict[str, Any]]:
    """Return the live blocks after the event `at` by category and allocating line, largest first."""
    sizes: dict[tuple[str, str, str | None], list[int]] = defaultdict(list)
    for block in blocks:
        if block.begin <= at < block.end:
            phase = phases.at(times[block.begin + 1]) if block.begin >= 0 else None
            sizes[block.category, block.frame, phase].append(block.size)
    order = sorted(sizes, key=lambda key: -sum(sizes[key]))[:_MOST_ALIVE]
    return [
        {"category": category, "made_by": frame or None, "phase": phase, "gb": sum(sizes[category, frame, phase]) / GIB,
         "tensors": len(sizes[category, frame, phase]), "largest_gb": max(sizes[category, frame, phase]) / GIB}
        for category, frame, phase in order
    ]  # fmt: skip


def _gib(point: Sequence[int]) -> dict[str, float]:
    parts = {name: size / GIB for name, size in zip(CATEGORIES, point, strict=True)}
    return {"total_gb": sum(parts.values()), **parts}

"""Training curves of the page, reduced to a limited number of points."""

import base64
import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ftbench.store.rundir import RunDir
from ftbench.store.steps import read_columns

SERIES = {
    "allocated": "memory_allocated_gb",
    "reserved": "memory_reserved_gb",
    "peak": "peak_memory_gb",
    "step": "step_time_s",
    "loss": "loss",
}
_POINT_BYTES = 7  # base64 of a 4-byte value and a 2-byte step that several series share
_FEWEST, _MOST = 16, 2000
FEWEST = 8  # points that `downsample` needs


def points_for(runs: int, budget: int) -> int:
    """Return the number of points per curve so that the curves of all runs fit into `budget` bytes."""
    return max(_FEWEST, min(_MOST, budget // max(1, runs * len(SERIES) * _POINT_BYTES)))


def curves(path: Path, points: int) -> dict[str, Any]:
    """Return the training curves of a run, empty for a run without steps.

    Returns:
        `{steps, planned, wide, at, <series>: [index in at, values]}`. `at` lists the step numbers as uint16 (uint32 if
        `wide`), values are float32, all little-endian in base64. `planned` is the planned number of steps. Empty series
        are omitted.
    """
    columns = read_columns(RunDir(path).steps, ("step", *SERIES.values(), "progress_ratio"))
    steps = [int(step or 0) for step in columns.get("step", [])]
    if not steps:
        return {}
    wide, share = max(steps) > 0xFFFF, columns["progress_ratio"][-1]
    at: list[str] = []
    packed: dict[str, Any] = {
        "steps": len(steps), "planned": round(steps[-1] / share) if share and share > 0 else None, "wide": wide,
        "at": at,
    }  # fmt: skip
    for name, column in SERIES.items():
        values = [math.nan if value is None else value for value in columns[column]]
        if any(map(math.isfinite, values)):
            kept = downsample(values, points)
            own_steps = _pack("I" if wide else "H", [steps[i] for i in kept])
            if own_steps not in at:
                at.append(own_steps)
            packed[name] = [at.index(own_steps), _pack("f", [values[i] for i in kept])]
    return packed


def _pack(kind: str, values: Sequence[float]) -> str:
    if kind == "f":
        values = [value if abs(value) < 3e38 else math.nan for value in values]
    return base64.b64encode(struct.pack(f"<{len(values)}{kind}", *values)).decode()


def downsample(values: Sequence[float], points: int) -> list[int]:
    """Return the indices of at most `points` values, in order.

    Equal buckets of the curve keep their minimum, their maximum and their first gap (a value that is not finite). The
    first and the last value are always kept. Raise ValueError below FEWEST points.
    """
    if points < FEWEST:
        raise ValueError(f"a curve needs {FEWEST} points, not {points}")
    n = len(values)
    if n <= points:
        return list(range(n))
    buckets = (points - 2) // (2 if all(map(math.isfinite, values)) else 3)
    kept = {0, n - 1}
    for number in range(buckets):
        start, end = n * number // buckets, n * (number + 1) // buckets
        part = values[start:end]
        known = [value for value in part if math.isfinite(value)]
        if len(known) < len(part):
            kept.add(start + next(i for i, value in enumerate(part) if not math.isfinite(value)))
        if known:
            kept |= {start + part.index(min(known)), start + part.index(max(known))}
    return sorted(kept)

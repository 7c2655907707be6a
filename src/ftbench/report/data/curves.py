"""The curves of runs: a few columns of steps.csv, packed as little-endian arrays for a page; of long ones fewer points,
honestly: every point that is shown was measured, and no extreme is lost."""

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
    "elapsed": "elapsed_time_sec",
}
_POINT_BYTES = 7  # a value of four bytes and, shared by some series, a step of two, in base64
_FEWEST, _MOST = 16, 2000
FEWEST = 8  # points of any curve


def points_for(runs: int, budget: int) -> int:
    """Return how many points each curve of each run may have so that all of them fit into `budget` bytes."""
    return max(_FEWEST, min(_MOST, budget // max(1, runs * len(SERIES) * _POINT_BYTES)))


def curves(path: Path, points: int) -> dict[str, Any]:
    """Return the training curves of a run: `{steps, planned, wide, at, <series>: [place in at, values]}`: the steps
    that values stand at, as uint16 (uint32 where `wide`), and values as float32, in base64; a series that no step fills
    is left out. Empty for a run without steps. `planned` is how many steps the run was to have. An unfinished last
    line, a line that cannot be read and an evaluation are no points."""
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
    """Return the places of at most `points` of the values, in rising order; all of them where there are no more.

    The curve is cut into equal buckets, and each keeps its minimum, its maximum and, where there is one, its first gap
    (a value that is not finite), so that a gap stays one. The first and the last value are always kept, and with each
    bucket's extremes those of the whole. Raises ValueError below FEWEST points.
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

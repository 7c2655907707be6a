"""Data of the page's charts: figures of cells with 95 % intervals, and training curves."""

import base64
import math
import statistics
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ftbench.core import units
from ftbench.core.compare import TYPICAL_SPREAD, variance_of
from ftbench.core.stats import CONFIDENCE, grouped_by, t_quantile
from ftbench.report.page.view import NUMBERS, RunRow, View
from ftbench.store.rundir import RunDir
from ftbench.store.steps import read_columns

Figure = tuple[float, float | None, float | None]
_TEXTS: dict[str, Callable[[float | None], str]] = {"step": units.seconds, "peak": units.gibibytes}  # others are rates
_EACH = "each"  # samples per hour per GPU
_NORMAL = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


def bars(view: View) -> list[dict[str, Any]]:
    """Return one dict per cell with successful runs.

    `runs` are their numbers. `figures` maps a name to value, low and high (None without an interval). `texts` has the
    same as text.
    """
    listed = []
    for rows in grouped_by((row for row in view.rows if row.values), lambda row: id(row.cell)).values():
        first = rows[0]
        figures = {name: _figure(rows, name) for name in NUMBERS if any(name in row.values for row in rows)}
        if samples := figures.get("samples"):
            value, low, high = (part and part / first.cell.gpus for part in samples)
            figures[_EACH] = value or 0.0, low, high
        texts = {name: list(map(_TEXTS.get(name, units.rate), figure)) for name, figure in figures.items()}
        listed.append({
            "workload": first.workload, "gpu": str(first.cell.facts["gpu"]), "method": str(first.record["method"]),
            "way": first.cell.way, "batch": first.cell.batch, "gpus": first.cell.gpus,
            "runs": [row.number for row in rows], "warned": any(row.record["warnings"] for row in rows),
            "figures": {name: _rounded(figure) for name, figure in figures.items()}, "texts": texts,
        })  # fmt: skip
    return listed


def _figure(rows: Sequence[RunRow], name: str) -> Figure:
    values = [row.values[name] for row in rows if name in row.values]
    return of_repeats(values) if len(values) > 1 else of_one_run(rows[0], name, values[0])


def _rounded(figure: Figure) -> list[float | None]:
    return [None if part is None else float(f"{part:.6g}") for part in figure]


def of_repeats(values: Sequence[float]) -> Figure:
    """Return the geometric mean of repeats and its 95 % interval.

    The interval is Student's t over the logarithms, including the typical spread between repeats. If a value is not
    positive, return the arithmetic mean without an interval.
    """
    if min(values) <= 0:
        return statistics.fmean(values), None, None
    logs = list(map(math.log, values))
    variance, freedom = variance_of(logs, TYPICAL_SPREAD)
    half = t_quantile((1 + CONFIDENCE) / 2, freedom) * math.sqrt(variance / len(logs))
    mean = statistics.fmean(logs)
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def of_one_run(row: RunRow, name: str, value: float) -> Figure:
    """Return one run's figure and its interval, if it is proportional to the step time.

    It is the interval of the median step, widened by the typical spread between repeats.
    """
    if row.interval is None or name not in ("step", "samples", "tokens") or "step" not in row.values:
        return value, None, None
    wider = math.exp(_NORMAL * TYPICAL_SPREAD)
    low, high, middle = row.interval[0] / wider, row.interval[1] * wider, row.values["step"]
    if name == "step":
        return value, low, high
    return value, value * middle / high if high else None, value * middle / low if low else None


# --- curves ----------------------------------------------------------------------------------------------------------

SERIES = {
    "allocated": "memory_allocated_gb",
    "reserved": "memory_reserved_gb",
    "peak": "peak_memory_gb",
    "step": "step_time_s",
    "loss": "loss",
    "elapsed": "elapsed_time_sec",
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

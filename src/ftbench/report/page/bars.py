"""Groups of repeats → one figure each with its 95 % interval, for points and bars."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from ftbench.core.compare import TYPICAL_SPREAD
from ftbench.core.stats import CONFIDENCE, t_quantile
from ftbench.report.page.figures import NUMBERS
from ftbench.report.page.view import RunRow, View

Figure = tuple[float, float | None, float | None]
_NORMAL = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


def bars(view: View) -> list[dict[str, Any]]:
    """Return each group with runs that ended well: `runs` are their numbers, `figures` by name value, low, high; no
    interval is None."""
    cells: dict[int, list[RunRow]] = {}
    for row in view.rows:
        if row.values:
            cells.setdefault(id(row.cell), []).append(row)
    return [
        {
            "workload": first.workload, "gpu": str(first.cell.facts["gpu"]), "method": str(first.record["method"]),
            "way": first.cell.way, "batch": first.cell.batch, "gpus": first.cell.gpus,
            "runs": [row.number for row in rows], "warned": any(row.record["warnings"] for row in rows),
            "figures": {name: _figure(rows, name) for name in NUMBERS if any(name in row.values for row in rows)},
        }
        for rows in cells.values() for first in rows[:1]
    ]  # fmt: skip


def _figure(rows: Sequence[RunRow], name: str) -> Figure:
    values = [row.values[name] for row in rows if name in row.values]
    figure = of_repeats(values) if len(values) > 1 else of_one_run(rows[0], name, values[0])
    value, *ends = (None if part is None else float(f"{part:.6g}") for part in figure)
    return value or 0.0, ends[0], ends[1]


def of_repeats(values: Sequence[float]) -> Figure:
    """Return the mean of runs in fresh processes and its 95 % interval (Student's t)."""
    mean = statistics.fmean(values)
    half = t_quantile((1 + CONFIDENCE) / 2, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return mean, max(0.0, mean - half), mean + half


def of_one_run(row: RunRow, name: str, value: float) -> Figure:
    """Return one run's figure with the interval of its median step, widened by what like runs differ by, and of what
    follows from the step time in proportion."""
    if row.interval is None or name not in ("step", "samples", "tokens") or "step" not in row.values:
        return value, None, None
    wider = math.exp(_NORMAL * TYPICAL_SPREAD)
    low, high, middle = row.interval[0] / wider, row.interval[1] * wider, row.values["step"]
    if name == "step":
        return value, low, high
    return value, value * middle / high if high else None, value * middle / low if low else None

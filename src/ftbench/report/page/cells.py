"""Repeats of a cell → one figure with its 95 % interval, for the comparison bars."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from ftbench.report.page.view import Run

# Student's t, two-sided 95 %, for 1 to 30 degrees of freedom; beyond that the normal distribution's 1.96 is within 4 %.
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_NORMAL = 1.96

Figure = tuple[float, float | None, float | None]


def cells(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Each cell (workload, GPU, method, batch, optimizations) with its runs that ended well: `figures` by name as
    value, low, high; no interval is None."""
    found: dict[tuple[object, ...], list[Run]] = {}
    for run in runs:
        if run.values:
            key = (run.workload, run.gpu, run.method, run.batch, run.accumulation, run.optimizations)
            found.setdefault(key, []).append(run)
    return [
        {
            "workload": members[0].workload,
            "gpu": members[0].gpu,
            "method": members[0].method,
            "batch": members[0].batch,
            "label": _label(members[0]),
            "runs": len(members),
            "figures": _figures(members),
        }
        for members in found.values()
    ]


def _label(run: Run) -> str:
    batch = f"batch {run.batch}" + (f"x{run.accumulation}" if run.accumulation > 1 else "")
    return f"{run.method}, {batch}" + (f", {run.optimizations}" if run.optimizations != "none" else "")


def _figures(members: Sequence[Run]) -> dict[str, Figure]:
    names = dict.fromkeys(name for run in members for name in run.values)
    found = {}
    for name in names:
        values = [run.values[name] for run in members if name in run.values]
        found[name] = of_repeats(values) if len(values) > 1 else of_one(members[0], name, values[0])
    return found


def of_repeats(values: Sequence[float]) -> Figure:
    """The mean of runs in fresh processes and its 95 % interval (Student's t)."""
    mean = statistics.fmean(values)
    t = _T95[len(values) - 2] if len(values) - 2 < len(_T95) else _NORMAL
    half = t * statistics.stdev(values) / len(values) ** 0.5
    return mean, max(0.0, mean - half), mean + half


def of_one(run: Run, name: str, value: float) -> Figure:
    """One run: the interval of its median step, and of what follows from the step time in proportion."""
    if run.interval is None or name not in ("step", "samples", "tokens") or "step" not in run.values:
        return value, None, None
    low, high = run.interval
    if name == "step":
        return value, low, high
    middle = run.values["step"]
    return value, value * middle / high if high else None, value * middle / low if low else None

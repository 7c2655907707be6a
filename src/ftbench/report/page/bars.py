"""Groups of repeats → one figure each with its 95 % interval, for points and bars."""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from ftbench.core import units
from ftbench.core.compare import TYPICAL_SPREAD, variance_of
from ftbench.core.grouping import grouped_by
from ftbench.core.stats import CONFIDENCE, t_quantile
from ftbench.report.page.figures import NUMBERS
from ftbench.report.page.view import RunRow, View

Figure = tuple[float, float | None, float | None]
_TEXTS: dict[str, Callable[[float | None], str]] = {"step": units.seconds, "peak": units.gibibytes}  # the rest: rates
_EACH = "each"  # samples an hour of one of several GPUs
_NORMAL = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


def bars(view: View) -> list[dict[str, Any]]:
    """Return each group with runs that ended well: `runs` are their numbers, `figures` by name value, low, high (no
    interval is None), and `texts` the same in words."""
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
    """Return the geometric mean of runs in fresh processes, which every table shows, and its 95 % interval (Student's
    t over the logarithms, with what like runs spread by); the arithmetic mean without one where a value is not
    positive."""
    if min(values) <= 0:
        return statistics.fmean(values), None, None
    logs = list(map(math.log, values))
    variance, freedom = variance_of(logs, TYPICAL_SPREAD)
    half = t_quantile((1 + CONFIDENCE) / 2, freedom) * math.sqrt(variance / len(logs))
    mean = statistics.fmean(logs)
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


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

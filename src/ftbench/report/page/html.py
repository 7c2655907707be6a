"""Render the page: one HTML document with its data, style and script, and a policy that blocks other content."""

import base64
import hashlib
import math
import re
from dataclasses import dataclass
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from ftbench import __version__
from ftbench.core import units
from ftbench.core.learning import learned
from ftbench.report.compare.pairs import steps_of
from ftbench.report.document import ANSWER, Report, Section
from ftbench.report.page.curves import curves, points_for
from ftbench.report.page.details import FIGURE_NAMES, Pairs, facts_of, figures_of
from ftbench.report.page.view import RunRow, View, view
from ftbench.report.runs_table import FOOTNOTE

CURVE_BYTES = 900_000  # of the page, so that a page of 150 runs stays below 1.5 MB
MOST_CURVES = 150  # runs with curves; reading the steps of more takes longer than the rest of the page
# Characters that change the writing direction can make text misleading.
_BIDI = re.compile("[\u200e\u200f\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of the chart: lengths in percent of the longest whisker, and the runs behind it."""

    name: str
    text: str
    title: str
    length: float
    low: float | None
    width: float
    runs: str


def page(report: Report) -> str:
    """Return the report as one self-contained HTML document."""
    shown = view(report)
    drawn, points = _curves(shown)
    longest = max((curve["steps"] for curve in drawn.values()), default=0)
    script = _asset("report.js")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["code"] = _code
    environment.policies["json.dumps_kwargs"] = {
        "ensure_ascii": False, "separators": (",", ":"), "allow_nan": False,
    }  # fmt: skip
    answer = next((section for section in report.sections if section.key == ANSWER), None)
    groups = [section for section in report.sections if section.key.startswith(f"{ANSWER}_")]
    text = environment.from_string(_asset("page.html")).render(
        title=_title(answer, shown), answer=answer, evidence=_evidence(answer, shown), bars=_bars(answer),
        groups=groups, sections=[each for each in report.sections if each is not answer and each not in groups],
        view=shown, data=_data(shown, drawn), learned=_learned(shown, drawn),
        points=points if longest > points else None, footnote=FOOTNOTE, version=__version__, script=script,
        drawn=len(drawn), with_steps=sum(not row.profiled for row in shown.rows),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(), style=_asset("report.css"),
    )  # fmt: skip
    return _BIDI.sub("", text).lstrip()


def _asset(name: str) -> str:
    return resources.files("ftbench.report").joinpath("assets", name).read_text("utf-8")


def _code(text: str) -> Markup:
    """Return escaped text for the page, with backticks as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


# --- the answer ------------------------------------------------------------------------------------------------------


def _title(answer: Section | None, shown: View) -> str:
    """Return the first sentence of the answer, or the number of runs."""
    if answer and answer.points and answer.records:
        return answer.points[0].text.partition(". ")[0].partition(" (95 %")[0]
    return f"{units.some(len(shown.rows), 'fine-tuning run')} without a valid speed"


def _evidence(answer: Section | None, shown: View) -> list[list[RunRow]]:
    """Return the runs behind each point of the answer."""
    points = answer.points if answer else ()
    return [[shown.by_path[path] for path in point.runs if path in shown.by_path] for point in points]


def _bars(answer: Section | None) -> list[Bar]:
    """Return a bar per recipe: tokens per second, with the 95 % interval."""
    records = [record for record in answer.records if record.get("tokens_per_s")] if answer else []
    longest = max((record["tokens_per_s_high"] or record["tokens_per_s"] for record in records), default=1.0)
    bars = []
    for record in records:
        value, low, high = (record[name] for name in ("tokens_per_s", "tokens_per_s_low", "tokens_per_s_high"))
        known = low is not None and math.isfinite(high)
        title = f"95 %: {units.rate(low)} to {units.rate(high)}, " if known else ""
        bars.append(Bar(
            record["recipe"], units.rate(value), title + units.some(record["runs"], "run"), 100 * value / longest,
            100 * low / longest if known else None, 100 * (high - low) / longest if known else 0.0, record["numbers"],
        ))  # fmt: skip
    return bars


# --- curves and details ----------------------------------------------------------------------------------------------


def _curves(shown: View) -> tuple[dict[int, dict[str, Any]], int]:
    """Return the curves by run index, and the maximum number of points per curve.

    With more than MOST_CURVES runs, the first run of each cell gets a curve, then the second of each, and so on.
    """
    turn: dict[int, int] = {}
    waiting = []
    for index, row in enumerate(shown.rows):
        turn[id(row.cell)] = turn.get(id(row.cell), 0) + 1
        waiting.append((row.profiled, turn[id(row.cell)], index))
    chosen = sorted(index for profiled, _, index in sorted(waiting)[:MOST_CURVES] if not profiled)
    points = points_for(len(chosen), CURVE_BYTES)
    drawn = ((index, curves(shown.rows[index].folder, points)) for index in chosen)
    return {index: curve for index, curve in drawn if curve}, points


def _learned(shown: View, drawn: dict[int, dict[str, Any]]) -> bool:
    """Return whether the loss of a run with a curve fell beyond noise."""
    rows = (shown.rows[index] for index in drawn)
    return any(learned(steps_of(row.run).learning) for row in rows if row.state == "ok" and row.record.get("loss.last"))


def _data(shown: View, drawn: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Return the data for the script. Repeated texts are stored once."""
    texts: dict[Pairs, int] = {}
    runs = [
        {
            "id": row.run_id, "number": row.number, "way": row.cell.way, "gpu": str(row.cell.facts["gpu"]),
            "method": str(row.record["method"]), "batch": row.cell.batch, "state": row.state,
            "workload": row.workload, "rate": row.rate,
            "reason": str(row.record.get("reason") or ""), "warnings": list(map(str, row.record["warnings"])),
            "figures": figures_of(row), "facts": [texts.setdefault(pairs, len(texts)) for pairs in facts_of(row)],
        }
        for row in shown.rows
    ]  # fmt: skip
    return {"runs": runs, "labels": FIGURE_NAMES, "facts": list(texts), "curves": drawn}

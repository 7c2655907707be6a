"""The whole page: data for the template, and a policy that lets nothing in from outside."""

import base64
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from ftbench import __version__
from ftbench.report.data import curves
from ftbench.report.page import details, head
from ftbench.report.page.bars import bars
from ftbench.report.page.figures import FIGURES
from ftbench.report.page.grids import grids
from ftbench.report.page.view import RunRow, View, view
from ftbench.report.render.document import Point, Report, Section
from ftbench.report.render.runs_table import FOOTNOTE

CURVE_BYTES = 900_000  # of the page: that of 150 runs stays below 1.5 MB
# Runs with curves, as many as the chooser lists: to read the steps of more takes longer than the rest.
MOST_CURVES = 150
# Where a section stands: what is in none of these comes after the curves.
_OWN = ("decision", "frontier")  # the page has a better way to show these
_COMPARED = ("comparison", "gate")
_LEARNED = ("generations",)
_KERNELS = ("kernel_groups", "memory_by_category", "kernels")
_LAST = ("night", "energy", "cost", "memory", "trained")
_OF_WORKLOAD = ("model", "weights", "data")
_NAMING = (*_OF_WORKLOAD, "GPU", "batch")  # headings of what a row is called by
# Marks that turn the direction of writing: text reads in the order in which it is written.
_TURNING = re.compile("[\u200e\u200f\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True, slots=True)
class PlacedSection:
    """A section of the report, the rows of its table each with the workloads that it is about (all: empty), and those
    of the section; `columns` are the places of those that are shown, and `title` is what all rows share."""

    section: Section
    rows: list[tuple[str, list[str]]]
    workloads: str
    columns: list[int]
    title: str


@dataclass(frozen=True, slots=True)
class Bullet:
    """A point with the workloads and the runs that it is about; `heading` where it is the first about something."""

    point: Point
    heading: str
    workloads: str
    rows: list[RunRow]


def page(report: Report) -> str:
    """Return one HTML document that needs nothing but itself: the runs of the report and its sections."""
    shown = view(report)
    drawn, points = _curves(shown)
    longest = max((curve["steps"] for curve in drawn.values()), default=0)
    script = _asset("report.js")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["code"] = _code
    environment.policies["json.dumps_kwargs"] = {
        "ensure_ascii": False, "separators": (",", ":"), "allow_nan": False,
    }  # fmt: skip
    text = environment.from_string(_asset("page.html")).render(
        title=head.title(shown, 0), view=shown, grids=grids(shown), data=_data(report, shown, drawn),
        bullets=_bullets(report, shown),
        cards=list(map(head.cards, shown.cells)), **_placed(report, shown),
        points=points if longest > points else None, footnote=FOOTNOTE, version=__version__, script=script,
        drawn=len(drawn), with_steps=sum(not row.profiled for row in shown.rows),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(), style=_asset("report.css"),
    )  # fmt: skip
    return _TURNING.sub("", text).lstrip()


def _asset(name: str) -> str:
    return resources.files("ftbench.report").joinpath("assets", name).read_text("utf-8")


def _curves(shown: View) -> tuple[dict[int, dict[str, Any]], int]:
    """Return the curves of runs by their index, and how many points each may have. Of many runs the first of each group
    come first, then the second of each."""
    turn: dict[int, int] = {}
    waiting = []
    for index, row in enumerate(shown.rows):
        turn[id(row.cell)] = turn.get(id(row.cell), 0) + 1
        waiting.append((row.profiled, turn[id(row.cell)], index))
    chosen = sorted(index for profiled, _, index in sorted(waiting)[:MOST_CURVES] if not profiled)
    points = curves.points_for(len(chosen), CURVE_BYTES)
    drawn = ((index, curves.curves(shown.rows[index].folder, points)) for index in chosen)
    return {index: curve for index, curve in drawn if curve}, points


# --- sections --------------------------------------------------------------------------------------------------------


def _placed(report: Report, shown: View) -> dict[str, list[PlacedSection]]:
    """Return the sections by where they stand."""
    parts = {section.key: _part(section, shown) for section in report.sections if section.key not in _OWN}
    places = {"compared": _COMPARED, "learned": _LEARNED, "kernels": _KERNELS, "last": _LAST}
    named = {key for keys in places.values() for key in keys}
    placed = {name: [parts[key] for key in keys if key in parts] for name, keys in places.items()}
    return placed | {"more": [part for key, part in parts.items() if key not in named]}


def _part(section: Section, shown: View) -> PlacedSection:
    rows = section.table.rows if section.table else []
    by_workload = len(shown.workloads) > 1 and len(section.records) == len(rows)
    workloads = (
        [shown.workloads_of(str(record.get("run_ids") or "")) for record in section.records] if by_workload else []
    )
    marked = list(zip(workloads or [""] * len(rows), rows, strict=True))
    own = " ".join(sorted({*" ".join(workloads).split()})) if all(workloads) else ""
    return PlacedSection(section, marked, own, *_columns(section, bool(workloads and all(workloads))))


def _columns(section: Section, chosen: bool) -> tuple[list[int], str]:
    """Return the places of the columns that tell rows apart, and what all rows share; where one workload is `chosen`
    its own columns tell nothing."""
    if (table := section.table) is None:
        return [], ""
    shared = {
        index: f"{heading} {table.rows[0][index]}".strip() for index, heading in enumerate(table.headings)
        if heading in _NAMING and table.rows and len({row[index] for row in table.rows}) == 1
    }  # fmt: skip
    left_out = [index for index, name in enumerate(table.headings) if chosen and name in _OF_WORKLOAD]
    places = [index for index in range(len(table.headings)) if index not in (*shared, *left_out)]
    return places, " · ".join(filter(None, [table.title, *shared.values()]))


def _bullets(report: Report, shown: View) -> list[Bullet]:
    sections = [section for section in report.sections if section.key == "decision"]
    points = [point for section in sections for point in section.points or map(Point, section.paragraphs)]
    return list(_with_runs(points, shown))


def _with_runs(points: Sequence[Point], shown: View) -> Iterator[Bullet]:
    about, single = "", len({point.about for point in points if point.about}) == 1
    for point in points:
        rows = [shown.by_path[path] for path in point.runs if path in shown.by_path]
        workloads = " ".join(sorted({str(row.workload) for row in rows})) if len(shown.workloads) > 1 else ""
        yield Bullet(point, "" if single or point.about == about else point.about, workloads, rows)
        about = point.about


def _data(report: Report, shown: View, drawn: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Return what the script needs: figures as numbers, texts once."""
    texts: dict[details.Pairs, int] = {}
    runs = [
        {
            "id": row.run_id, "number": row.number, "way": row.cell.way, "workload": row.workload,
            "gpu": str(row.cell.facts["gpu"]),
            "method": str(row.record["method"]), "batch": row.cell.batch, "state": row.state,
            "reason": str(row.record.get("reason") or ""), "warnings": list(map(str, row.record["warnings"])),
            "values": {key: float(f"{value:.9g}") for key, value in row.values.items()},
            **dict(zip(("figures", "numbers"), details.figures(row), strict=True)),
            "facts": [texts.setdefault(pairs, len(texts)) for pairs in details.facts(row)],
        }
        for row in shown.rows
    ]  # fmt: skip
    scaling = next((dict(section.curves) for section in report.sections if section.curves), {})
    return {
        "scaling": scaling, "runs": runs, "labels": [label for label, _, _ in FIGURES], "workloads": shown.workloads,
        "titles": [head.title(shown, index) for index in range(len(shown.workloads))],
        "facts": list(texts), "cells": bars(shown), "curves": drawn,
    }  # fmt: skip


def _code(text: str) -> Markup:
    """Return a text for the page, with what stands between backticks as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))

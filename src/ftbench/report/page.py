"""Render the report as one HTML document with data, style and script. A security policy blocks all other content."""

import base64
import hashlib
import math
import re
from collections.abc import Sequence
from importlib import resources

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from ftbench import __version__
from ftbench.core import units
from ftbench.core.hardware import canonical_name
from ftbench.report.compare.pairs import steps_of
from ftbench.report.data.cells import TOKENS, Run, number_of
from ftbench.report.data.collect import Record, figure
from ftbench.report.data.groups import cell_names, cells_of, runs_of
from ftbench.report.document import ANSWER, Report, Section
from ftbench.report.runs_table import FIGURES, FOOTNOTE, NUMBER, runs_table

MOST_CURVES, MOST_POINTS = 6, 400
# Characters that change the writing direction can make text misleading.
_BIDI = re.compile("[\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_BADGES = {"ok": "good", "oom": "bad", "error": "bad", "timeout": "bad"}


def page(report: Report) -> str:
    """Return the report as one HTML document that works without other files."""
    table = runs_table(report.records, report.axes)
    script = _asset("report.js")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["code"] = lambda text: Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))
    answer = next((section for section in report.sections if section.key == ANSWER), None)
    groups = [section for section in report.sections if section.key.startswith(f"{ANSWER}_")]
    columns = [column for column in zip(table.headings, table.words, strict=True) if column[0] != NUMBER]
    without_speed = " without a valid speed" if answer or not report.sections else ""
    title = units.some(len(report.records), "fine-tuning run") + without_speed
    if answer and answer.records:
        title = answer.paragraphs[0].partition(". ")[0].partition(" (95 %")[0]  # the first sentence of the answer
    text = environment.from_string(_asset("page.html")).render(
        title=title, answer=answer,
        bars=_bars(answer, report), groups=groups,
        sections=[each for each in report.sections if each is not answer and each not in groups],
        context=table.title, columns=columns, notes=table.notes, rows=_rows(report.records, table.headings, table.rows),
        states=sorted({str(record["state"]) for record in report.records}), curves=_curves(report.records),
        footnote=FOOTNOTE, version=__version__, script=script, style=_asset("report.css"),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )  # fmt: skip
    return _BIDI.sub("", text).lstrip()


def _asset(name: str) -> str:
    return resources.files("ftbench.report").joinpath("assets", name).read_text("utf-8")


# --- the answer ------------------------------------------------------------------------------------------------------


def _bars(answer: Section | None, report: Report) -> list[Record]:
    """Return one bar per recipe: tokens per second with a 95 % interval. If GPUs are compared, each GPU has a bar.

    Lengths are in percent of the longest bar, including its interval.
    """
    compared = [record for section in report.sections for record in section.records if record.get("axis") == "gpu"]
    rows = [_by_gpu(record) for record in compared] or (answer.records if answer else [])
    records = [record for record in rows if record.get("tokens_per_s")]
    longest = max((record["tokens_per_s_high"] or record["tokens_per_s"] for record in records), default=1.0)
    bars = []
    for record in records:
        value, low, high = (record[name] for name in ("tokens_per_s", "tokens_per_s_low", "tokens_per_s_high"))
        known = low is not None and math.isfinite(high)
        title = f"95 %: {units.rate(low)} to {units.rate(high)}, " if known else ""
        bars.append({
            "name": record["recipe"], "text": units.rate(value), "runs": record["numbers"],
            "title": title + units.some(record["runs"], "run"), "length": 100 * value / longest,
            "low": 100 * low / longest if known else None, "width": 100 * (high - low) / longest if known else 0.0,
        })  # fmt: skip
    return bars


def _by_gpu(record: Record) -> Record:
    """Convert a row of a GPU comparison to the fields of a bar (see `_bars`)."""
    parts = [record[name] for name in ("model.id", "data", "name") if name in record]
    return {
        "recipe": ", ".join([*parts, canonical_name(record["value"])]), "tokens_per_s": record[TOKENS],
        "tokens_per_s_low": None, "tokens_per_s_high": None, "runs": record["runs"], "numbers": record["numbers"],
    }  # fmt: skip


# --- the runs --------------------------------------------------------------------------------------------------------


def _rows(records: Sequence[Record], headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[Record]:
    """Return one dict per run for the HTML table: number, id, state, CSS class, and (text, sort key) of each column."""
    sources = {column.heading: column.source for column in FIGURES}
    shown = []
    for index, (record, texts) in enumerate(zip(records, rows, strict=True), 1):
        values = {heading: figure(record, source) for heading, source in sources.items()}
        cells = [(text, f"{values[heading]:.9g}" if text and values.get(heading) is not None else None)
                 for heading, text in zip(headings, texts, strict=True) if heading != NUMBER]  # fmt: skip
        number, state = number_of(record) or str(index), str(record["state"])
        row = {"number": number, "run_id": str(record["run_id"]), "state": state, "cells": cells}
        shown.append(row | {"badge": _BADGES.get(state, "weak")})
    return shown


def _curves(records: Sequence[Record]) -> Record | None:
    """Return the loss curves of the fastest recipes, one curve per recipe and GPU. Return None if no loss fell by 2 %.

    `lines` has (name, SVG path) of each curve, in a square of 100 by 100 units. `steps` and `losses` are the lowest
    and the highest value of the axes."""
    runs = [(cell, run) for cell in cells_of(runs_of(records)) for run in cell.valid
            if figure(run.record, "loss.last") is not None]  # fmt: skip
    runs.sort(key=lambda pair: (pair[1].steady, _hourly(pair[1])))
    longest = {(cell.variant, cell.facts["gpu"]): (cell, run) for cell, run in runs}  # the last run is the longest
    chosen = sorted(longest.values(), key=lambda pair: -_hourly(pair[1]))[:MOST_CURVES]
    steps = [steps_of(run) for _, run in chosen]
    points = [[(step, loss) for step, loss in zip(run.numbers, run.columns["loss"], strict=True) if loss is not None]
              for run in steps]  # fmt: skip
    if not any(line and line[-1][1] < 0.98 * line[0][1] for line in points):
        return None
    ends = [(min(values), max(values)) for values in zip(*(point for line in points for point in line), strict=True)]
    (first, last), (low, high) = (int(ends[0][0]), int(ends[0][1])), ends[1]
    names = cell_names([cell for cell, _ in chosen])
    lines = [(name, _path(line, first, last, low, high)) for name, line in zip(names, points, strict=True)]
    return {"lines": lines, "steps": (first, last), "losses": (low, high)}


def _hourly(run: Run) -> float:
    return figure(run.record, "samples_per_hour") or 0.0


def _path(points: Sequence[tuple[int, float]], first: int, last: int, low: float, high: float) -> str:
    """Return the SVG path of a curve. Divide a long curve into equal parts, and draw only the lowest and the highest
    point of each part."""
    parts = min(len(points), MOST_POINTS // 2)
    kept = {*points[:1], *points[-1:]}
    for part in (points[len(points) * at // parts : len(points) * (at + 1) // parts] for at in range(parts)):
        kept |= {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
    width, height = max(last - first, 1), (high - low) or 1.0
    return "M" + "L".join(
        f"{100 * (step - first) / width:.2f},{100 * (high - loss) / height:.2f}" for step, loss in sorted(kept)
    )

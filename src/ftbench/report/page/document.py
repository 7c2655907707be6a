"""The whole page: head, sections, data, scripts, and a policy that lets nothing in from outside."""

from __future__ import annotations

import base64
import hashlib
from importlib import resources
from typing import Any

from ftbench import __version__
from ftbench.report.data import curves
from ftbench.report.page import bars, details, head, sections
from ftbench.report.page.markup import Markup, data_block, element, join
from ftbench.report.page.view import View, view
from ftbench.report.render.document import Report

_FIRST = ("decision", "comparison", "gate")  # what is read before the figures
_DRAWN = ("frontier",)  # what the page itself shows better
CURVE_BYTES = 900_000  # of the page: that of 150 runs stays below 1.5 MB


def page(report: Report) -> str:
    """Return one HTML document that needs nothing but itself: the runs of the report and its sections."""
    shown, answers = view(report), report.sections
    points = curves.points_for(len(shown.rows), CURVE_BYTES)
    drawn = curves.curves_of([None if row.profiled else details.folder(row) for row in shown.rows], points)
    longest = max((curve["steps"] for curve in drawn.values()), default=0)
    body = [
        head.head(shown),
        *(sections.answer(part, whole=True) for key in _FIRST for part in answers if part.key == key),
        sections.frontier(shown),
        sections.speed(shown),
        sections.runs(shown),
        sections.curves(shown, points if longest > points else None) if drawn else None,
        *(sections.answer(part) for part in answers if part.key not in (*_FIRST, *_DRAWN)),
        sections.notes(shown),
    ]
    return _document(head.title(shown), body, _data(shown, drawn))


def _data(shown: View, drawn: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Return what the script needs: figures as numbers, texts once."""
    known: dict[str, int] = {}
    texts: list[details.Pairs] = []

    def once(pairs: details.Pairs) -> int:
        key = repr(pairs)
        if key not in known:
            known[key] = len(texts)
            texts.append(pairs)
        return known[key]

    runs = [
        {
            "id": row.run_id, "label": row.label, "workload": row.workload, "gpu": row.gpu,
            "method": str(row.record["method"]), "batch": row.cell.batch, "state": row.state,
            "reason": str(row.record.get("reason") or ""), "warnings": list(map(str, row.record["warnings"])),
            "values": {key: float(f"{value:.9g}") for key, value in row.values.items()},
            "figures": details.figures(row), "facts": [once(pairs) for pairs in details.facts(row)],
        }
        for row in shown.rows
    ]  # fmt: skip
    labels = [label for label, _, _ in details.FIGURES]
    return {"runs": runs, "labels": labels, "facts": texts, "cells": bars.bars(shown), "curves": drawn}


def _asset(name: str) -> str:
    return resources.files("ftbench.report").joinpath("assets", name).read_text("utf-8")


def _document(title: str, body: list[Markup | None], data: dict[str, Any]) -> str:
    script = _asset("report.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Only this script runs; it sets styles on the elements that it makes.
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "base-uri 'none'; form-action 'none'"
    )
    top = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="referrer", content="no-referrer"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        Markup(f"<style>{_asset('report.css')}</style>"),
    )
    foot = element("footer", element("p", f"Made by ftbench {__version__} from the files of {len(data['runs'])} runs; "
                   "needs no connection and sends nothing."), class_="quiet")  # fmt: skip
    theme = element("button", "Light / dark", type="button", id="theme", class_="theme")
    without = Markup("<noscript><p class='caution'>Scripts are off: tables and notes are complete, figures, sorting "
                     "and run details are not shown.</p></noscript>")  # fmt: skip
    dialog = element("dialog", id="details", aria_labelledby="details-title")
    inline = data_block("data", data), Markup(f"<script>{script}</script>")
    inside = join(theme, without, element("main", *body), foot, dialog, *inline)
    return f'<!doctype html>\n<html lang="en">{top}<body>{inside}</body></html>\n'

"""The whole page: data for the template, and a policy that lets nothing in from outside."""

from __future__ import annotations

import base64
import hashlib
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined

from ftbench import __version__
from ftbench.report.data import curves
from ftbench.report.page import details, head
from ftbench.report.page.bars import bars
from ftbench.report.page.grids import grids
from ftbench.report.page.view import View, view
from ftbench.report.render.document import Report
from ftbench.report.render.runs_table import FOOTNOTE

CURVE_BYTES = 900_000  # of the page: that of 150 runs stays below 1.5 MB
# Marks that turn the direction of writing: text reads in the order in which it is written.
_TURNING = dict.fromkeys((0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)))


def page(report: Report) -> str:
    """Return one HTML document that needs nothing but itself: the runs of the report and its sections."""
    shown = view(report)
    points = curves.points_for(len(shown.rows), CURVE_BYTES)
    drawn = curves.curves_of([None if row.profiled else details.folder(row) for row in shown.rows], points)
    longest = max((curve["steps"] for curve in drawn.values()), default=0)
    script = _asset("report.js")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, finalize=_in_order)
    environment.policies["json.dumps_kwargs"] = {
        "ensure_ascii": False, "separators": (",", ":"), "allow_nan": False,
    }  # fmt: skip
    return environment.from_string(_asset("page.html")).render(
        title=head.title(shown), view=shown, workloads=head.answers(shown), grids=grids(shown),
        left_out=max(0, len(shown.workloads) - head.MOST), sections=report.sections, data=_data(shown, drawn),
        points=points if longest > points else None, footnote=FOOTNOTE, version=__version__, script=script,
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(), style=_asset("report.css"),
    ).lstrip()  # fmt: skip


def _in_order(value: Any) -> Any:
    return value.translate(_TURNING) if isinstance(value, str) else value


def _asset(name: str) -> str:
    return resources.files("ftbench.report").joinpath("assets", name).read_text("utf-8")


def _data(shown: View, drawn: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Return what the script needs: figures as numbers, texts once."""
    texts: dict[str, tuple[int, details.Pairs]] = {}
    runs = [
        {
            "id": row.run_id, "label": row.label, "workload": row.workload, "gpu": row.gpu,
            "method": str(row.record["method"]), "batch": row.cell.batch, "state": row.state,
            "reason": str(row.record.get("reason") or ""), "warnings": list(map(str, row.record["warnings"])),
            "values": {key: float(f"{value:.9g}") for key, value in row.values.items()},
            "figures": details.figures(row),
            "facts": [texts.setdefault(repr(pairs), (len(texts), pairs))[0] for pairs in details.facts(row)],
        }
        for row in shown.rows
    ]  # fmt: skip
    return {
        "runs": runs, "labels": [label for label, _, _ in details.FIGURES],
        "facts": [pairs for _, pairs in texts.values()], "cells": bars(shown), "curves": drawn,
    }  # fmt: skip

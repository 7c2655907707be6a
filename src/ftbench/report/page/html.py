"""Render the page: one HTML document with its data, style and script, and a policy that blocks other content."""

import base64
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from ftbench import __version__
from ftbench.core import units
from ftbench.report.data.facts import json_bytes, parse_json
from ftbench.report.document import Point, Report, Section
from ftbench.report.page import overview
from ftbench.report.page.charts import bars, curves, points_for
from ftbench.report.page.view import RUN_FIGURES, RunRow, View, number, view
from ftbench.report.runs_table import FOOTNOTE
from ftbench.store.rundir import first_gpu

Pairs = tuple[tuple[str, str], ...]
CURVE_BYTES = 900_000  # of the page, so that a page of 150 runs stays below 1.5 MB
MOST_CURVES = 150  # runs with curves; reading the steps of more takes longer than the rest of the page
# The groups of sections on the page. Other sections follow the curves.
_CUSTOM = ("decision", "frontier")  # have their own markup
_COMPARED = ("comparison", "gate")
_KERNELS = ("kernel_groups", "memory_by_category", "kernels")
_LAST = ("night", "energy", "cost", "memory", "trained")
_OF_WORKLOAD = ("model", "weights", "data")
_NAMING = (*_OF_WORKLOAD, "GPU", "batch")  # headings that identify a row
# Characters that change the writing direction can make text misleading.
_BIDI = re.compile("[\u200e\u200f\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True, slots=True)
class PlacedSection:
    """A section on the page.

    `rows` are the table rows, each with the indices of its workloads (empty: all). `workloads` are the indices of the
    section's workloads, `columns` those of the shown columns. `title` holds the shared values.
    """

    section: Section
    rows: list[tuple[str, list[str]]]
    workloads: str
    columns: list[int]
    title: str


@dataclass(frozen=True, slots=True)
class Bullet:
    """A point with its workloads and runs. The first point of a workload and GPU has a `heading`."""

    point: Point
    heading: str
    workloads: str
    rows: list[RunRow]


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
    text = environment.from_string(_asset("page.html")).render(
        title=overview.title(shown, 0), view=shown, grids=overview.grids(shown), data=_data(report, shown, drawn),
        bullets=_bullets(report, shown),
        cards=list(map(overview.cards, shown.cells)), **_placed(report, shown),
        points=points if longest > points else None, footnote=FOOTNOTE, version=__version__, script=script,
        drawn=len(drawn), with_steps=sum(not row.profiled for row in shown.rows),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(), style=_asset("report.css"),
    )  # fmt: skip
    return _BIDI.sub("", text).lstrip()


def _asset(name: str) -> str:
    return resources.files("ftbench.report").joinpath("assets", name).read_text("utf-8")


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


# --- sections --------------------------------------------------------------------------------------------------------


def _placed(report: Report, shown: View) -> dict[str, list[PlacedSection]]:
    """Return the sections by group."""
    parts = {section.key: _part(section, shown) for section in report.sections if section.key not in _CUSTOM}
    places = {"compared": _COMPARED, "kernels": _KERNELS, "last": _LAST}
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
    """Return the indices of the shown columns, and the shared values as a title.

    If the page shows one `chosen` workload at a time, its columns are hidden.
    """
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
    """Return the data for the script. Repeated texts are stored once."""
    texts: dict[Pairs, int] = {}
    runs = [
        {
            "id": row.run_id, "number": row.number, "way": row.cell.way, "workload": row.workload,
            "gpu": str(row.cell.facts["gpu"]),
            "method": str(row.record["method"]), "batch": row.cell.batch, "state": row.state,
            "reason": str(row.record.get("reason") or ""), "warnings": list(map(str, row.record["warnings"])),
            "values": {key: float(f"{value:.9g}") for key, value in row.values.items()},
            **dict(zip(("figures", "numbers"), _figure_texts(row), strict=True)),
            "facts": [texts.setdefault(pairs, len(texts)) for pairs in _run_facts(row)],
        }
        for row in shown.rows
    ]  # fmt: skip
    scaling = next((dict(section.curves) for section in report.sections if section.curves), {})
    return {
        "scaling": scaling, "runs": runs, "labels": [label for label, _, _ in RUN_FIGURES],
        "workloads": shown.workloads,
        "titles": [overview.title(shown, index) for index in range(len(shown.workloads))],
        "facts": list(texts), "cells": bars(shown), "curves": drawn,
    }  # fmt: skip


def _code(text: str) -> Markup:
    """Return escaped text for the page, with backticks as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


# --- details of one run ----------------------------------------------------------------------------------------------

# Only these fields of each file reach the page: label, section (empty: top level), keys.
_SHOWN: dict[str, tuple[tuple[str, str, tuple[str, ...]], ...]] = {
    "spec.json": (
        ("method", "method", ("name", "rank", "alpha", "dropout", "targets", "double_quant", "quant_type",
                              "compute_dtype")),
        ("train", "train", ("batch_size", "gradient_accumulation_steps", "epochs", "max_steps", "learning_rate",
                            "optimizer", "max_grad_norm", "precision", "scheduler", "seed")),
    ),
    "applied.json": (
        ("model", "model", ("class", "attention", "layers")), ("optimizer", "optimizer", ("class", "fused")),
        ("", "", ("product_precision", "autocast", "gradient_checkpointing", "loss", "fp8_layers", "compiled_graphs",
                  "compile_cache")),
    ),
    "machine.json": (
        ("GPU", "gpu", ("name", "driver", "power_limit_w", "sm_clock_max_mhz", "mig")),
        ("CPU", "cpu", ("model", "cores")), ("ftbench", "ftbench", ("version", "commit")),
        ("", "versions", ("torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes", "unsloth",
                          "liger-kernel")),
    ),
}  # fmt: skip


def _figure_texts(row: RunRow) -> tuple[list[str], list[float | None]]:
    """Return the RUN_FIGURES as texts (empty if unknown) and as numbers for sorting."""
    values = [number(row.record.get(source)) for _, source, _ in RUN_FIGURES]
    texts = ["" if value is None else text(value) for value, (_, _, text) in zip(values, RUN_FIGURES, strict=True)]
    if row.interval and texts[0]:
        low, high = map(units.seconds, row.interval)
        texts[0] += f" (95 %: {low} to {high})"
    return texts, [None if value is None else float(f"{value:.4g}") for value in values]


def _run_facts(row: RunRow) -> tuple[Pairs, ...]:
    """Return labels and texts of the spec, the applied configuration and the machine."""
    return _facts_of(*(json_bytes(row.folder / name) for name in _SHOWN))


@lru_cache(maxsize=8192)  # repeats share their files' contents
def _facts_of(*texts: bytes) -> tuple[Pairs, ...]:
    requested, applied, machine = map(parse_json, texts, _SHOWN)
    machine = {**machine, "gpu": first_gpu(machine)}
    model, kinds = applied.get("model", {}), applied.get("parameters", {}).get("by_kind", {})
    more: tuple[dict[str, str], ...] = (
        {
            f"optimizations {name.replace('_', ' ')}": _text(value)
            for name, value in requested.get("optimizations", {}).items() if value not in (False, "off", None)
        },
        {
            "weights, GiB": _listed(model.get("weights_gb_by_dtype", {}), units.gibibytes),
            "optimizer state": _listed(applied.get("optimizer", {}).get("state", {}), str),
            "trained": _listed({kind: line.get("trainable") for kind, line in kinds.items()}, units.parameters),
        },
        {"GPU memory": _listed({"GiB": machine["gpu"].get("memory_gb")}, units.gibibytes)},
    )  # fmt: skip
    return tuple(
        (*_pairs(document, shown), *((label, text) for label, text in texts.items() if text))
        for document, shown, texts in zip((requested, applied, machine), _SHOWN.values(), more, strict=True)
    )


def _pairs(document: Mapping[str, Any], sections: tuple[tuple[str, str, tuple[str, ...]], ...]) -> Pairs:
    return tuple(
        (f"{label} {name.replace('_', ' ')}".strip(), _text(part[name]))
        for label, section, names in sections for part in (document.get(section, {}) if section else document,)
        for name in names if isinstance(part.get(name), (str, int, float, list))
    )  # fmt: skip


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _listed(values: dict[str, Any], text: Callable[[Any], str]) -> str:
    return "; ".join(f"{name} {text(value)}" for name, value in values.items() if value)

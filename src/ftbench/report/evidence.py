"""What runs leave beside their figures: generations before and after, and profiles. Files of another form are passed
over: these are written by tools of several versions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ftbench.core import units
from ftbench.report.cells import Cell, Run, first_of, who
from ftbench.report.document import Section
from ftbench.report.tables import Table

_MOST_SAMPLES, _MOST_KERNELS = 5, 10


def generations(cells: Sequence[Cell]) -> Section | None:
    """What the model answers before and after, from samples.json: a list of `{prompt, before, after}`, bare or under
    `prompts` or `samples`; entries that are otherwise are left out."""
    records = [who(cell) | sample for cell in cells for sample in (first_of(cell, _samples) or [])]
    if not records:
        return None
    rows = [[str(r["method"]), str(r["batch"]), r["prompt"], r["before"], r["after"]] for r in records]
    headings = ["method", "batch", "prompt", "before", "after"]
    return Section("generations", "Before and after", Table({}, headings, rows, [], tuple(headings)), (), records)


def _samples(run: Run) -> list[dict[str, str]]:
    found = _document(run.dir.samples)
    listed = found.get("prompts", found.get("samples")) if isinstance(found, dict) else found
    entries = listed if isinstance(listed, list) else []
    names = ("prompt", "before", "after")
    return [
        {name: entry[name] if isinstance(entry.get(name), str) else "" for name in names}
        for entry in entries if isinstance(entry, dict) and isinstance(entry.get("prompt"), str)
    ][:_MOST_SAMPLES]  # fmt: skip


def _document(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None


_TIMES = (("time_ms", 1.0), ("time_us", 1e-3), ("time_s", 1e3))


def kernels(cells: Sequence[Cell]) -> Section | None:
    """The kernels that take most of the time, from profile/*.json: `kernels`, a list of `{name, time_ms (or _us, _s),
    calls}`; files of another form are left out."""
    records = [who(cell) | kernel for cell in cells for kernel in (first_of(cell, _kernels) or [])]
    if not records:
        return None
    rows = [
        [
            str(r["method"]),
            str(r["batch"]),
            r["kernel"],
            f"{r['time_ms']:,.1f}",
            units.percent(r["share"]),
            str(r["calls"] or ""),
        ]
        for r in records
    ]
    headings = ["method", "batch", "kernel", "ms", "share", "calls"]
    return Section("kernels", "Where the time goes", Table({}, headings, rows, [], ("kernel",)), (), records)


def _kernels(run: Run) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for path in sorted((run.dir.path / "profile").glob("*.json")):
        document = _document(path)
        listed = document.get("kernels") if isinstance(document, dict) else None
        found = [
            {"kernel": entry["name"], "time_ms": time, "calls": entry.get("calls")}
            for entry in (listed if isinstance(listed, list) else [])
            if isinstance(entry, dict) and isinstance(entry.get("name"), str) and (time := _time_ms(entry)) is not None
        ]
        if found:
            break
    total = sum(kernel["time_ms"] for kernel in found)
    found.sort(key=lambda kernel: -kernel["time_ms"])
    return [kernel | {"share": kernel["time_ms"] / total if total else None} for kernel in found[:_MOST_KERNELS]]


def _time_ms(entry: dict[str, Any]) -> float | None:
    for name, scale in _TIMES:
        value = entry.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0:
            return float(value) * scale
    return None

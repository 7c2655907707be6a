"""What runs leave beside their figures: generations before and after. Files of another form are passed over: these are
written by tools of several versions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ftbench.core.redact import clean
from ftbench.report.data.groups import Cell, Run, first_of, who
from ftbench.report.render.document import Section, Table

_MOST_SAMPLES = 5


def generations(cells: Sequence[Cell]) -> Section | None:
    """Return what the model answers before and after, from samples.json: a list of `{prompt, before, after}`, bare or
    under `prompts` or `samples`; entries that are otherwise are left out."""
    records = [who(cell) | sample for cell in cells for sample in (first_of(cell, _samples) or [])]
    if not records:
        return None
    rows = [[r["trained_by"], r["batch"], r["prompt"], r["before"], r["after"]] for r in records]
    headings = ["trained by", "batch", "prompt", "before", "after"]
    return Section("generations", "Before and after", Table({}, headings, rows, [], tuple(headings)), (), records)


def _samples(run: Run) -> list[dict[str, str]]:
    document = read_document(run.dir.samples)
    listed = document.get("prompts", document.get("samples")) if isinstance(document, dict) else document
    entries = listed if isinstance(listed, list) else []
    names = ("prompt", "before", "after")
    return [
        {name: entry[name] if isinstance(entry.get(name), str) else "" for name in names}
        for entry in entries if isinstance(entry, dict) and isinstance(entry.get("prompt"), str)
    ][:_MOST_SAMPLES]  # fmt: skip


def read_document(path: Path) -> Any:
    """Return what a JSON file holds, without secrets; None where it cannot be read."""
    try:
        return clean(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError):
        return None

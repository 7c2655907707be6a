"""Published figures beside the runs (`--references`): always labelled, matched where they can be, never a ratio.

A figure of another stack, recipe or way of counting tokens is no measurement of this one: it is shown with what it has
in common with the nearest run and with what it has not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from ftbench.core import units
from ftbench.core.hardware import canonical_name
from ftbench.facts import read_facts
from ftbench.report.data.groups import FIRST, PEAK, SAMPLES, TOKENS, Cell
from ftbench.report.render.document import Section, Table

LABEL = "Published, not measured here"
KEYS = ("model", "method", "data", "gpu", "batch")
_NAMES = {"model": "model", "method": "method", "data": "data", "gpu": "GPU", "batch": "batch"}
# What a source may tell: how it reads, and where the same figure of a run stands.
FIGURES = {
    "samples_per_hour": ("samples/h", SAMPLES), "tokens_per_s": ("tokens/s", TOKENS), "peak_gb": ("peak GiB", PEAK),
    "first_step_s": ("first step", FIRST),
}  # fmt: skip
_ROWS = ("published", "measured here", "in common", "not the same")


@dataclass(frozen=True, slots=True)
class References:
    """facts/references.yaml: `figures` as they stand there, sources by key, and what is to be known of them."""

    figures: tuple[Mapping[str, Any], ...]
    sources: Mapping[str, str]
    notes: tuple[str, ...]


@cache
def published() -> References:
    """Return the table that ships with ftbench."""
    data = read_facts("references.yaml")
    return References(tuple(data["figures"]), data["sources"], tuple(data["notes"]))


@dataclass(frozen=True, slots=True)
class Match:
    """A published entry beside the run that has most in common with it; `same` and `other` are keys that both know."""

    entry: Mapping[str, Any]
    cell: Cell | None
    same: tuple[str, ...]
    other: tuple[str, ...]


def beside(cells: Sequence[Cell]) -> Section:
    """Return every published figure; those of a model that was run first, each beside the cell that is nearest."""
    table = published()
    matches = sorted((match(entry, cells) for entry in table.figures), key=lambda matched: matched.cell is None)
    keys = list(dict.fromkeys(str(matched.entry["source"]) for matched in matches))
    headings = ["source", "model", "method", "data", "GPU", "batch", *_ROWS]
    rows = [_row(matched, keys) for matched in matches]
    notes = [f"[{number}] {table.sources[key]}" for number, key in enumerate(keys, start=1)]
    words = (
        f"{LABEL}: these figures are their sources' own, of other code, recipes and ways of counting. They are beside "
        "the run that has most in common with them; no ratio is given, since none would be of the GPUs alone.",
        *table.notes,
    )
    records = [_record(matched, table) for matched in matches]
    return Section("references", LABEL, Table({}, headings, rows, notes, tuple(headings)), words, records)


def match(entry: Mapping[str, Any], cells: Sequence[Cell]) -> Match:
    """Return the cell of the entry's model that agrees with it in most keys and that knows one of its figures; None
    where that model was not run."""
    best: Match | None = None
    for cell in cells:
        run_facts = _facts(cell)
        if "model" not in entry or not _same("model", entry["model"], run_facts["model"]):
            continue
        known = [key for key in KEYS if key in entry and run_facts[key]]
        same = tuple(key for key in known if _same(key, entry[key], run_facts[key]))
        matched = Match(entry, cell, same, tuple(key for key in known if key not in same))
        if best is None or (len(same), bool(cell.ok)) > (len(best.same), bool(best.cell and best.cell.ok)):
            best = matched
    return best or Match(entry, None, (), ())


def _facts(cell: Cell) -> dict[str, str]:
    facts = cell.facts
    data = facts.get("dataset.name", "")
    like = facts.get("dataset.like", "none")
    return {
        "model": facts.get("model.id", ""), "method": facts.get("method.name", ""),
        "data": f"{data} like {like}" if like != "none" else data, "gpu": facts["gpu"],
        "batch": facts.get("train.batch_size", ""),
    }  # fmt: skip


def _same(key: str, published: Any, measured: str) -> bool:
    if key == "gpu":
        return canonical_name(measured) == str(published)
    if key == "model":
        return _plain(measured) == _plain(str(published))
    return measured == str(published)


def _plain(model: str) -> str:
    """Return `meta-llama/Llama-3.1-8B-Instruct` → `llama318binstruct`: names differ in their punctuation."""
    return re.sub(r"[^a-z0-9]", "", model.rsplit("/", 1)[-1].lower())


def _figures(entry: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(entry[name]) for name in FIGURES if name in entry}


def _measured(matched: Match) -> dict[str, float | None]:
    if matched.cell is None:
        return {}
    values = {name: matched.cell.figure(FIGURES[name][1]) for name in _figures(matched.entry)}
    if (rate := values.get("samples_per_hour")) is not None:
        values["samples_per_hour"] = rate * 3600
    return values


def _text(figures: Mapping[str, float | None]) -> str:
    parts = []
    for name, value in figures.items():
        if value is not None:
            text = {"peak_gb": units.gibibytes, "first_step_s": units.seconds}.get(name, units.rate)(value)
            parts.append(f"{FIGURES[name][0]} {text}")
    return ", ".join(parts)


def _row(matched: Match, keys: Sequence[str]) -> list[str]:
    entry, cell = matched.entry, matched.cell
    texts = [str(entry.get(key, "")) for key in ("model", "method", "data", "gpu", "batch")]
    texts[1] = " ".join(filter(None, (texts[1], f"with {entry['with']}" if "with" in entry else "")))
    value = "; ".join(filter(None, (_text(_figures(entry)), entry.get("text", ""))))
    measured = _text(_measured(matched))
    where = f" ({cell.name} on {cell.facts['gpu']})" if cell else ""
    run_facts = _facts(cell) if cell else {}
    other = ", ".join(f"{_NAMES[key]} ({run_facts[key]})" for key in matched.other)
    same = ", ".join(_NAMES[key] for key in matched.same)
    return [
        f"[{keys.index(str(entry['source'])) + 1}]",
        *texts,
        value,
        f"{measured}{where}" if measured else "",
        same,
        other,
    ]


def _record(matched: Match, table: References) -> dict[str, Any]:
    entry, cell = matched.entry, matched.cell
    return {
        "label": LABEL, "source": table.sources[str(entry["source"])],
        **{key: entry.get(key) for key in (*KEYS, "with", "text")},
        **{f"published.{name}": entry.get(name) for name in FIGURES},
        **{f"measured.{name}": value for name, value in _measured(matched).items()},
        "run_ids": " ".join(run.run_id for run in cell.runs) if cell else None,
        "in_common": " ".join(matched.same), "not_the_same": " ".join(matched.other),
    }  # fmt: skip

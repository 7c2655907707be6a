"""Published figures beside the runs (`--references`): always labelled, matched where they can be, never a ratio.

A figure of another stack, recipe or way of counting tokens is no measurement of this one: it is shown with what it has
in common with the nearest run and with what it has not.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ftbench.core import units
from ftbench.core.hardware import canonical_name
from ftbench.facts import read_facts
from ftbench.report.data.groups import FIRST, PEAK, SAMPLES, TOKENS, Cell
from ftbench.report.render.document import Section, table_of_rows

LABEL = "Published, not measured here"
KEYS = ("model", "method", "data", "gpu", "batch")
_NAMES = {key: key for key in KEYS} | {"gpu": "GPU"}
# What a source may tell: how it reads, where the same figure of a run stands, and how a figure becomes text.
FIGURES: dict[str, tuple[str, str, Callable[[float | None], str]]] = {
    "samples_per_hour": ("samples/h", SAMPLES, units.rate), "tokens_per_s": ("tokens/s", TOKENS, units.rate),
    "peak_gb": ("peak GiB", PEAK, units.gibibytes), "first_step_s": ("first step", FIRST, units.seconds),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Match:
    """A published entry beside the run that has most in common with it; `same` and `other` are keys that both know."""

    entry: Mapping[str, Any]
    cell: Cell | None = None
    same: tuple[str, ...] = ()
    other: tuple[str, ...] = ()


def beside(cells: Sequence[Cell]) -> Section:
    """Return every published figure; those of a model that was run first, each beside the cell that is nearest."""
    table = read_facts("references.yaml")
    matches = sorted((match(entry, cells) for entry in table["figures"]), key=lambda matched: matched.cell is None)
    keys = list(dict.fromkeys(str(matched.entry["source"]) for matched in matches))
    rows = [{"source": f"[{keys.index(str(matched.entry['source'])) + 1}]"} | _row(matched) for matched in matches]
    notes = [f"[{number}] {table['sources'][key]}" for number, key in enumerate(keys, start=1)]
    words = (
        f"{LABEL}: these figures are their sources' own, of other code, recipes and ways of counting. They are beside "
        "the run that has most in common with them; no ratio is given, since none would be of the GPUs alone.",
        *table["notes"],
    )
    records = [_record(matched, table["sources"]) for matched in matches]
    return Section("references", LABEL, table_of_rows(rows, notes, list(rows[0])), words, records)


def match(entry: Mapping[str, Any], cells: Sequence[Cell]) -> Match:
    """Return the cell of the entry's model that agrees with it in most keys and that knows one of its figures; None
    where that model was not run."""
    matches = [Match(entry)]
    for cell in cells:
        measured = _facts(cell)
        if "model" in entry and _same("model", entry["model"], measured["model"]):
            shared = [key for key in KEYS if key in entry and measured[key]]
            same = tuple(key for key in shared if _same(key, entry[key], measured[key]))
            matches.append(Match(entry, cell, same, tuple(key for key in shared if key not in same)))
    return max(matches, key=lambda match: (len(match.same), bool(match.cell and match.cell.ok)))


def _facts(cell: Cell) -> dict[str, str]:
    facts = cell.facts
    data, like = facts.get("dataset.name", ""), facts.get("dataset.like", "none")
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


def _measured(matched: Match) -> dict[str, float | None]:
    """Return the figures of the run that the source tells too."""
    if (cell := matched.cell) is None:
        return {}
    values = {name: cell.figure(source) for name, (_, source, _) in FIGURES.items() if name in matched.entry}
    hourly = {name: value * 3600 for name, value in values.items() if name == "samples_per_hour" and value is not None}
    return values | hourly


def _text(figures: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{heading} {text(float(figures[name]))}" for name, (heading, _, text) in FIGURES.items()
        if figures.get(name) is not None
    )  # fmt: skip


def _row(matched: Match) -> dict[str, str]:
    entry, cell, measured = matched.entry, matched.cell, _text(_measured(matched))
    names = {key: str(entry.get(key, "")) for key in KEYS}
    names["method"] = " ".join(filter(None, (names["method"], f"with {entry['with']}" if "with" in entry else "")))
    facts = _facts(cell) if cell else {}
    return {
        "model": names.pop("model"), "method": names.pop("method"),
        "published": "; ".join(filter(None, (_text(entry), entry.get("text", "")))),
        "measured here": f"{measured} ({cell.name} on {cell.facts['gpu']})" if measured and cell else "",
        **{_NAMES[key]: text for key, text in names.items()},
        "in common": ", ".join(_NAMES[key] for key in matched.same),
        "not the same": ", ".join(f"{_NAMES[key]} ({facts[key]})" for key in matched.other),
    }  # fmt: skip


def _record(matched: Match, sources: Mapping[str, str]) -> dict[str, Any]:
    entry, cell = matched.entry, matched.cell
    return {
        "label": LABEL, "source": sources[str(entry["source"])],
        **{key: entry.get(key) for key in (*KEYS, "with", "text")},
        **{f"published.{name}": entry.get(name) for name in FIGURES},
        **{f"measured.{name}": value for name, value in _measured(matched).items()},
        "run_ids": " ".join(run.run_id for run in cell.runs) if cell else None,
        "in_common": " ".join(matched.same), "not_the_same": " ".join(matched.other),
    }  # fmt: skip

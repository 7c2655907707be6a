"""The table of runs as text. The row of a failed run contains the reason instead of figures."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ftbench.core import units
from ftbench.report.data.axes import MOST_AXES, headings
from ftbench.report.data.cells import number_of, run_of
from ftbench.report.data.collect import Record, data_labels, long_reason, state_of
from ftbench.report.data.facts import CPU
from ftbench.report.data.groups import RUNS, short_value
from ftbench.report.document import Column, Table, table_of

CONTEXT = {"model": "model", "weights": "weights", "gpu": "GPU", "data": "data", "optimizations": "with"}
FOOTNOTE = (
    "step: median step time in the steady window. tokens/s: tokens per second, without padding. samples/h: tokens/s "
    "divided by the mean sample length. peak GiB: peak memory of all tensors (on a CPU: peak memory of the process)."
)
_SHOWN = ("model", "dataset", "method", "train.batch_size", "train.gradient_accumulation_steps", "optimizations")
MOST_NAMED = 4  # run numbers in a note
_FIGURE = re.compile(r"\d+([.,]\d+)*")
NUMBER, NAME, LABEL = "#", "recipe", "label"

# The first figures come before the state, because a narrow terminal hides the last columns.
FIGURES = (
    Column("tokens/s", "tokens_per_s.real", units.rate, True),
    Column("peak GiB", "memory_gb.allocated_peak", units.gibibytes),
    Column("step", "step_time_s.median", units.seconds),
    Column("samples/h", "samples_per_hour", units.rate, True),
    Column("images/s", "images_per_s.images", units.rate, True),
    Column("generated/s", "tokens_per_s.generated", units.rate, True),
    Column("MFU", "mfu", units.percent, True),
    Column("eval loss", "loss.eval", lambda value: f"{value:.3f}"),
    Column("first step", "first_step_s", units.seconds),
)
_FIRST_FIGURES, _LONGEST_FIGURE = 3, 12
_OPTIONAL = ("mfu", "loss.eval", "images_per_s.images", "tokens_per_s.generated")


def runs_table(records: Sequence[Record], axes: Sequence[str] = ()) -> Table:
    """Return a table with one row per run: number, name, figures, and the settings that vary.

    Columns with the same value in all rows move into the title. Empty columns are omitted. `axes` are record fields of
    varying spec keys. A field gets a column if no other column shows it."""
    texts = [context_of(record, label) for record, label in zip(records, data_labels(records), strict=True)]
    differing = [name for name in CONTEXT if len({text[name] for text in texts}) > 1]
    context = {CONTEXT[name]: texts[0][name] for name in CONTEXT if texts and name not in differing}
    axes = [key for key in axes if key not in _SHOWN and not key.startswith("optimizations.")]
    hidden = [f"{len(axes) - MOST_AXES} more keys vary: use --format csv to see all"] if len(axes) > MOST_AXES else []
    axes = axes[:MOST_AXES]
    columns = {NUMBER: [number_of(record) for record in records], NAME: [record.get(LABEL, "") for record in records]}
    columns = {heading: cells for heading, cells in columns.items() if any(cells)} | _figures(records)
    apart = {CONTEXT[name]: [text[name] for text in texts] for name in differing}
    columns |= {name: apart.pop(name) for name in ("GPU", "data") if name in apart}
    varying = {name: [short_value(str(record[key])) for record in records]
               for name, key in zip(headings(axes), axes, strict=True)}  # fmt: skip
    columns |= varying
    columns |= {"method": [str(record["method"]) for record in records], "batch": _batches(records)} | apart
    words = tuple(name for name, cells in varying.items()
                  if any(cell[-1:].isalpha() or len(cell) > _LONGEST_FIGURE for cell in cells))  # fmt: skip
    return table_of(columns, [*hidden, *_notes(records)], words, context)


def _figures(records: Sequence[Record]) -> dict[str, list[str]]:
    """Return {heading: texts} for figures, repeats and states. If all runs are ok, states are left out."""
    figures = {
        column.heading: [_figure(record, column) for record in records] for column in FIGURES
        if column.source not in _OPTIONAL or any(record.get(column.source) is not None for record in records)
    }  # fmt: skip
    first = {heading: figures.pop(heading) for heading in list(figures)[:_FIRST_FIGURES]} | _costs(records)
    merged = {RUNS: [str(record[RUNS]) for record in records]} if any(RUNS in record for record in records) else {}
    states = [state_of(record) for record in records]
    return first | ({"state": states} if set(states) != {"ok"} else {}) | merged | figures


def _costs(records: Sequence[Record]) -> dict[str, list[str]]:
    """Return a column with the cost of 1,000 samples on rented GPUs, or on owned GPUs if the rent is unknown."""
    names = [(f"cost.{way}.per_1k_samples", f"cost.{way}.currency") for way in ("rent", "owned")]
    costs = [next((units.money(record[price], record[currency]) for price, currency in names
                   if record.get(price) is not None), "") for record in records]  # fmt: skip
    return {"1k samples": costs} if any(costs) else {}


def _batches(records: Sequence[Record]) -> list[str]:
    accumulated = len({record["gradient_accumulation_steps"] for record in records}) > 1
    return [f"{record['batch_size']}" + (f"x{record['gradient_accumulation_steps']}" if accumulated else "")
            for record in records]  # fmt: skip


def context_of(record: Record, label: str) -> dict[str, str]:
    on = ", ".join(record["optimizations"]).replace("_", " ")
    return {
        "model": str(record["model"]).rsplit("/", 1)[-1], "weights": str(record["weights"]),
        "gpu": record["gpu"] if isinstance(record["gpu"], str) else CPU, "data": label, "optimizations": on or "none",
    }  # fmt: skip


def _figure(record: Mapping[str, Any], column: Column) -> str:
    """Return the text of a figure. The text is empty for a failed run."""
    value = record.get(column.source) if record["state"] == "ok" else None
    return "" if value is None else column.text(value)


def _notes(records: Sequence[Record]) -> list[str]:
    """Return the warnings and the long failure reasons of all runs, each with the numbers of its runs.

    Sentences that differ only in their numbers are shown once.
    """
    kinds: dict[str, tuple[str, list[str], list[str]]] = {}
    for record in records:
        for text in filter(None, [long_reason(record), *record["warnings"]]):
            known, first, others = kinds.setdefault(_FIGURE.sub("0", text), (text, [], []))
            if (run := run_of(record)) not in (*first, *others):  # repeats have the number of their row
                (first if text == known else others).append(run)
    notes = []
    for text, first, others in kinds.values():
        if len(first) == len(records) > 1:
            notes.append(text)
        else:
            similar = f" (similar: {units.listed(others, MOST_NAMED)})" if others else ""
            notes.append(f"{units.listed(first, MOST_NAMED)}: {text}{similar}")
    return notes

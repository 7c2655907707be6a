"""The table of single runs, as text. Failed runs keep their row with the reason and empty figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ftbench.core import units
from ftbench.report.data.axes import MOST_AXES, headings
from ftbench.report.data.collect import Record, data_labels
from ftbench.report.data.facts import CPU
from ftbench.report.data.groups import long_reason, state_of
from ftbench.report.data.repeats import RUNS
from ftbench.report.render.document import Table

CONTEXT = {"model": "model", "weights": "weights", "gpu": "GPU", "data": "data", "optimizations": "with"}
FOOTNOTE = (
    "Median step and real (non-padding) tokens of the steady window; samples/h are real tokens over the mean length of "
    "the data; GiB of tensors at the peak (on a CPU: of the process)."
)
_IN_COLUMNS = ("model", "dataset", "method", "train.batch_size", "train.gradient_accumulation_steps", "optimizations")
_NAMED = 4  # runs by name in a note


@dataclass(frozen=True, slots=True)
class Column:
    """One figure: heading, where it stands in a record, how it becomes text."""

    heading: str
    source: str
    text: Callable[[Any], str]


FIGURES = (
    Column("step", "step_time_s.median", units.seconds),
    Column("samples/h", "samples_per_hour", units.rate),
    Column("tokens/s", "tokens_per_s.real", units.rate),
    Column("peak GiB", "memory_gb.allocated_peak", units.gibibytes),
    Column("MFU", "mfu", units.percent),
    Column("first step", "first_step_s", units.seconds),
    Column("eval loss", "loss.eval", lambda value: f"{value:.3f}"),
)
_OPTIONAL = ("mfu", "loss.eval")


def runs_table(records: Sequence[Record], axes: Sequence[str] = ()) -> Table:
    """Return one row a run. Columns in which all rows agree move into the title; a column that no row fills is left
    out. `axes` are fields of the records, named by their keys in the spec, that get a column if none shows them."""
    texts = [_context(record, label) for record, label in zip(records, data_labels(records), strict=True)]
    differing = [name for name in CONTEXT if len({text[name] for text in texts}) > 1]
    context = {CONTEXT[name]: texts[0][name] for name in CONTEXT if texts and name not in differing}
    figures = [
        column for column in FIGURES
        if column.source not in _OPTIONAL or any(record.get(column.source) is not None for record in records)
    ]  # fmt: skip
    axes = [key for key in axes if key not in _IN_COLUMNS and not key.startswith("optimizations.")]
    hidden = [f"{len(axes) - MOST_AXES} more keys vary: --format csv shows all"] if len(axes) > MOST_AXES else []
    axes = axes[:MOST_AXES]
    accumulated = len({record["gradient_accumulation_steps"] for record in records}) > 1
    merged = [RUNS] if any(RUNS in record for record in records) else []
    names = [
        *(CONTEXT[name] for name in differing), "method", "batch", *headings(axes),
        *(column.heading for column in figures), *merged, "state",
    ]  # fmt: skip
    rows = [
        [
            *(text[name] for name in differing), str(record["method"]),
            f"{record['batch_size']}" + (f"x{record['gradient_accumulation_steps']}" if accumulated else ""),
            *(str(record[key]) for key in axes), *(_figure(record, column) for column in figures),
            *(str(record[key]) for key in merged), state_of(record),
        ]
        for record, text in zip(records, texts, strict=True)
    ]  # fmt: skip
    return Table(context, names, rows, [*hidden, *_notes(records)])


def _context(record: Record, label: str) -> dict[str, str]:
    on = ", ".join(record["optimizations"]).replace("_", " ")
    return {
        "model": str(record["model"]).rsplit("/", 1)[-1], "weights": str(record["weights"]),
        "gpu": record["gpu"] if isinstance(record["gpu"], str) else CPU, "data": label, "optimizations": on or "none",
    }  # fmt: skip


def _figure(record: Mapping[str, Any], column: Column) -> str:
    """Return a figure's text; a run that did not end well has none to compare."""
    value = record.get(column.source)
    return "" if record["state"] != "ok" or value is None else column.text(value)


def _notes(records: Sequence[Record]) -> list[str]:
    """Return the warnings of all runs, each once with the runs it is about, and the reasons that a row has no room
    for."""
    about: dict[str, list[str]] = {}
    for record in records:
        for warning in filter(None, [long_reason(record), *record["warnings"]]):
            about.setdefault(warning, []).append(record["run_id"])
    return [
        warning if len(runs) == len(records) > 1 else f"{named(runs)}: {warning}" for warning, runs in about.items()
    ]


def named(runs: Sequence[str]) -> str:
    """Return the first few of some runs by name, and how many more there are."""
    more = f" and {len(runs) - _NAMED} more" if len(runs) > _NAMED else ""
    return ", ".join(runs[:_NAMED]) + more

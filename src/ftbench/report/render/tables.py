"""The comparison table: what a row shows, as text. Failed runs keep their row with the reason and empty figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ftbench.core import units
from ftbench.report.data.collect import varying
from ftbench.report.data.layout import MOST_AXES, RUNS
from ftbench.report.data.layout import headings as headings_of

if TYPE_CHECKING:
    import pandas as pd

CONTEXT = {"model": "model", "weights": "weights", "gpu": "GPU", "data": "data", "optimizations": "with"}
SHOWN = ("model", "dataset", "method", "train.batch_size", "train.gradient_accumulation_steps", "optimizations")
_CPU = "none (CPU)"
_SHORT_REASON = 48
_NAMED = 4  # runs by name in a note


@dataclass(frozen=True, slots=True)
class Column:
    """One figure: heading, where it stands in the frame, how it becomes text."""

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


@dataclass(frozen=True, slots=True)
class Table:
    """What all rows share (`context`, for the title), headings, rows of text, and notes below."""

    context: dict[str, str]
    headings: list[str]
    rows: list[list[str]]
    notes: list[str]
    text: tuple[str, ...] = ()  # headings whose columns hold words, beside those every table has


def comparison(frame: pd.DataFrame, axes: Sequence[str] = ()) -> Table:
    """One row a run. Columns in which all rows agree move into the title; a column that no row fills is left out.
    `axes` are columns of the frame, named by their keys in the spec, that get one in the table if none shows them."""
    frame = frame.assign(
        gpu=[gpu if isinstance(gpu, str) else _CPU for gpu in frame["gpu"]],
        model=[str(model).rsplit("/", 1)[-1] for model in frame["model"]],
        optimizations=[", ".join(found).replace("_", " ") or "none" for found in frame["optimizations"]],
        data=data_labels(frame),
    )
    differing = varying(frame, CONTEXT)
    context = {CONTEXT[name]: str(frame[name].iloc[0]) for name in CONTEXT if name in frame and name not in differing}
    figures = [
        column for column in FIGURES
        if column.source in frame and (column.source not in _OPTIONAL or frame[column.source].notna().any())
    ]  # fmt: skip
    axes = [key for key in axes if key not in SHOWN and not key.startswith("optimizations.")]
    hidden = [f"{len(axes) - MOST_AXES} more keys vary: --format csv shows all"] if len(axes) > MOST_AXES else []
    axes = axes[:MOST_AXES]
    accumulation = frame["gradient_accumulation_steps"].nunique() > 1
    runs = [RUNS] if RUNS in frame else []
    headings = [
        *(CONTEXT[name] for name in differing), "method", "batch", *headings_of(axes),
        *(column.heading for column in figures), *runs, "state",
    ]  # fmt: skip
    shared = ["method", "batch_size", "gradient_accumulation_steps", "state", "reason"]
    needed = dict.fromkeys([*differing, *shared, *axes, *runs, *(column.source for column in figures)])
    rows = []
    for record in frame[[*needed]].to_dict("records"):
        batch = str(record["batch_size"]) + (f"x{record['gradient_accumulation_steps']}" if accumulation else "")
        shown = [_shown(record, column) for column in figures]
        places = [str(record[key]) for key in axes]
        named = [str(record[name]) for name in differing]
        counts = [record[key] for key in runs]
        rows.append([*named, record["method"], batch, *places, *shown, *counts, state_of(record)])
    return Table(context, headings, rows, [*hidden, *_notes(frame)])


def _shown(record: Mapping[Any, Any], column: Column) -> str:
    """A figure's text; a run that did not end well has none to compare."""
    value = record[column.source]
    if record["state"] != "ok" or value is None or value != value:
        return ""
    return column.text(value)


def state_of(record: Mapping[Any, Any]) -> str:
    reason = record.get("reason")
    if record["state"] == "ok" or not isinstance(reason, str):
        return str(record["state"])
    if record["state"] == "skipped":
        return f"skipped ({reason})"
    short = reason if len(reason) <= _SHORT_REASON else reason[: _SHORT_REASON - 1] + "…"
    return f"{record['state']}: {short}".replace("oom: out of memory", "oom")


def data_labels(frame: pd.DataFrame) -> list[str]:
    """The data set of each row and, where known, the mean length of its samples in tokens: `alpaca ~110`. A run that
    ended before it knew the length has that of the others with the same data set, if they agree."""
    names, means = frame.get("dataset.name"), frame.get("dataset.tokens.mean")
    if names is None:
        return ["unknown"] * len(frame)
    found: dict[Any, set[str]] = {}
    texts: list[str] = []
    for name, mean in zip(names, means if means is not None else [None] * len(frame), strict=True):
        known = isinstance(name, str) and mean is not None and mean == mean
        texts.append(f"{name} ~{mean:.0f}" if known else "")
        found.setdefault(name, set()).update(texts[-1:] if known else [])
    return [
        text or (next(iter(found[name])) if len(found[name]) == 1 else name if isinstance(name, str) else "unknown")
        for name, text in zip(names, texts, strict=True)
    ]


def _notes(frame: pd.DataFrame) -> list[str]:
    """The warnings of all runs, each once with the runs it is about, and the reasons that a row has no room for."""
    about: dict[str, list[str]] = {}
    for record in frame[["run_id", "state", "reason", "warnings"]].to_dict("records"):
        reason = record.get("reason")
        in_full = record["state"] in ("ok", "skipped")
        long = [reason] if isinstance(reason, str) and len(reason) > _SHORT_REASON and not in_full else []
        for warning in [*long, *record["warnings"]]:
            about.setdefault(warning, []).append(record["run_id"])
    everyone = len(frame)
    return [
        warning if len(runs) == everyone and everyone > 1 else f"{named(runs)}: {warning}"
        for warning, runs in about.items()
    ]


def named(runs: Sequence[str]) -> str:
    more = f" and {len(runs) - _NAMED} more" if len(runs) > _NAMED else ""
    return ", ".join(runs[:_NAMED]) + more

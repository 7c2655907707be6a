"""The runs of the page: cell, workload and figures of each, and the columns of the table of all runs."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ftbench.core import units
from ftbench.report.data.axes import MOST_AXES, headings
from ftbench.report.data.cells import Cell, Run, number_of
from ftbench.report.data.collect import Record, long_reason, state_of
from ftbench.report.data.groups import cells_of, runs_of
from ftbench.report.document import Column, Report
from ftbench.report.runs_table import FIGURES, group_similar
from ftbench.store.summary import PROFILED

NUMBERS = {
    "step": "step_time_s.median", "samples": "samples_per_hour", "tokens": "tokens_per_s.real",
    "peak": "memory_gb.allocated_peak", "energy": "energy.joules_per_1k_samples",
}  # fmt: skip
RUN_FIGURES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("median step", "step_time_s.median", units.seconds),
    ("fastest tenth of the steps, at most", "step_time_s.p10", units.seconds),
    ("slowest tenth, at least", "step_time_s.p90", units.seconds),
    ("first step", "first_step_s", units.seconds),
    ("until speed is steady", "time_to_steady_s", units.seconds),
    ("steps", "steps.total", units.count),
    ("of which steady", "steps.steady", units.count),
    ("samples per hour", "samples_per_hour", units.rate),
    ("real tokens/s", "tokens_per_s.real", units.rate),
    ("images/s", "images_per_s.images", units.rate),
    ("positions computed/s, padding included", "tokens_per_s.padded", units.rate),
    ("tokens with loss/s", "tokens_per_s.label", units.rate),
    ("GiB allocated at the peak", "memory_gb.allocated_peak", units.gibibytes),
    ("GiB reserved at the peak", "memory_gb.reserved_peak", units.gibibytes),
    ("GiB used on the device at the peak", "memory_gb.device_peak", units.gibibytes),
    ("GiB of the host's memory at the peak", "memory_gb.host_peak", units.gibibytes),
    ("model TFLOP/s", "model_tflops", lambda value: f"{value:.3g}"),
    ("MFU", "mfu", units.percent),
    ("HFU", "hfu", units.percent),
    ("MFU against the measured product rate", "mfu_measured", units.percent),
    ("GPU busy", "bound.gpu_busy", units.percent),
    ("waiting for batches", "bound.data_wait", units.percent),
    ("joules per 1,000 samples, GPU only", "energy.joules_per_1k_samples", units.rate),
    ("mean watts, GPU only", "energy.mean_watts", units.rate),
    ("idle watts", "energy.idle_watts", units.rate),
    ("loss of the first step", "loss.first", lambda value: f"{value:.4f}"),
    ("loss of the last step", "loss.last", lambda value: f"{value:.4f}"),
    ("evaluation loss", "loss.eval", lambda value: f"{value:.4f}"),
    ("parameters", "parameters.total", lambda value: units.parameters(int(value))),
    ("trained", "parameters.trainable", lambda value: units.parameters(int(value))),
    ("wall time", "phases_s.total", units.seconds),
)


def number(value: Any) -> float | None:
    """Return a finite number, or None."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


@dataclass(frozen=True)
class RunRow:
    """A run on the page: its number in the table, its cell, and the index of its workload."""

    number: int
    record: Record
    cell: Cell
    workload: int

    @property
    def run_id(self) -> str:
        return str(self.record["run_id"])

    @cached_property
    def folder(self) -> Path:
        return Path(str(self.record["path"]))

    @property
    def state(self) -> str:
        return str(self.record["state"])

    @property
    def profiled(self) -> bool:
        """Whether the run was profiled, so that its step times are not valid."""
        return PROFILED in self.record["warnings"]

    @cached_property
    def values(self) -> dict[str, float]:
        """The known NUMBERS of a successful run."""
        if self.state != "ok" or self.profiled:
            return {}
        known = {name: number(self.record.get(source)) for name, source in NUMBERS.items()}
        return {name: value for name, value in known.items() if value is not None}

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the median step, in seconds."""
        ends = self.record.get("step_time_s.ci95")
        return (ends[0], ends[1]) if self.values and isinstance(ends, (list, tuple)) else None


@dataclass(frozen=True)
class RunColumn:
    """A column of the table of all runs: texts, and sort keys (None: sort by text).

    If `varies`, the column is hidden while all shown runs have the same value.
    """

    heading: str
    texts: Sequence[str]
    order: Sequence[float | None]
    varies: bool = False

    @cached_property
    def in_words(self) -> bool:
        """Whether the column sorts by text."""
        return all(value is None for value in self.order)


@dataclass(frozen=True)
class View:
    """All runs of the page. `workloads` (model, weights and data) are sorted by their number of runs.

    Only runs of one workload are compared.
    """

    rows: list[RunRow]
    workloads: list[str]
    columns: list[RunColumn]
    context: str

    @cached_property
    def cells(self) -> list[list[Cell]]:
        """The cells of each workload in the order of their first run, without profiled runs."""
        cells: list[dict[int, Cell]] = [{} for _ in self.workloads]
        for row in self.rows:
            if not row.profiled:
                cells[row.workload][id(row.cell)] = row.cell
        return [list(each.values()) for each in cells]

    @cached_property
    def by_path(self) -> dict[str, RunRow]:
        return {str(row.record["path"]): row for row in self.rows}

    @cached_property
    def notes(self) -> list[tuple[str, list[RunRow]]]:
        """The warnings and long failure reasons, each once with its runs, the most frequent first.

        Sentences that differ only in figures are shown once.
        """
        sentences = [(text, row) for row in self.rows
                for text in filter(None, [long_reason(row.record), *map(str, row.record["warnings"])])]  # fmt: skip
        kinds = group_similar(sentences)
        notes = [(f"{text} (others: similar)" if others else text, own + others) for text, own, others in kinds]
        return sorted(notes, key=lambda note: -len(note[1]))

    def workloads_of(self, run_ids: str) -> str:
        """Return the indices of the workloads of some runs (ids separated by spaces), separated by spaces."""
        return " ".join(sorted({str(index) for name in run_ids.split() for index in self._of_id.get(name, ())}))

    @cached_property
    def _of_id(self) -> dict[str, set[int]]:
        places: dict[str, set[int]] = {}
        for row in self.rows:
            places.setdefault(row.run_id, set()).add(row.workload)
        return places


def view(report: Report) -> View:
    """Return the records of a report as rows, in their order."""
    records = report.records
    apart: dict[bool, list[Run]] = {False: [], True: []}  # by whether profiled
    for run in runs_of(records):
        apart[PROFILED in run.record["warnings"]].append(run)
    groups = [*cells_of(apart[False]), *cells_of(apart[True])]
    by_path = {run.record["path"]: cell for cell in groups for run in cell.runs}
    cells = [by_path[record["path"]] for record in records]
    names = [_workload(cell) for cell in cells]
    workloads = [name for name, _ in Counter(names).most_common()]
    indices = {name: index for index, name in enumerate(workloads)}
    rows = [
        RunRow(int(number_of(record) or row_number), record, cell, indices[name])
        for row_number, (record, cell, name) in enumerate(zip(records, cells, names, strict=True), start=1)
    ]
    shared = [*(workloads if len(workloads) == 1 else []), *_only(str(cell.facts["gpu"]) for cell in cells)]
    return View(rows, workloads, _columns(rows, report, workloads), ", on ".join(shared))


def _workload(cell: Cell) -> str:
    model, weights, data = cell.workload
    return ", ".join(filter(None, (model.rsplit("/", 1)[-1], f"{weights} weights" if weights else "", data)))


def _only(texts: Iterable[str]) -> list[str]:
    """Return a list with the shared text, or an empty list if the texts differ."""
    distinct = list(dict.fromkeys(texts))
    return distinct if len(distinct) == 1 else []


def _columns(rows: Sequence[RunRow], report: Report, workloads: Sequence[str]) -> list[RunColumn]:
    """Return the columns named on the command line, or the default ones.

    Defaults: name, state (unless all are ok), figures, varying settings.
    """
    if report.columns:
        return [_figures(column, [row.record for row in rows]) for column in report.columns]
    axes = report.axes
    columns = [
        _words("trained by", [row.cell.way for row in rows]),
        _counts("batch", [row.cell.batch for row in rows], varies=False),
    ]
    states = [state_of(row.record) for row in rows]
    columns += [_words("state", states)] if set(states) != {"ok"} else []
    ended_well = [row.record if row.state == "ok" else {} for row in rows]
    figures = (_figures(column, ended_well) for column in FIGURES)
    columns += [column for column in figures if not column.in_words]
    more = {"GPU": [str(row.cell.facts["gpu"]) for row in rows], "method": [str(row.record["method"]) for row in rows],
            "workload": [workloads[row.workload] for row in rows]}  # fmt: skip
    columns += [_words(name, texts, varies=True) for name, texts in more.items() if len(set(texts)) > 1]
    shown = {column.heading for column in columns}
    for key, heading in zip(axes[:MOST_AXES], headings(axes[:MOST_AXES]), strict=True):
        if heading not in shown:
            columns.append(_counts(heading, [str(row.record[key]) for row in rows], varies=True))
    return columns


def _figures(column: Column, records: Sequence[Record]) -> RunColumn:
    values = [record.get(column.source) for record in records]
    texts = ["" if value is None else column.text(value) for value in values]
    return RunColumn(column.heading, texts, [number(value) for value in values])


def _words(heading: str, texts: Sequence[str], varies: bool = False) -> RunColumn:
    return RunColumn(heading, texts, [None] * len(texts), varies)


def _counts(heading: str, texts: Sequence[str], varies: bool) -> RunColumn:
    return RunColumn(heading, texts, [leading_number(text) for text in texts], varies)


def leading_number(text: str) -> float | None:
    """Return the number at the start of a text such as `4x2`, or None."""
    try:
        return number(float(text.partition("x")[0].replace(",", "")))
    except ValueError:
        return None

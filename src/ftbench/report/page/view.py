"""What the page shows of each run: its group of repeats, its workload, and the columns of the table of all runs."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ftbench.report.data.axes import MOST_AXES, headings
from ftbench.report.data.collect import Record, long_reason, state_of
from ftbench.report.data.groups import Cell, Run, cells_of, runs_of
from ftbench.report.data.names import number_of
from ftbench.report.page.figures import NUMBERS, number
from ftbench.report.render.document import Column, Report
from ftbench.report.render.runs_table import FIGURES, alike
from ftbench.store.summary import PROFILED


@dataclass(frozen=True)
class RunRow:
    """A run as the page's sections see it: its number in the table, the group of repeats that it belongs to, and the
    index of its workload among those of the page."""

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
        """Whether its steps were recorded, so that their times are no measurement."""
        return PROFILED in self.record["warnings"]

    @cached_property
    def values(self) -> dict[str, float]:
        """NUMBERS where it ended well and they are known."""
        if self.state != "ok" or self.profiled:
            return {}
        known = {name: number(self.record.get(source)) for name, source in NUMBERS.items()}
        return {name: value for name, value in known.items() if value is not None}

    @property
    def interval(self) -> tuple[float, float] | None:
        """Low and high end of the median step."""
        ends = self.record.get("step_time_s.ci95")
        return (ends[0], ends[1]) if self.values and isinstance(ends, (list, tuple)) else None


@dataclass(frozen=True)
class RunColumn:
    """A column of the table of all runs: a text for each run, and what each sorts by (None: its text). One that
    `varies` is there because runs differ in it, and says nothing where those that are shown do not."""

    heading: str
    texts: Sequence[str]
    order: Sequence[float | None]
    varies: bool = False

    @cached_property
    def in_words(self) -> bool:
        """Whether it sorts by its texts."""
        return all(value is None for value in self.order)


@dataclass(frozen=True)
class View:
    """All runs, those of the workload with most runs numbered from 0 in `workloads`: only runs of one workload (model,
    weights and data) are compared."""

    rows: list[RunRow]
    workloads: list[str]
    columns: list[RunColumn]
    context: str

    @cached_property
    def cells(self) -> list[list[Cell]]:
        """The groups of repeats of each workload, in the order of their first, without profiled runs."""
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
        """The warnings of all runs and the reasons that a table has no room for, each once with its runs, those of most
        runs first; of those that differ in figures alone the first."""
        sentences = [(text, row) for row in self.rows
                for text in filter(None, [long_reason(row.record), *map(str, row.record["warnings"])])]  # fmt: skip
        kinds = alike(sentences)
        notes = [(f"{text} (the others: alike)" if others else text, own + others) for text, own, others in kinds]
        return sorted(notes, key=lambda note: -len(note[1]))

    def workloads_of(self, run_ids: str) -> str:
        """Return the places of the workloads of some runs, given by their ids, with spaces between them."""
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
    apart: dict[bool, list[Run]] = {False: [], True: []}  # profiled runs are of specs of their own, and no measurement
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
    """Return the one text that all are; none where they differ."""
    distinct = list(dict.fromkeys(texts))
    return distinct if len(distinct) == 1 else []


def _columns(rows: Sequence[RunRow], report: Report, workloads: Sequence[str]) -> list[RunColumn]:
    """Return the columns: what names a run, how it ended (where not all ended well), its figures, and then what varies;
    those that the command names, where it names some."""
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
    figures = (_figures(column, ended_well) for column in FIGURES)  # a reader can choose more
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
    """Return the number that a text begins with, as `4x2` does; None where it begins with none."""
    try:
        return number(float(text.partition("x")[0].replace(",", "")))
    except ValueError:
        return None

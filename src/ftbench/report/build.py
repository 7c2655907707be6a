"""`ftbench report`: build the records and sections that the command line requests, and render them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ftbench.errors import SpecError
from ftbench.report import answer, formats, select
from ftbench.report.data import groups
from ftbench.report.data.cells import Cell, Run
from ftbench.report.data.collect import Record, collect
from ftbench.report.data.groups import cells_of, runs_of
from ftbench.report.document import Report, Section
from ftbench.spec.experiment import DAMAGED, RECORDED
from ftbench.store.summary import PROFILED

if TYPE_CHECKING:
    from ftbench.spec.prices import Prices

NIGHT_H = 8.0  # hours of a night

_REPEATS = ("auto", "each", "merge")
_NOT_TIMED = (PROFILED, DAMAGED, RECORDED)  # warnings of runs whose speed is not valid


@dataclass(frozen=True, slots=True)
class Request:
    """The options of `ftbench report`."""

    paths: Sequence[Path]
    format: str = "table"
    compare: str | None = None
    baseline: str | None = None
    repeats: str = "auto"
    answers: bool = False
    hours: float | None = None
    prices: Path | None = None
    where: Sequence[str] = ()
    sort: str | None = None

    @property
    def every_answer(self) -> bool:
        return self.answers or self.hours is not None or self.format == "html"


def report(request: Request) -> str:
    """Read the runs, and return the report as text. Raise SpecError for invalid options."""
    _check(request)
    records = select.matching(collect(request.paths), request.where)
    prices = _prices(request, records)
    runs = runs_of(records)
    sections = _sections(request, runs, prices)
    if request.compare is not None and request.format != "html":
        return formats.render(Report((), sections=sections, runs=False), request.format)
    shown, axes = groups.with_axes(groups.merge_repeats(runs) if _merges(request) else runs)
    if prices:
        from ftbench.report.sections import cost

        shown = cost.with_costs(shown, prices, request.hours or NIGHT_H)
    shown = select.arranged(shown, request.sort)
    return formats.render(Report(shown, axes, sections, request.compare is None), request.format)


def _merges(request: Request) -> bool:
    """Return whether repeated runs share a row. The default is true only for folders of scripts/studies/records."""
    if request.repeats != "auto" or request.format not in ("table", "md"):
        return request.repeats == "merge"
    return any(any(path.glob(name)) for path in request.paths for name in ("sitting.json", "*/sitting.json"))


def _prices(request: Request, records: Sequence[Record]) -> Prices | None:
    if request.prices is None:
        return None
    from ftbench.spec.prices import load_prices

    return load_prices(request.prices, {record["gpu"] for record in records if isinstance(record["gpu"], str)})


def _sections(request: Request, runs: Sequence[Run], prices: Prices | None) -> list[Section]:
    """Return the answer and the sections that the options request."""
    parts = answer.sections(cells_of(runs), full=request.every_answer)
    if not (request.every_answer or request.prices or request.compare is not None):
        return parts
    measured = [run for run in runs if not any(text.startswith(_NOT_TIMED) for text in run.record["warnings"])]
    if request.compare is not None:
        from ftbench.report.compare import comparison, pairs

        if not measured:
            raise SpecError("--compare: all runs were profiled, so their speeds are not valid: add other runs")
        compared = pairs.compare(measured, request.compare, request.baseline)
        parts.append(comparison.section(compared))
    return [part for part in [*parts, *_of_measured(request, cells_of(measured), prices)] if part is not None]


def _of_measured(request: Request, cells: Sequence[Cell], prices: Prices | None) -> Iterator[Section | None]:
    from ftbench.report.sections import cost, throughput

    hours = request.hours or NIGHT_H
    yield throughput.scaling(cells)
    if request.every_answer:
        yield throughput.night(cells, hours)
    if request.every_answer or prices:
        yield cost.energy(cells)
    if prices:
        yield cost.money(cells, prices, hours)


def _check(request: Request) -> None:
    problems = []
    formats.known_format(request.format)
    if request.repeats not in _REPEATS:
        problems.append(f"--rows {request.repeats}: allowed are {', '.join(_REPEATS)}")
    if request.compare is None and request.baseline is not None:
        problems.append("--baseline needs an axis: add for example --compare method")
    if request.compare is not None and request.sort:
        problems.append("--sort applies to the table of runs: remove --compare")
    if request.hours is not None and not 0 < request.hours < 24 * 366:
        problems.append(f"--hours {request.hours:g}: give a number of hours above 0, for example 8")
    if problems:
        raise SpecError(*problems)

"""`ftbench report`: build the records and sections that the command line requests, and render them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ftbench.core.units import NIGHT_H
from ftbench.errors import SpecError
from ftbench.report import answer, formats, select
from ftbench.report.data import groups
from ftbench.report.data.cells import Cell, Run
from ftbench.report.data.collect import Record, collect
from ftbench.report.data.groups import cells_of, runs_of
from ftbench.report.document import Report, Section

if TYPE_CHECKING:
    from ftbench.spec.prices import Prices


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
    against: Path | None = None
    fail_above: str | None = None
    prices: Path | None = None
    where: Sequence[str] = ()
    sort: str | None = None

    @property
    def every_answer(self) -> bool:
        return self.answers or self.hours is not None or self.format == "html"


@dataclass(frozen=True, slots=True)
class Rendered:
    """The text of a report, and whether `--against` found a regression."""

    text: str
    regressed: bool = False


def report(request: Request) -> Rendered:
    """Read the runs and render the report. Raise SpecError for invalid options."""
    _check(request)
    records = select.matching(collect(request.paths), request.where)
    if request.against is not None:
        return _gate(request, records, request.against)
    prices = None
    if request.prices is not None:
        from ftbench.spec.prices import load_prices

        prices = load_prices(request.prices, {record["gpu"] for record in records if isinstance(record["gpu"], str)})
    runs = runs_of(records)
    sections = _sections(request, runs, prices)
    if request.compare is not None and request.format != "html":
        return Rendered(formats.render(Report((), sections=sections, runs=False), request.format))
    shown, axes = groups.with_axes(groups.merge_repeats(runs) if _merges(request) else runs)
    if prices:
        from ftbench.report.sections import cost

        shown = cost.with_costs(shown, prices, request.hours or NIGHT_H)
    shown = select.arranged(shown, request.sort)
    return Rendered(formats.render(Report(shown, axes, sections, request.compare is None), request.format))


def _merges(request: Request) -> bool:
    """Return whether repeated runs share a row. The default is true only for folders of scripts/studies/records."""
    if request.repeats != "auto" or request.format not in ("table", "md"):
        return request.repeats == "merge"
    return any(any(path.glob(name)) for path in request.paths for name in ("sitting.json", "*/sitting.json"))


def _gate(request: Request, records: Sequence[Record], earlier: Path) -> Rendered:
    from ftbench.report.compare import gate

    limit = gate.limit_of("5%" if request.fail_above is None else request.fail_above)
    section, regressed = gate.gate(records, select.matching(collect([earlier]), request.where), limit)
    text = formats.render(Report(records, sections=[section], runs=False), request.format)
    return Rendered(text, bool(regressed))


def _sections(request: Request, runs: Sequence[Run], prices: Prices | None) -> list[Section]:
    """Return the answer and the sections that the options request."""
    parts = answer.sections(cells_of(runs), full=request.every_answer)
    if not (request.every_answer or request.compare is not None or request.prices):  # no section needs speeds
        return parts
    marks = tuple(answer.NOT_TIMED)
    measured = [run for run in runs if not any(text.startswith(marks) for text in run.record["warnings"])]
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
    if request.compare is None and request.baseline is not None:
        problems.append("--baseline needs an axis: add for example --compare method")
    if (request.compare is not None or request.against is not None) and request.sort:
        problems.append("--sort applies to the table of runs: remove --compare or --against")
    if request.against is None and request.fail_above is not None:
        problems.append("--fail-above needs --against with the folder of the earlier runs")
    others = {"--compare": request.compare, "--answers": request.answers, "--prices": request.prices,
              "--hours": request.hours, "--rows": request.repeats not in ("auto", "each")}  # fmt: skip
    given = " and ".join(name for name, value in others.items() if value)
    if request.against is not None and given:
        problems.append(f"--against cannot be combined with {given}: leave it out")
    if problems:
        raise SpecError(*problems)

"""`ftbench report`: build the records and sections that the command line requests, and render them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ftbench.errors import SpecError
from ftbench.report import formats, select
from ftbench.report.data import groups
from ftbench.report.data.cells import Cell, Run
from ftbench.report.data.collect import Record, collect
from ftbench.report.data.groups import cells_of, runs_of
from ftbench.report.document import Report, Section
from ftbench.report.sections import cost
from ftbench.spec.controls import DAMAGED, RECORDED
from ftbench.spec.prices import Prices, load_prices
from ftbench.store.summary import PROFILED

_REPEATS = ("each", "merge")
_WITH_COLUMNS = ("table", "md")


@dataclass(frozen=True, slots=True)
class Request:
    """The options of the command line."""

    paths: Sequence[Path]
    format: str = "table"
    compare: str | None = None
    baseline: str | None = None
    strict: bool = False
    repeats: str = "each"
    answers: bool = False
    hours: float | None = None
    against: Path | None = None
    fail_above: str | None = None
    prices: Path | None = None
    where: Sequence[str] = ()
    sort: str | None = None
    columns: Sequence[str] = ()

    @property
    def every_answer(self) -> bool:
        return self.answers or self.hours is not None or self.format == "html"

    @property
    def any_measured(self) -> bool:
        """Whether a requested section needs speeds."""
        return self.every_answer or bool(self.compare is not None or self.prices)


@dataclass(frozen=True, slots=True)
class Rendered:
    """The text, and whether `--against` found a regression."""

    text: str
    regressed: bool = False


def report(request: Request) -> Rendered:
    """Read the runs and render the report. Raise SpecError for invalid options."""
    _check(request)
    records = select.matching(collect(request.paths), request.where)
    if request.against is not None:
        return _gate(request, records, request.against)
    gpus = {record["gpu"] for record in records if isinstance(record["gpu"], str)}
    prices = None if request.prices is None else load_prices(request.prices, gpus)
    sections = _sections(request, records, prices)
    if request.compare is not None and request.format != "html":
        return Rendered(formats.render(Report((), sections=sections, runs=False), request.format))
    shown = groups.merge_repeats(records) if request.repeats == "merge" else records
    shown, axes = groups.with_axes(cost.with_costs(shown, prices, request.hours or cost.NIGHT_H))
    shown, columns = select.arranged(shown, request.sort, request.columns)
    return Rendered(formats.render(Report(shown, axes, columns, sections, request.compare is None), request.format))


def _gate(request: Request, records: Sequence[Record], earlier: Path) -> Rendered:
    from ftbench.report.compare import gate

    limit = gate.limit_of("5%" if request.fail_above is None else request.fail_above)
    result = gate.gate(records, select.matching(collect([earlier]), request.where), limit)
    text = formats.render(Report(records, sections=gate.sections(result), runs=False), request.format)
    return Rendered(text, bool(result.regressed))


def _sections(request: Request, records: Sequence[Record], prices: Prices | None) -> list[Section]:
    profiled = [record for record in records if PROFILED in record["warnings"]]  # their speeds are not valid
    with_images = any(record.get("images_per_s.images") for record in records)
    if not profiled and not request.any_measured and not with_images:
        return []
    from ftbench.report.sections import profiles

    left_out = (PROFILED, DAMAGED, RECORDED)
    measured = [each for each in records if not any(text.startswith(left_out) for text in each["warnings"])]
    runs = runs_of(measured) if request.any_measured or with_images else []
    cells, profile_cells = cells_of(runs), cells_of(runs_of(profiled))
    parts = _of_measured(request, runs, cells, profile_cells, prices) if request.any_measured else []
    if with_images:
        from ftbench.report.sections import image_study

        parts += image_study.sections(cells)
    parts.append(profiles.groups(profile_cells))
    if request.every_answer:
        parts += [profiles.memory(profile_cells), profiles.kernels([*cells, *profile_cells])]
    return [part for part in parts if part is not None]


def _of_measured(
    request: Request, runs: Sequence[Run], cells: Sequence[Cell], profiled: Sequence[Cell], prices: Prices | None
) -> list[Section | None]:
    from ftbench.report.compare import comparison, pairs
    from ftbench.report.sections import decision, scaling
    from ftbench.report.sections.answers import answers

    hours = request.hours or cost.NIGHT_H
    parts: list[Section | None] = []
    if request.compare is not None:
        if not runs:
            raise SpecError("--compare: all runs were profiled, so their speeds are not valid: add other runs")
        parts.append(comparison.section(pairs.compare(runs, request.compare, request.baseline, strict=request.strict)))
    if request.every_answer or request.compare or prices:
        parts += scaling.sections(cells, profiled, prices)
    parts.append(decision.decision(cells))
    if request.every_answer:
        parts += answers(cells, hours, curves=request.format != "html")  # the page draws curves instead
    parts.append(cost.energy(cells) if request.every_answer or prices else None)
    parts.append(cost.money(cells, prices, hours) if prices else None)
    return parts


def _check(request: Request) -> None:
    problems = []
    formats.known_format(request.format)
    if request.repeats not in _REPEATS:
        problems.append(f"--rows {request.repeats}: allowed are {', '.join(_REPEATS)}")
    if request.compare is None and (request.baseline is not None or request.strict):
        problems.append("--baseline and --strict need an axis: add for example --compare method")
    if request.columns and request.format not in _WITH_COLUMNS:
        problems.append(f"--columns needs --format table or md: --format {request.format} always contains every field")
    if (request.compare is not None or request.against is not None) and (request.sort or request.columns):
        problems.append("--sort and --columns apply to the table of runs: remove --compare or --against")
    if request.against is None and request.fail_above is not None:
        problems.append("--fail-above needs --against with the folder of the earlier runs")
    if request.against is not None and request.compare is not None:
        problems.append("--against and --compare cannot be combined: run the command twice")
    others = {"--answers": request.answers, "--prices": request.prices, "--hours": request.hours,
              "--rows": request.repeats != "each"}  # fmt: skip
    if request.against is not None and any(others.values()):
        given = " and ".join(name for name, value in others.items() if value)
        problems.append(f"--against cannot be combined with {given}: leave it out")
    if request.hours is not None and not 0 < request.hours < 24 * 366:
        problems.append(f"--hours {request.hours:g}: give a number of hours above 0, for example 8")
    if problems:
        raise SpecError(*problems)

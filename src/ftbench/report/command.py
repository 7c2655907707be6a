"""`ftbench report`: the command line → a frame and sections, rendered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ftbench.errors import SpecError
from ftbench.report.assemble import Parts, assembled
from ftbench.report.compare import gate, table
from ftbench.report.compare.pairs import compare
from ftbench.report.data import layout
from ftbench.report.data.collect import collect
from ftbench.report.data.groups import Run, cells_of, runs_of
from ftbench.report.render import formats
from ftbench.report.render.document import Section
from ftbench.report.sections import cost, estimates, profiles, references
from ftbench.report.sections.answers import NIGHT_H, answers
from ftbench.report.sections.decision import decision
from ftbench.spec.prices import Prices, load_prices
from ftbench.store.summary import PROFILED

if TYPE_CHECKING:
    import pandas as pd

_REPEATS = ("each", "merge")


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for on the command line, as it was typed."""

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
    references: bool = False
    estimates: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """The text, and whether something regressed (`--against`)."""

    text: str
    regressed: bool = False


def report(request: Request) -> Result:
    """Reads the runs and renders what was asked for. Raises SpecError for a mistake in the command."""
    _check(request)
    frame = collect(request.paths)
    if request.against is not None:
        found = gate.gate(
            frame, collect([request.against]), gate.limit_of("5%" if request.fail_above is None else request.fail_above)
        )
        parts = Parts(frame, (), gate.sections(found), runs=False)
        return Result(assembled(parts, request.format), bool(found.regressed))
    gpus = {gpu for gpu in frame["gpu"] if isinstance(gpu, str)}
    prices = None if request.prices is None else load_prices(request.prices, gpus)
    sections = _sections(request, frame, prices)
    merged = layout.merge_repeats(frame) if request.repeats == "merge" else frame
    merged = cost.with_costs(merged, prices, request.hours or NIGHT_H)
    shown, axes = layout.with_axes(merged)
    return Result(assembled(Parts(shown, axes, sections, runs=request.compare is None), request.format))


def _sections(request: Request, frame: pd.DataFrame, prices: Prices | None) -> list[Section]:
    page = request.format == "html"  # has room for every answer, and draws the curves itself
    every = request.answers or request.hours is not None or page
    recorded = frame["warnings"].map(lambda warnings: PROFILED in warnings)  # no speed is taken from these
    profiled = cells_of(runs_of(frame[recorded]))
    found: list[Section | None] = []
    if every or request.compare is not None or prices is not None or request.references or request.estimates:
        measured = runs_of(frame[~recorded])
        found += _of_measured(request, measured, prices, every, page)
    found.append(profiles.groups(profiled))
    if every:
        found.append(profiles.memory(profiled))
        found.append(profiles.kernels([*cells_of(measured), *profiled]))
    return [section for section in found if section is not None]


def _of_measured(
    request: Request, runs: Sequence[Run], prices: Prices | None, every: bool, page: bool
) -> list[Section | None]:
    cells = cells_of(runs)
    found: list[Section | None] = []
    if request.compare is not None and not runs:
        raise SpecError("--compare: all of these runs were profiled, so none has a speed: `ftbench profile --diff A B`")
    if request.compare is not None:
        found.append(table.section(compare(runs, request.compare, request.baseline, strict=request.strict)))
    found.append(decision(cells))
    if every:
        found += answers(cells, request.hours or NIGHT_H, curves=not page)
    return [
        *found,
        cost.energy(cells) if every or prices else None,
        cost.money(cells, prices, request.hours or NIGHT_H) if prices else None,
        references.beside(cells) if request.references else None,
        estimates.memory(runs) if request.estimates else None,
        estimates.time(runs) if request.estimates else None,
    ]


def _check(request: Request) -> None:
    problems = []
    formats.known_format(request.format)
    if request.repeats not in _REPEATS:
        problems.append(f"--repeats {request.repeats}: allowed are {', '.join(_REPEATS)}")
    if request.compare is None and (request.baseline is not None or request.strict):
        problems.append("--baseline and --strict belong to a comparison: name its axis with --compare method")
    if request.against is None and request.fail_above is not None:
        problems.append("--fail-above belongs to --against: name the folder with the earlier runs")
    if request.against is not None and request.compare is not None:
        problems.append("--against and --compare are two questions: ask them one after the other")
    if request.hours is not None and not 0 < request.hours < 24 * 366:
        problems.append(f"--hours {request.hours:g}: give a number of hours above 0, for example 8")
    if problems:
        raise SpecError(*problems)

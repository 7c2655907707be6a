"""Points on frameworks, for work that several of them trained."""

from collections.abc import Iterator, Sequence

from ftbench.core import units
from ftbench.report.compare.pairs import Noise, pair_of
from ftbench.report.compare.words import change_in_words
from ftbench.report.data.axes import FRAMEWORK, NO_OPTIMIZATION, OPTIMIZATIONS, SETTINGS, TRL, value_at
from ftbench.report.data.cells import PEAK, SAMPLES, Cell
from ftbench.report.document import Point
from ftbench.report.sections.rows import point

_CLOSE = 1.05  # speeds within this factor are summarized as a difference


def framework_points(measured: Sequence[Cell], noise: Noise) -> Iterator[Point]:
    """Yield points for each method, objective and batch that several frameworks trained.

    Compare the fastest framework with the next, list the others, and list all at plain settings. The framework of an
    imported log is unknown, so it is skipped.
    """
    measured = [cell for cell in measured if FRAMEWORK in cell.facts]
    groups: dict[tuple[str, ...], list[Cell]] = {}
    for cell in sorted(measured, key=_rate, reverse=True):
        key = (cell.facts.get("method.name", ""), cell.facts.get("objective.name", "sft"), cell.batch)
        groups.setdefault(key, []).append(cell)
    for (method, objective, batch), cells in groups.items():
        fastest: dict[str, Cell] = {}
        for cell in cells:
            fastest.setdefault(_framework(cell), cell)
        if len(fastest) > 1:
            work = method + ("" if objective == "sft" else f" by {objective}")
            yield from _points(f"{work} at batch {batch}", list(fastest.values()), cells, noise)
    ours, theirs = ([cell for cell in measured if (_framework(cell) == TRL) is own] for own in (True, False))
    if ours and all(map(_is_plain, ours)) and not all(map(_is_plain, theirs)):
        yield point("trl was run with plain settings only: its best are recipes (`ftbench list recipes`).", *ours)


def _points(work: str, fastest: Sequence[Cell], cells: Sequence[Cell], noise: Noise) -> Iterator[Point]:
    first, second, *others = fastest
    speed = pair_of(FRAMEWORK, first, second, noise=noise).speed
    words = f"{change_in_words(speed)} against {_figures(second)}"
    if speed and speed.verdict == "not distinguishable":
        words = f"not distinguishable in speed from {_figures(second)}"
    rest = f"; then {', '.join(map(_figures, others))}" if others else ""
    yield point(f"Framework for {work}: {_figures(first)}, {words}{rest}.", *fastest)
    plain = {_framework(cell): cell for cell in cells if _is_plain(cell)}
    if len(plain) > 1:
        yield point(f"Plain settings, {work}: {_spread(plain)}.", *plain.values(), also=_other_work(plain))


def _spread(plain: dict[str, Cell]) -> str:
    most, least = (f(map(_rate, plain.values())) for f in (max, min))
    if most < _CLOSE * least:
        return f"{', '.join(plain)} are within {(most / least - 1):.1%} of each other".replace("%", " %")
    return ", ".join(f"{name} {units.rate(3600 * _rate(cell))}" for name, cell in plain.items()) + " samples/h"


def _other_work(plain: dict[str, Cell]) -> str:
    """Return the unexpected differences between the plain runs, keys only. `--compare framework` has the values."""
    baseline = plain.get(TRL) or next(iter(plain.values()))
    pairs = (pair_of(FRAMEWORK, cell, baseline) for cell in plain.values() if cell is not baseline)
    keys = dict.fromkeys(fact.key.rpartition(".")[2].replace("_", " ") for pair in pairs for fact in pair.differences)
    return f"not the same work in {', '.join(keys)}" if keys else ""


def _framework(cell: Cell) -> str:
    return cell.facts[FRAMEWORK]


def _is_plain(cell: Cell) -> bool:
    return cell.facts.get(SETTINGS, "plain") == "plain" and value_at(OPTIMIZATIONS, cell.facts) == NO_OPTIMIZATION


def _figures(cell: Cell) -> str:
    """Return `axolotl's best lora (23,590 samples/h, 47.0 GiB)`."""
    peak = cell.figure(PEAK)
    gib = "" if peak is None else f", {units.gibibytes(peak)} GiB"
    return f"{cell.way} ({units.rate(3600 * _rate(cell))} samples/h{gib})"


def _rate(cell: Cell) -> float:
    return cell.figure(SAMPLES) or 0.0

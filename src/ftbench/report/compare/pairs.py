"""`ftbench report --compare`: each cell beside the cell of the baseline that agrees with it in everything else.

The records here belong to no renderer: report/compare_table.py makes a table and flat rows of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from ftbench.core import compare as core
from ftbench.core.compare import BreakEven, Difference, Ratio
from ftbench.core.learning import CANNOT_TELL, NOT_FINITE, Learning, learning_verdict, not_finite
from ftbench.errors import SpecError
from ftbench.report.data import steps as steps_csv
from ftbench.report.data.facts import NO_OPTIMIZATION, OPTIMIZATIONS, RECIPE, SHORT, implied, on_axis, value_at
from ftbench.report.data.groups import ENERGY, FIRST, PEAK, SAMPLES, TOKENS, Cell, Run, cells_of
from ftbench.report.data.layout import known
from ftbench.spec.base import nearest
from ftbench.spec.loss_tolerance import tolerance
from ftbench.spec.methods import METHODS
from ftbench.store.rundir import RunDir

# Nothing is paired across these, unless they are what is compared.
_HARD = (
    "gpu", "model.id", "method.name", "dataset.name", "dataset.path", "dataset.length", "dataset.mean_length",
    "dataset.like",
)  # fmt: skip
_PLAIN = {OPTIMIZATIONS: (NO_OPTIMIZATION,), RECIPE: ("plain", NO_OPTIMIZATION)}


@dataclass(frozen=True, slots=True)
class Pair:
    """A cell and its partner. `differences` is what keeps the two from being the same recipe; the ratios are candidate
    over baseline, None where a side lacks the figure; `reason` says why there is no pair or no ratio."""

    cell: Cell
    baseline: Cell | None
    differences: tuple[Difference, ...] = ()
    speed: Ratio | None = None
    memory: Ratio | None = None
    first_step: Ratio | None = None
    energy: Ratio | None = None
    break_even: BreakEven | None = None
    learning: Learning | None = None
    reason: str = ""

    @property
    def iso(self) -> bool:
        """The same recipe but for the thing compared."""
        return self.baseline is not None and not self.differences


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything about one axis. `axis` is its key, `baseline` the value that the others are held against, `cells` all
    cells in the order of the table, `pairs` one for each that is not of the baseline; `dropped` counts the pairs that
    `--strict` left out."""

    axis: str
    baseline: str
    cells: tuple[Cell, ...]
    pairs: tuple[Pair, ...]
    dropped: int = 0

    def place(self, cell: Cell) -> str:
        return value_at(self.axis, cell.facts) or "unknown"


def compare(runs: Sequence[Run], axis: str, baseline: str | None = None, *, strict: bool = False) -> Comparison:
    """Holds runs (`cells.runs_of` a frame) against each other along `axis`: a short name (`gpu`, `method`, `batch`, …),
    a key of the spec, or a fact of the machine. Raises SpecError for an axis or a baseline that is not there."""
    key = axis_key(axis, runs)
    cells = cells_of(runs, key)
    chosen = _baseline(key, cells, baseline)
    find = _partners(key, [cell for cell in cells if value_at(key, cell.facts) == chosen])
    pairs = [pair_of(key, cell, *find(cell)) for cell in cells if value_at(key, cell.facts) != chosen]
    kept = [pair for pair in pairs if pair.iso] if strict else pairs
    dropped = sum(pair.baseline is not None for pair in pairs) - sum(pair.baseline is not None for pair in kept)
    if strict:
        kept = [pair for pair in pairs if pair.iso or pair.baseline is None]
    return Comparison(key, chosen, tuple(cells), tuple(kept), dropped)


def axis_key(axis: str, runs: Sequence[Run]) -> str:
    """The fact that `--compare axis` means. Raises SpecError where no run has it, or where all agree on it."""
    key = SHORT.get(axis, axis)
    present = dict.fromkeys(name for run in runs for name in (*run.spec, *run.ran))
    if key not in (*present, "gpu", OPTIMIZATIONS, RECIPE):
        names = [*SHORT, *present]
        raise SpecError(
            f"--compare {axis}: no run has such a key{nearest(axis, names)} (gpu, method, batch, optimization, recipe, "
            "framework, model, or a key of `ftbench list keys`)"
        )
    places = dict.fromkeys(value_at(key, cell.facts) or "unknown" for cell in cells_of(runs, key))
    if len(places) < 2:
        varying = [name for name in SHORT.values() if len({value_at(name, cell.facts) for cell in cells_of(runs)}) > 1]
        told = f": what varies here is {', '.join(dict.fromkeys(varying))}" if varying else ""
        raise SpecError(f"--compare {axis}: all runs have {next(iter(places))}, there is nothing to compare{told}")
    return key


def in_order(axis: str, places: Iterable[str]) -> list[str]:
    """Values of an axis as a person would list them: numbers by size, methods and optimizations from plain to rich."""
    methods = list(METHODS)

    def rank(place: str) -> tuple[Any, ...]:
        try:
            return 0, float(place), place
        except ValueError:
            pass
        first = methods.index(place) if place in methods else -1 if place in _PLAIN[RECIPE] else len(methods)
        return 1, float(first), place

    return sorted(dict.fromkeys(places), key=rank)


def _baseline(axis: str, cells: Sequence[Cell], asked: str | None) -> str:
    """The value to hold the others against: the one asked for, as it is or as a unique part of it; else no
    optimization, else that of most cells that ended well, else the first."""
    places = in_order(axis, (value_at(axis, cell.facts) or "unknown" for cell in cells))
    if asked is None:
        if plain := [place for place in _PLAIN.get(axis, ()) if place in places]:
            return plain[0]
        counts = [sum(bool(cell.ok) for cell in cells if value_at(axis, cell.facts) == place) for place in places]
        return places[counts.index(max(counts))]
    if asked in places:
        return asked
    found = [place for place in places if asked.casefold() in place.casefold()]
    if len(found) == 1:
        return found[0]
    if found:
        raise SpecError(f"--baseline {asked}: fits {', '.join(found)}: say which")
    raise SpecError(f"--baseline {asked}: is not among {', '.join(places)}{nearest(asked, places)}")


# --- partners --------------------------------------------------------------------------------------------------------


def _partners(axis: str, baseline: Sequence[Cell]) -> Any:
    """Finds, for a cell, the cell of the baseline with the same model, data and GPU that agrees in every key that
    varies among those: what remains are differences to be told. Gives the cell, or None and the reason."""
    section = axis.partition(".")[0]
    hard = [key for key in _HARD if not on_axis(axis, key) and key.partition(".")[0] != section]
    groups: dict[Any, list[Cell]] = {}
    for cell in baseline:
        groups.setdefault(tuple(cell.facts.get(key) for key in hard), []).append(cell)

    @cache
    def index(place: Any) -> tuple[list[str], dict[Any, Cell]]:
        group = groups[place]
        specs = [dict(cell.runs[0].spec) for cell in group]
        varying = [
            key for key in dict.fromkeys(key for spec in specs for key in spec)
            if not on_axis(axis, key) and key not in hard and len({spec.get(key) for spec in specs}) > 1
        ]  # fmt: skip
        table: dict[Any, Cell] = {}
        for cell, spec in zip(group, specs, strict=True):
            table.setdefault(tuple(spec.get(key) for key in varying), cell)
        return varying, table

    def find(cell: Cell) -> tuple[Cell | None, str]:
        place = tuple(cell.facts.get(key) for key in hard)
        if place not in groups:
            names = {"gpu": "GPU", "model": "model", "method": "method", "dataset": "data"}
            kept = dict.fromkeys(names[key.partition(".")[0]] for key in hard)
            return None, f"no baseline with the same {', '.join(kept)}"
        varying, table = index(place)
        spec = cell.runs[0].spec
        partner = table.get(tuple(spec.get(key) for key in varying))
        if partner is not None:
            return partner, ""
        return None, "no baseline with " + ", ".join(f"{key} {spec.get(key, 'unknown')}" for key in varying)

    return find


def pair_of(axis: str, cell: Cell, baseline: Cell | None, reason: str = "") -> Pair:
    """The two cells side by side."""
    if baseline is None:
        return Pair(cell, None, reason=reason)
    differing = core.differences(baseline.facts, cell.facts, lambda key: implied(axis, baseline.facts, cell.facts, key))
    differences = tuple(one for one in differing if _told(one, baseline, cell))
    for side, what in ((baseline, "the baseline"), (cell, "it")):
        if not side.ok:
            return Pair(cell, baseline, differences, reason=f"{what} did not end well" if side is baseline else "")
    first, second = _single_runs(baseline, cell)
    speed = TOKENS if baseline.values(TOKENS) and cell.values(TOKENS) else SAMPLES
    ratio = _ratio(baseline, cell, speed, first, second)
    told_apart = ratio is not None and bool(ratio.direction)
    paces = baseline.pace(), cell.pace()
    return Pair(
        cell, baseline, differences,
        speed=ratio,
        memory=core.ratio_of_runs(baseline.values(PEAK), cell.values(PEAK)),
        first_step=core.ratio_of_runs(baseline.values(FIRST), cell.values(FIRST)),
        energy=_ratio(baseline, cell, ENERGY, first, second),
        break_even=core.break_even(paces[0], paces[1]) if told_apart and paces[0] and paces[1] else None,
        learning=_learning(baseline, cell),
    )  # fmt: skip


def _told(one: Difference, baseline: Cell, cell: Cell) -> bool:
    """Whether a difference is one of the recipe. A library that only one machine has was needed by neither run; and a
    run that ended early never wrote down what it would have trained on, or with."""
    if one.key.startswith("versions."):
        return None not in (one.baseline, one.candidate)
    late = one.key == "dataset.order_hash" or one.key.startswith("applied.")
    return not late or bool(baseline.ok and cell.ok)


# --- figures ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)  # a baseline is read once for all that are held against it
def _steps(path: Path, modified: float, warmup: int) -> steps_csv.Steps:
    return steps_csv.read(RunDir(path), warmup)


def steps_of(run: Run) -> steps_csv.Steps:
    """The steps of a run, from its steps.csv."""
    warmup = known([run.record], "steps.warmup")
    modified = run.dir.steps.stat().st_mtime if run.dir.steps.exists() else 0.0
    return _steps(run.dir.path, modified, int(warmup[0]) if warmup else 0)


def _single_runs(baseline: Cell, cell: Cell) -> tuple[Run | None, Run | None]:
    """The two runs, where each side has one: their steps are then all there is to tell the noise from."""
    return (baseline.ok[0], cell.ok[0]) if len(baseline.ok) == len(cell.ok) == 1 else (None, None)


def _ratio(baseline: Cell, cell: Cell, name: str, first: Run | None, second: Run | None) -> Ratio | None:
    found = core.ratio_of_runs(baseline.values(name), cell.values(name))
    if found is None or first is None or second is None:
        return found
    sides = [_per_step(steps_of(run), name) for run in (first, second)]
    paired = _same_tokens(baseline, cell) and _same_samples(first, second)
    common = sorted(sides[0].keys() & sides[1].keys())
    if paired and len(common) >= min(map(len, sides)) / 2:
        below, above = ([side[step] for step in common] for side in sides)
        return core.ratio_of_steps(found.value, below, above, paired=True)
    return core.ratio_of_steps(found.value, list(sides[0].values()), list(sides[1].values()), paired=False)


def _per_step(steps: steps_csv.Steps, name: str) -> dict[int, float]:
    return steps.joules_per_sample() if name == ENERGY else steps.rate("tokens" if name == TOKENS else "samples")


def _same_tokens(baseline: Cell, cell: Cell) -> bool:
    order = baseline.facts.get("dataset.order_hash")
    return order is not None and order == cell.facts.get("dataset.order_hash")


def _same_samples(first: Run, second: Run) -> bool:
    one, other = (steps_of(run).samples_by_step() for run in (first, second))
    common = one.keys() & other.keys()
    return bool(common) and all(one[step] == other[step] for step in common)


def _learning(baseline: Cell, cell: Cell) -> Learning:
    """Whether both learn the same: the first run of each that ended well, and that no run of the cell went wrong."""
    first, second = baseline.ok[0], cell.ok[0]
    for run in cell.ok:
        if broken := not_finite(steps_of(run).learning()):
            return Learning(NOT_FINITE, broken if len(cell.ok) == 1 else f"{broken} of {run.run_id}")
    if "dataset.order_hash" not in baseline.facts or "dataset.order_hash" not in cell.facts:
        return Learning(CANNOT_TELL, "the order of the tokens is not known")
    allowed = tolerance(baseline.facts, cell.facts)
    paired = _same_tokens(baseline, cell) and _same_samples(first, second)
    if not paired and not (allowed.another_order and _same_samples_asked_for(baseline, cell)):
        same = _same_tokens(baseline, cell)
        return Learning(CANNOT_TELL, "other samples in a step" if same else "other tokens, or another order")
    sides = steps_of(first).learning(), steps_of(second).learning()
    return learning_verdict(*sides, allowed.share, paired=paired)


def _same_samples_asked_for(baseline: Cell, cell: Cell) -> bool:
    keys = {key for side in (baseline, cell) for key in side.facts if key.startswith(("dataset.", "model."))}
    return all(baseline.facts.get(key) == cell.facts.get(key) for key in keys - {"dataset.hash", "dataset.order_hash"})

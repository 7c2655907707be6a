"""Find the compared key (axis), its baseline value, and the baseline of each cell (repeated runs of one spec)."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from ftbench.core.hardware import find_gpu
from ftbench.core.stats import grouped_by
from ftbench.errors import SpecError
from ftbench.report.data.axes import OPTIMIZATIONS, RECIPE, SHORT, UNOPTIMIZED, in_order, on_axis, value_at
from ftbench.report.data.cells import Cell, Run
from ftbench.report.data.facts import CARD, COMMIT, LIMIT
from ftbench.report.data.groups import DATA, cells_of
from ftbench.spec.base import nearest

# Facts that a cell and its baseline share, except for the compared key.
_HARD = (
    "gpu", "model.id", "method.name", "objective.name", "dataset.name", "dataset.path", "dataset.length",
    "dataset.mean_length", "dataset.like",
)  # fmt: skip
_NOUNS = {"gpu": "GPU", "model": "model", "method": "method", "objective": "objective", "dataset": "data"}

Find = Callable[[Cell], tuple[Cell | None, str]]


def along(axis: str, runs: Sequence[Run]) -> tuple[str, list[Cell]]:
    """Return the full key for `--compare axis` (`method.name` for `method`), and the runs grouped by spec.

    Raises:
        SpecError: the key is missing in all runs, or all runs have the same value.
    """
    key = SHORT.get(axis, axis)
    present = dict.fromkeys(name for run in runs for name in (*run.spec, *run.ran))
    if key not in (*present, "gpu", OPTIMIZATIONS, RECIPE):
        names = [*SHORT, *present]
        raise SpecError(
            f"--compare {axis}: unknown key{nearest(axis, names)} (use gpu, method, batch, optimization, recipe, "
            "framework, model, or a key of `ftbench list keys`)"
        )
    cells = cells_of(runs, key)
    values = dict.fromkeys(value_at(key, cell.facts) or "unknown" for cell in cells)
    if len(values) < 2:
        varying = [name for name in SHORT.values() if len({value_at(name, cell.facts) for cell in cells}) > 1]
        others = f": these keys vary: {', '.join(dict.fromkeys(varying))}" if varying else ""
        raise SpecError(f"--compare {axis}: all runs have {axis} {next(iter(values))}, nothing to compare{others}")
    return key, cells


def baseline_value(axis: str, cells: Sequence[Cell], named: str | None) -> str:
    """Return the baseline value of the compared key.

    `named` is the value, or a unique part of the value or of the GPU name in the tables. By default, use a plain value
    such as `none`. If no value is plain, use the value with the most successful runs.

    Raises:
        SpecError: the name matches no value or several.
    """
    values = in_order(value for cell in cells if (value := value_at(axis, cell.facts)))
    if named is None:
        if plain := [value for value in UNOPTIMIZED.get(axis, ()) if value in values]:
            return plain[0]
        counts = Counter(value_at(axis, cell.facts) for cell in cells if cell.ok)
        return max(values, key=counts.__getitem__)
    cards = {value: gpu.name for value in values if axis == "gpu" and (gpu := find_gpu(value))}
    fitting = [value for value in values if named.casefold() in f"{value}, {cards.get(value, '')}".casefold()]
    if named in values:
        return named
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise SpecError(f"--baseline {named}: matches {', '.join(fitting)}: write the full value")
    raise SpecError(f"--baseline {named}: not one of {', '.join(values)}{nearest(named, values)}")


def partners(axis: str, baseline: Sequence[Cell]) -> Find:
    """Return a function that finds the baseline of a cell (repeated runs of one spec), or None and a reason.

    A cell and its baseline have the same model, data and GPU. If there are several such baselines, the cell must also
    agree in the keys that vary between these baselines. Other differences are allowed and listed in the report.
    """
    hard = [key for key in _HARD if not on_axis(axis, key) and key.partition(".")[0] != axis.partition(".")[0]]
    groups = grouped_by(baseline, lambda cell: tuple(cell.facts.get(key) for key in hard))
    indexed = {workload: _index(axis, group, hard) for workload, group in groups.items()}

    def find(cell: Cell) -> tuple[Cell | None, str]:
        workload = tuple(cell.facts.get(key) for key in hard)
        if workload not in indexed:
            kept = dict.fromkeys(_NOUNS[key.partition(".")[0]] for key in hard)
            return None, f"no baseline with the same {', '.join(kept)}"
        varying, table = indexed[workload]
        spec = cell.runs[0].spec
        if fitting := table.get(tuple(spec.get(key) for key in varying)):
            return max(fitting, key=lambda other: _likeness(cell, other)), ""
        return None, "no baseline with " + ", ".join(f"{key} {spec.get(key, 'unknown')}" for key in varying)

    return find


def _likeness(cell: Cell, other: Cell) -> list[int]:
    """Return a sort key for baselines: valid runs, then the same tokens, power limit, card, commit and settings."""
    same = [cell.facts.get(key) == other.facts.get(key) for key in (DATA, LIMIT, CARD, COMMIT, *other.facts)]
    return [bool(other.valid), *same[:4], sum(same)]


def _index(axis: str, group: Sequence[Cell], hard: Sequence[str]) -> tuple[list[str], dict[Any, list[Cell]]]:
    """Return the keys that vary between the baselines in `group`, and {values of these keys: baselines}."""
    specs = [cell.runs[0].spec for cell in group]
    varying = [
        key for key in dict.fromkeys(key for spec in specs for key in spec)
        if not on_axis(axis, key) and key not in hard and len({spec.get(key) for spec in specs}) > 1
    ]  # fmt: skip
    return varying, grouped_by(group, lambda cell: tuple(cell.runs[0].spec.get(key) for key in varying))

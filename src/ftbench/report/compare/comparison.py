"""The comparison section of a report: a table for people, and flat records for programs."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ftbench.core import units
from ftbench.core.compare import Ratio
from ftbench.core.stats import MINIMUM_STEADY, grouped_by
from ftbench.report.compare.pairs import Comparison, Pair
from ftbench.report.compare.words import change, difference_lists, first_step_of, first_step_text, flat_ratio
from ftbench.report.data import axes
from ftbench.report.data.axes import FRAMEWORK, OPTIMIZATIONS, RECIPE, SETTINGS, on_axis, value_at
from ftbench.report.data.cells import ENERGY, PEAK, TOKENS, Cell, number_of, run_of
from ftbench.report.data.groups import cell_names
from ftbench.report.document import Section, Table, table_of
from ftbench.report.runs_table import MOST_NAMED

_HEADING = {
    "gpu": "GPU", "model.id": "model", "method.name": "method", "train.batch_size": "batch", OPTIMIZATIONS: "with",
    "launch.framework": "framework", "objective.name": "objective", "data": "data", "model.weights": "weights",
    RECIPE: "trained by",
}  # fmt: skip
_TITLES = {OPTIMIZATIONS: "optimization", RECIPE: "recipe"}
_EXACT = 0.0005
_FIRST = ("speed", "peak GiB", "samples/h", "also differs", "state")  # the leftmost columns
TEXT = ("speed", "peak GiB", "first step", "energy", "break-even", "also differs", "state", "name")
NOTE = (
    "Changes are relative to the baseline, with 95 % intervals. ≈ means not distinguishable, likely means only one run "
    "on a side, ? means that there is no interval. Energy is the energy of the GPU per sample. Reports do not judge "
    "whether a recipe learns the same: use `ftbench parity`."
)


def section(comparison: Comparison) -> Section:
    """Return the section of a comparison, with one row and one record per cell (repeated runs of one spec).

    A baseline comes before the cells that are compared with it. Equal values are in the title. Numbered notes list the
    differences between a cell and its baseline.
    """
    keys, pairs = _columns(comparison), {id(pair.cell): pair for pair in comparison.pairs}
    rows = [
        (cell, pairs.get(id(cell))) for cell in _ordered(comparison)
        if id(cell) in pairs or comparison.value(cell) == comparison.baseline
    ]  # fmt: skip
    title = f"Compared by {_TITLES.get(comparison.axis) or _name(comparison.axis)}"
    records = [_record(comparison, cell, pair, keys) for cell, pair in rows]
    return Section("comparison", title, _table(comparison, rows, keys), (), records)


def _table(comparison: Comparison, cells: Sequence[tuple[Cell, Pair | None]], keys: Sequence[str]) -> Table:
    same = [key for key in _CONTEXT if key not in (*keys, comparison.axis) and not _varies(comparison, key)]
    shared = {_name(key): _fact(key, comparison.cells[0]) for key in same}
    lists, numbers = difference_lists(comparison.pairs)
    figures = {heading: [text(cell, pair) for cell, pair in cells] for heading, text in _FIGURES.items()}
    figures |= {
        "also differs": [_also(pair, numbers) for _, pair in cells],
        "state": _states(cell for cell, _ in cells),
    }
    numbered = [number_of(cell.runs[0].record) for cell, _ in cells]
    first = {"#": numbered, "name": cell_names([cell for cell, _ in cells])}
    first |= {heading: figures.pop(heading) for heading in _FIRST}
    several = {"runs": [_runs(cell) for cell, _ in cells]} if any(len(cell.runs) > 1 for cell, _ in cells) else {}
    others = [key for key in (comparison.axis, *keys) if key not in _HEADING]
    short = _HEADING | dict(zip(others, axes.headings(others), strict=True))
    settings = {short[comparison.axis]: [comparison.value(cell) for cell, _ in cells]}
    settings |= {short[key]: [_fact(key, cell) for cell, _ in cells] for key in keys}
    columns = {heading: texts for heading, texts in (first | figures).items() if any(texts)} | several | settings
    words = (*TEXT, *(heading for heading in settings if heading != "batch"))
    notes = [*_notes(comparison, [cell for cell, _ in cells], lists)]
    rows = [run_of(cell.runs[0].record) for cell, pair in cells if pair is None]
    below = f": {len(rows)} rows, each above the rows compared with it"
    baseline = comparison.baseline + (f" ({rows[0]})" if len(rows) == 1 else below)
    return table_of(columns, notes, words, {"baseline": baseline, **shared})


_CONTEXT = ("model.id", "model.weights", "gpu", "data", "method.name", OPTIMIZATIONS)


def _columns(comparison: Comparison) -> list[str]:
    """Return the spec keys that vary between rows and need a column. The compared key is not included."""
    first = [cell.runs[0] for cell in comparison.cells]
    labels = {
        "model": [cell.facts.get("model.id", "") for cell in comparison.cells],
        "dataset": [run.data for run in first],
    }
    more = axes.varying_keys([run.spec for run in first], labels)
    named = ("method.name", OPTIMIZATIONS)  # part of the name
    candidates = [*_CONTEXT, "train.batch_size", "train.gradient_accumulation_steps"]
    varying = [key for key in candidates if key not in named and _varies(comparison, key)]
    keys = [key for key in (*varying, *more) if not on_axis(comparison.axis, key) and not _of_axis(comparison, key)]
    return keys[: axes.MOST_AXES]


def _varies(comparison: Comparison, key: str) -> bool:
    return len({_fact(key, cell) for cell in comparison.cells}) > 1


def _of_axis(comparison: Comparison, key: str) -> bool:
    """Return whether the compared key determines `key`. For example, the method determines its options."""
    section, axis_section = key.partition(".")[0], comparison.axis.partition(".")[0]
    if section != ("method" if axis_section == RECIPE else axis_section):
        return False
    pairs = {(comparison.value(cell), cell.facts.get(key)) for cell in comparison.cells}
    return len(pairs) == len({value for value, _ in pairs})


def _name(key: str) -> str:
    return _HEADING.get(key, key.rpartition(".")[2].replace("_", " "))


def _fact(key: str, cell: Cell) -> str:
    if key == "data":
        return cell.runs[0].data
    text = value_at(key, cell.facts) or ""
    return text.rsplit("/", 1)[-1] if key == "model.id" else text


def _ordered(comparison: Comparison) -> Iterator[Cell]:
    """Yield the cells in table order: each baseline, then its candidates. Candidates without a baseline come last."""
    rank = {value: i for i, value in enumerate(axes.in_order(map(comparison.value, comparison.cells)))}
    candidates = grouped_by(comparison.pairs, lambda pair: id(pair.baseline) if pair.baseline else 0)

    def position(cell: Cell) -> tuple[int, bool]:
        return rank[comparison.value(cell)], cell.facts.get(SETTINGS) == "best"

    for cell in comparison.cells:
        if comparison.value(cell) == comparison.baseline:
            yield cell
            yield from (p.cell for p in sorted(candidates.get(id(cell), []), key=lambda p: position(p.cell)))
    yield from (pair.cell for pair in candidates.get(0, []))


def _runs(cell: Cell) -> str:
    return str(len(cell.runs)) if len(cell.ok) == len(cell.runs) else f"{len(cell.ok)} of {len(cell.runs)}"


# --- one row ---------------------------------------------------------------------------------------------------------


def _also(pair: Pair | None, numbers: Mapping[int, Sequence[str]]) -> str:
    """Return the text of the column `also differs`: the numbers of notes, such as `(1, 3)`, or `nothing`."""
    if pair is None:
        return "baseline"
    listed = f"({', '.join(numbers[id(pair)])})" if id(pair) in numbers else ""
    if pair.baseline is None:
        return f"no baseline {listed}"
    return "; ".join(filter(None, [listed or "nothing", pair.reason]))


def _states(cells: Iterable[Cell]) -> list[str]:
    """Return the state of each row, such as `ok` or `oom`. If all states are `ok`, return an empty list."""
    states = [cell.state for cell in cells]
    return [] if set(states) == {"ok"} else states


def _peak(cell: Cell, pair: Pair | None) -> str:
    """Return the memory peak in GiB and its relative change: `15.8 (-79.6 %)`."""
    peak, changed = units.gibibytes(cell.figure(PEAK)), pair.memory if pair else None
    if changed and changed.low is not None and changed.high is not None and changed.high - changed.low < _EXACT:
        changed = Ratio(changed.value)  # the repeats agree in all digits that the table shows
    words = change(changed).removesuffix(" ?")
    return f"{peak} ({words})" if peak and words else peak


_FIGURES: dict[str, Callable[[Cell, Pair | None], str]] = {
    "samples/h": lambda cell, _: units.rate(cell.samples_per_hour),
    "speed": lambda cell, pair: change(pair.speed) if pair else _absolute(cell),
    "peak GiB": _peak,
    "first step": first_step_text,
    "energy": lambda _, pair: change(pair.energy) if pair else "",
    "break-even": lambda _, pair: _break_even(pair) if pair else "",
}


def _absolute(cell: Cell) -> str:
    """Return the speed of a baseline as text: `5,123 tokens/s`."""
    rate = cell.figure(TOKENS)
    return "" if rate is None else f"{units.rate(rate)} tokens/s"


def _break_even(pair: Pair) -> str:
    """Return the break-even point as text: `after step 40`, `until step 40`, `at once` or `never`."""
    if (even := pair.break_even) is None:
        return ""
    return even.when if even.steps is None else f"{even.when} step {round(even.steps):,}"


# --- below the table -------------------------------------------------------------------------------------------------


def _notes(comparison: Comparison, cells: Sequence[Cell], lists: Iterable[str]) -> Iterator[str]:
    yield NOTE
    for number, words in enumerate(lists, 1):
        yield f"({number}) {words}"
    if comparison.axis == FRAMEWORK:
        yield from _libraries({comparison.value(cell): cell for cell in cells})
    few = [run_of(run.record) for cell in cells for run in cell.ok
           if (run.record.get("steps.steady") or 0) < MINIMUM_STEADY]  # fmt: skip
    if few:
        yield f"fewer than {MINIMUM_STEADY} steady steps: {units.listed(few, MOST_NAMED)}"


def _libraries(by_framework: Mapping[str, Cell]) -> Iterator[str]:
    """Yield a note with the library versions of each framework, because the lists of differences omit them."""
    versions = {name: [cell.facts.get(f"versions.{name}") for cell in by_framework.values()] for name in axes.LIBRARIES}
    varying = [name for name, installed in versions.items() if len(set(installed)) > 1]
    used = {framework: ", ".join(f"{name} {text}" for name in varying if (text := cell.facts.get(f"versions.{name}")))
           for framework, cell in by_framework.items()}  # fmt: skip
    if varying:
        yield "separate libraries: " + "; ".join(
            f"{framework} has {names}" for framework, names in used.items() if names
        )


# --- for programs ----------------------------------------------------------------------------------------------------


def _record(comparison: Comparison, cell: Cell, pair: Pair | None, keys: Sequence[str]) -> dict[str, Any]:
    """Return a row of the comparison as a flat dict. Unknown values are None."""
    before = pair.baseline if pair else None
    record: dict[str, Any] = {
        "axis": comparison.axis, "value": comparison.value(cell), "baseline": comparison.baseline, "name": cell.name,
        **{key: cell.facts.get("gpu") if key == "gpu" else _fact(key, cell) for key in keys},
        "method": cell.facts.get("method.name"), "batch_size": cell.facts.get("train.batch_size"),
        "optimizations": value_at(OPTIMIZATIONS, cell.facts),
        "state": cell.state, "runs": len(cell.runs), "runs_ok": len(cell.ok),
        "samples_per_hour": cell.samples_per_hour,
        **{name: cell.figure(name) for name in (TOKENS, PEAK, ENERGY)}, **first_step_of(cell),
        "run_ids": " ".join(run.run_id for run in cell.runs),
        "numbers": " ".join(number_of(run.record) for run in cell.runs),
        "baseline_run_ids": " ".join(run.run_id for run in before.runs) if before else None,
        "same_recipe": not pair.differences if pair and before else None,
        "differences": "; ".join(map(str, pair.differences)) if pair and before else None,
        "reason": pair.reason if pair else None,
    }  # fmt: skip
    for name in ("speed", "memory", "energy"):
        record |= flat_ratio(name, getattr(pair, name, None))
    for state, ratio in (pair.first_step if pair else {}).items():
        record |= flat_ratio("first_step" if state == "none" else f"first_step_{state.replace(' ', '_')}", ratio)
    even = pair.break_even if pair else None
    return record | {"break_even": even.when if even else None, "break_even_steps": even.steps if even else None}

"""Short, unique names of cells and table rows."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ftbench.core.hardware import canonical_name
from ftbench.core.stats import grouped_by
from ftbench.report.data.axes import (
    GPUS,
    NO_OPTIMIZATION,
    OPTIMIZATIONS,
    PLAIN,
    RECIPE,
    SETTINGS,
    STRATEGY,
    by_importance,
    headings,
    shipped_recipe,
    value_at,
)
from ftbench.report.data.cells import Cell
from ftbench.report.data.facts import CARD, COMMIT, CPU, LIMIT
from ftbench.spec.methods import METHODS

_LIST_MARKS = str.maketrans("", "", '[]"')
_MAX_LETTERS = 24  # of a fact in a name


def way_of(facts: Mapping[str, str]) -> str:
    """Return the recipe or method, the objective unless sft, and the GPUs if there are several."""
    gpus, objective = facts.get(GPUS, "1"), facts.get("objective.name", "sft")
    by = "" if objective == "sft" else f" by {objective}"
    return recipe_name(facts) + by + ("" if gpus == "1" else f" on {gpus} GPUs ({facts.get(STRATEGY)})")


def recipe_name(facts: Mapping[str, str]) -> str:
    """Return the shipped recipe, or the method with its optimizations. `plain` of another method is `plain qlora`."""
    recipe, method = value_at(RECIPE, facts) or "", facts.get("method.name", "unknown method")
    if method == "unsloth" or shipped_recipe(recipe):
        return recipe
    if (on := value_at(OPTIMIZATIONS, facts)) not in (None, NO_OPTIMIZATION):
        return f"{method} with {on}"
    if recipe == PLAIN[0] and method in METHODS and facts.get(SETTINGS) != "best":
        return recipe if method == "lora" else f"{recipe} {method}"
    return method


def with_unique_names(cells: Sequence[Cell], axis: str) -> list[Cell]:
    """Append the fewest differing facts to the names of cells that share workload, GPU and name."""
    same_name = grouped_by(cells, lambda cell: (cell.workload, cell.facts["gpu"], cell.name))
    suffixes = {id(cell): text for group in same_name.values() if len(group) > 1
                for cell, text in zip(group, _distinct(group, axis), strict=True)}  # fmt: skip
    return [replace(cell, way=f"{cell.way} ({suffixes[id(cell)]})") if id(cell) in suffixes else cell for cell in cells]


def _distinct(group: Sequence[Cell], axis: str) -> list[str]:
    """Return a unique text for each cell: facts of spec and machine, or the id of the first run."""
    ordered = by_importance(dict.fromkeys(key for cell in group for key in cell.runs[0].spec))
    keys = [axis] * bool(axis) + ordered + [LIMIT, COMMIT, CARD]
    chosen: dict[str, list[str]] = {}
    kinds: list[Any] = [()] * len(group)
    for key in keys:
        facts = [cell.facts.get(key, "unknown") for cell in group]
        if len(set(facts)) > 1:
            values = list(map(short_value, facts))
            more = list(zip(kinds, values, strict=True))
            if len(set(more)) > len(set(kinds)):
                kinds, chosen[key] = more, values
    if len(set(kinds)) < len(group):
        return [cell.runs[0].run_id for cell in group]
    names = headings(chosen)
    return [", ".join(map("{} {}".format, names, values)) for values in zip(*chosen.values(), strict=True)]


def short_value(text: str) -> str:
    """Return a fact as a table shows it: lists without brackets, long texts cut."""
    text = text.translate(_LIST_MARKS)
    return text if len(text) <= _MAX_LETTERS else text[: _MAX_LETTERS - 1] + "…"


def cell_names(cells: Sequence[Cell]) -> list[str]:
    """Return `lora at batch 4` for each cell, plus the model, GPU or data if these vary."""
    rows = [(cell.workload[0].rsplit("/", 1)[-1], cell.name, cell.facts["gpu"], cell.workload[2]) for cell in cells]
    return row_names(rows)


def row_names(rows: Sequence[tuple[str, str, str, str]]) -> list[str]:
    """Return a name for each row of (model, name, GPU, data)."""
    models, gpus = ({row[at] for row in rows} for at in (0, 2))
    names = [
        (f"{model}: " if len(models) > 1 and model else "") + name
        + (f" on {'the CPU' if gpu == CPU else canonical_name(gpu)}" if len(gpus) > 1 else "")
        for model, name, gpu, _ in rows
    ]  # fmt: skip
    times = Counter(dict(zip(rows, names, strict=True)).values())  # several rows may show the same cell
    return [f"{name}, {row[3]}" if times[name] > 1 else name for name, row in zip(names, rows, strict=True)]

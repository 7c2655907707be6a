"""What a way of training is called: the recipe, or the method with what is on, and what else it takes to be unlike the
others of its workload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ftbench.core.grouping import grouped_by
from ftbench.report.data.axes import (
    GPUS,
    NO_OPTIMIZATION,
    OPTIMIZATIONS,
    RECIPE,
    STRATEGY,
    by_importance,
    headings,
    shipped_recipe,
    value_at,
)
from ftbench.report.data.facts import LIMIT

if TYPE_CHECKING:
    from ftbench.report.data.groups import Cell

_OF_LISTS = str.maketrans("", "", '[]"')
_MOST_LETTERS = 24  # of a fact that tells two groups of one name apart


def way_of(facts: Mapping[str, str]) -> str:
    """Return what is trained how, by which objective if not sft, and on how many GPUs, where they are several."""
    gpus, objective = facts.get(GPUS, "1"), facts.get("objective.name", "sft")
    by = "" if objective == "sft" else f" by {objective}"
    return recipe_name(facts) + by + ("" if gpus == "1" else f" on {gpus} GPUs ({facts.get(STRATEGY)})")


def recipe_name(facts: Mapping[str, str]) -> str:
    """Return the shipped recipe, or the method with what is on."""
    recipe, method = value_at(RECIPE, facts) or "", facts.get("method.name", "unknown method")
    if method == "unsloth" or shipped_recipe(recipe):
        return recipe
    on = value_at(OPTIMIZATIONS, facts)
    return method if on in (None, NO_OPTIMIZATION) else f"{method} with {on}"


def told_apart(cells: Sequence[Cell], axis: str) -> list[Cell]:
    """Put behind the name of cells of one workload, machine and name the fewest facts that they differ in."""
    alike = grouped_by(cells, lambda cell: (cell.workload, cell.facts["gpu"], cell.name))
    longer = {id(cell): text for group in alike.values() if len(group) > 1
              for cell, text in zip(group, _distinct(group, axis), strict=True)}  # fmt: skip
    return [replace(cell, way=f"{cell.way} ({longer[id(cell)]})") if id(cell) in longer else cell for cell in cells]


def _distinct(group: Sequence[Cell], axis: str) -> list[str]:
    """Return a text for each cell that no other has: facts of the spec, the watts that its GPU is held to, or else the
    first run."""
    ordered = by_importance(dict.fromkeys(key for cell in group for key in cell.runs[0].spec))
    keys = [axis] * bool(axis) + ordered + [LIMIT]
    chosen: dict[str, list[str]] = {}
    kinds: list[Any] = [()] * len(group)
    for key in keys:
        facts = [cell.facts.get(key, "unknown") for cell in group]
        if len(set(facts)) > 1:  # few do
            values = list(map(short_value, facts))
            more = list(zip(kinds, values, strict=True))
            if len(set(more)) > len(set(kinds)):
                kinds, chosen[key] = more, values
    if len(set(kinds)) < len(group):
        return [cell.runs[0].run_id for cell in group]
    names = headings(chosen)
    return [", ".join(map("{} {}".format, names, values)) for values in zip(*chosen.values(), strict=True)]


def short_value(text: str) -> str:
    """Return a fact as a table shows it: of a list its values, of a long text its beginning."""
    text = text.translate(_OF_LISTS)
    return text if len(text) <= _MOST_LETTERS else text[: _MOST_LETTERS - 1] + "…"

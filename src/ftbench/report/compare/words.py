"""Format ratios, verdicts and differences as text for tables and as flat fields for programs."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ftbench.core import units
from ftbench.core.compare import Ratio, geometric_mean
from ftbench.core.stats import grouped_by
from ftbench.report.compare.pairs import Pair
from ftbench.report.data.cells import Cell, run_of
from ftbench.report.runs_table import MOST_NAMED

_VAGUE = 4.0  # if high / low is larger, the interval shows little more than the direction
_KEYS = {"dataset.order_hash": "the order of the tokens", "dataset.hash": "the tokens of the data set"}


def change(ratio: Ratio | None) -> str:
    """Return a ratio as a relative change with its interval.

    Examples: `+12.3 % [+11.0, +13.6]`, `likely +12.3 % [+11.0, +13.6]` for one run per side, `≈ +0.4 % [-1.0, +1.9]`,
    `+12.3 % ?` without an interval, and `+322.0 %, uncertain by a factor of 40` for a very wide interval.
    """
    if ratio is None:
        return ""
    value = _percent(ratio.value)
    if ratio.low is None or ratio.high is None:
        return f"{value} % ?"
    sign = "≈ " if not ratio.direction else "likely " if ratio.verdict.startswith("likely") else ""
    if ratio.high > _VAGUE * ratio.low:
        return f"{sign}{value} %, uncertain by a factor of {math.sqrt(ratio.high / ratio.low):,.2g}"
    return f"{sign}{value} % [{_percent(ratio.low)}, {_percent(ratio.high)}]"


def _percent(ratio: float) -> str:
    return units.change(ratio - 1).removesuffix(" %")


def differences(pair: Pair) -> list[str]:
    """Return one text per difference between a cell and its baseline. If the baseline is missing, return the reason."""
    if pair.baseline is None:
        return [pair.reason]
    words = []
    other_tokens = any(fact.key == "dataset.hash" for fact in pair.differences)
    for fact in pair.differences:
        if fact.key == "dataset.order_hash" and other_tokens:
            continue
        unknown = " (unknown)" if None in (fact.baseline, fact.candidate) else ""
        words.append(_KEYS[fact.key] + unknown if fact.key in _KEYS else str(fact))
    return words


def difference_lists(pairs: Sequence[Pair]) -> tuple[list[str], dict[int, list[str]]]:
    """Return numbered lists of differences, for notes below a table.

    Differences that always occur together share a list. Each list starts with the numbers of its table rows. A narrow
    table may hide the column that refers to the lists.

    Returns:
        The texts of the lists, and {id of a pair: numbers of its lists}.
    """
    holders: dict[str, list[int]] = {}
    for index, pair in enumerate(pairs):
        for words in differences(pair):
            holders.setdefault(words, []).append(index)
    together = grouped_by(holders, lambda words: tuple(holders[words]))
    numbers: dict[int, list[str]] = {}
    for number, group in enumerate(together, 1):
        for index in group:
            numbers.setdefault(id(pairs[index]), []).append(str(number))
    return [_row_list([pairs[at] for at in group]) + "; ".join(facts) for group, facts in together.items()], numbers


def _row_list(group: Sequence[Pair]) -> str:
    """Return the start of a list of differences: `#1, #5 differ: `, or `#7: ` for a row without a baseline."""
    rows = units.listed([run_of(pair.cell.runs[0].record) for pair in group], MOST_NAMED)
    verb = "" if group[0].baseline is None else " differs" if len(group) == 1 else " differ"
    return f"{rows}{verb}: "


def first_step_text(cell: Cell, pair: Pair | None = None) -> str:
    """Return the first-step time for each state of the compiler's cache: `1.52 s` or `41.0 s cold, 9.4 s warm`."""
    parts = []
    for state, values in sorted(cell.first_steps().items()):
        ratio = pair.first_step.get(state) if pair else None
        changed = f" ({units.change(ratio.value - 1)})" if ratio else ""
        seconds = units.seconds(geometric_mean(values))
        parts.append(seconds + ("" if state == "none" else f" {state}") + changed)
    return ", ".join(parts)


# --- for programs ----------------------------------------------------------------------------------------------------


def flat_ratio(name: str, ratio: Ratio | None) -> dict[str, Any]:
    """Return a ratio as fields of a flat record, such as `speed_ratio` and `speed_low`. Unknown fields are None."""
    fields = (ratio.value, ratio.low, ratio.high, ratio.basis or None, ratio.verdict) if ratio else (None,) * 5
    return dict(zip((f"{name}_{part}" for part in ("ratio", "low", "high", "basis", "verdict")), fields, strict=True))


def first_step_of(cell: Cell) -> Mapping[str, Any]:
    """Return first-step times in seconds as fields of a flat record, one field per state of the compiler's cache."""
    seconds = {state: geometric_mean(values) for state, values in cell.first_steps().items()}
    return {"first_step_s" if state == "none" else f"first_step_s_{state.replace(' ', '_')}": seconds.get(state)
            for state in ("none", "warm", "partly warm", "cold")}  # fmt: skip

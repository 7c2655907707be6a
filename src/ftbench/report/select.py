"""`--where` and `--sort`: select and sort runs by a table heading, a spec key (or its last part), or a record field."""

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ftbench.core import units
from ftbench.errors import SpecError
from ftbench.report.data.axes import headings, recipe_name
from ftbench.report.data.collect import Record, data_labels, state_of
from ftbench.report.data.facts import spec_facts
from ftbench.report.runs_table import CONTEXT, FIGURES, context_of
from ftbench.spec.base import nearest, shortened
from ftbench.store.rundir import RunDir

_CONDITION = re.compile(r"([^=!<>]+)(<=|>=|!=|=|<|>)(.*)")
_ORDERED: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
_SWITCHES = {"true": "on", "false": "off", "yes": "on", "no": "off"}
_MOST_VALUES = 12  # most values that a message lists
# Other words for a column.
_ALIASES = {"speed": ["tokens/s"], "memory": ["peak gib"], "time": ["step"],
            "1k samples": [f"cost.{way}.per 1k samples" for way in ("rent", "owned")]}  # fmt: skip
_FAST = {column.source for column in FIGURES if column.more_is_better} | {"model_tflops", "hfu", "mfu_measured"}

Values = list[Any]


def matching(records: Sequence[Record], conditions: Sequence[str]) -> list[Record]:
    """Return the records that meet all conditions: `method=lora`, `rank=8,16`, `tokens/s>=5000`, `state!=ok`."""
    kept = list(records)
    for text in conditions:
        match = _CONDITION.fullmatch(text)
        if match is None:
            raise SpecError(f"--where {shortened(text)}: write it as method=lora, batch=4,8 or tokens/s>=5000")
        name, sign, wanted = map(str.strip, match.groups())
        if _plain(name) == "model" and "/" in wanted:  # the table shows Qwen/Qwen3-8B as Qwen3-8B
            name = "model.id"
        values = _values("--where", name, kept)[0]
        if sign in _ORDERED and _number(wanted) is None:
            raise SpecError(f"--where {name}{sign}{shortened(wanted)}: {sign} compares with a number")
        fits = _fitting(values, sign, wanted)
        if not any(fits):
            known = list(dict.fromkeys(str(value) for value in values if value not in (None, "")))
            listed = f"{nearest(wanted, known)} (values: {units.listed(known or ['none'], _MOST_VALUES)})"
            raise SpecError(f"--where {shortened(text)}: no run matches{listed}")
        kept = [record for record, fit in zip(kept, fits, strict=True) if fit]
    return kept


def arranged(records: Sequence[Record], sort: str | None) -> list[Record]:
    """Return the records sorted by the column `sort`: numbers from best to worst, texts in alphabetical order.

    A minus before the name reverses the order. Unknown values and figures of contended runs come last.
    """
    if sort is None:
        return list(records)
    values, more_is_better = _values("--sort", sort.removeprefix("-"), records)
    pairs = list(zip(records, values, strict=True))
    known = [pair for pair in pairs if not _unknown(*pair)]
    known.sort(key=lambda pair: _rank(pair[1]), reverse=more_is_better != sort.startswith("-"))
    return [record for record, _ in [*known, *(pair for pair in pairs if _unknown(*pair))]]


def _values(option: str, name: str, records: Sequence[Record]) -> tuple[Values, bool]:
    """Return the values of a column, and whether higher values are better. Raise SpecError for an unknown column."""
    columns = _columns(records)
    key = next((key for key in (_plain(name), *_ALIASES.get(_plain(name), ())) if key in columns), None)
    if key is None:
        raise SpecError(
            f"{option} {shortened(name)}: unknown column{nearest(_plain(name), columns)} (use method, batch, gpu, "
            "state, tokens/s, a key of `ftbench list keys`, or a field of --format csv)"
        )
    return columns[key]


def _columns(records: Sequence[Record]) -> dict[str, tuple[Values, bool]]:
    """Return {column: (values, whether higher is better)}. Headings override spec keys; spec keys override fields."""
    specs = [spec_facts(RunDir(Path(record["path"]))) for record in records]
    keys = list(dict.fromkeys(key for spec in specs for key in spec))
    fields = dict.fromkeys(name for record in records for name in record)
    columns = {_plain(name): (_of(records, name), name in _FAST or "_per_s" in name) for name in fields}
    varying = [key for key in keys if len({spec.get(key) for spec in specs}) > 1]
    names = [*keys, *headings(keys), *headings(varying)]  # headings as in `runs_table`, where only some keys vary
    for heading, key in zip(names, [*keys, *keys, *varying], strict=True):
        columns[_plain(heading)] = [spec.get(key) for spec in specs], False
    shown = list(map(_shown, records, data_labels(records), specs))
    columns |= {name: ([texts[name] for texts in shown], False) for name in shown[0]} if shown else {}
    return columns | {_plain(each.heading): (_of(records, each.source), each.more_is_better) for each in FIGURES}


def _of(records: Sequence[Record], name: str) -> Values:
    """Return the values of a field. The figures of failed runs are None."""
    values = [record.get(name) for record in records]
    return [None if isinstance(value, float) and record["state"] != "ok" else value
            for record, value in zip(records, values, strict=True)]  # fmt: skip


def _shown(record: Record, data: str, spec: Mapping[str, str]) -> Mapping[str, Any]:
    """Return {heading: text} for a record, with the headings of the table of runs."""
    texts = {CONTEXT[name].casefold(): text for name, text in context_of(record, data).items()}
    more = {"method": record["method"], "batch": record["batch_size"], "state": state_of(record)}
    return texts | more | {"#": record.get("number"), "recipe": recipe_name(spec)}


def _plain(name: object) -> str:
    return str(name).strip().casefold().replace("_", " ")


def _unknown(record: Record, value: object) -> bool:
    contended = isinstance(value, float) and bool(record.get("contention.contended"))
    return value in (None, "") or value != value or contended


def _rank(value: object) -> tuple[bool, float, str]:
    number = _number(value)
    return (True, 0.0, str(value)) if number is None else (False, number, "")


def _number(value: object) -> float | None:
    try:
        number = float(str(value).replace(",", ""))
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _fitting(values: Values, sign: str, wanted: str) -> list[bool]:
    """Return one bool per value: whether the value fits the condition. For `=` and `!=`, search for values that equal
    `wanted`. If there are none, search for texts with a word that starts with `wanted`."""
    numbers = list(map(_number, values))
    if sign in _ORDERED:
        limit = _number(wanted)
        return [number is not None and _ORDERED[sign](number, limit) for number in numbers]
    parts = [_SWITCHES.get(_plain(part), _plain(part)) for part in wanted.split(",")]
    known = {_number(part) for part in parts} - {None}
    texts = ["" if value is None else _SWITCHES.get(text := _plain(value), text) for value in values]
    fits = [text in parts or number in known for text, number in zip(texts, numbers, strict=True)]
    if not any(fits):
        fits = [number is None and any(part and re.search(rf"\b{re.escape(part)}", text) for part in parts)
                for text, number in zip(texts, numbers, strict=True)]  # fmt: skip
    return [fit != (sign == "!=") for fit in fits]

"""`--where`, `--sort` and `--columns`: select, order and show runs."""

import math
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ftbench.core import units
from ftbench.errors import SpecError
from ftbench.report.data.axes import PREFIX, headings
from ftbench.report.data.collect import Record, data_labels, state_of
from ftbench.report.data.facts import CPU, spec_facts
from ftbench.report.document import Column
from ftbench.report.runs_table import FIGURES
from ftbench.spec.base import nearest, shortened
from ftbench.store.rundir import RunDir

_CONDITION = re.compile(r"([^=!<>]+)(<=|>=|!=|=|<|>)(.*)")
_ORDERED: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
_SWITCHES = {"true": "on", "false": "off", "yes": "on", "no": "off"}
_MOST_VALUES = 12  # in a message
_ALIASES = {"speed": "tokens/s", "memory": "peak GiB", "time": "step"}  # words of users for headings
SEEN = "shown."  # prefix of record fields with the text of a column


class Selection:
    """The runs of a report, addressed by table heading, spec key, the end of a spec key, or record field."""

    def __init__(self, records: Sequence[Record]) -> None:
        specs = [spec_facts(RunDir(Path(record["path"]))) for record in records]
        self.records = [
            record | {PREFIX + key: text for key, text in spec.items()} | _shown(record, data)
            for record, spec, data in zip(records, specs, data_labels(records), strict=True)
        ]
        self._columns = _columns(dict.fromkeys(name for record in self.records for name in record))

    def column(self, option: str, name: str) -> Column:
        """Return the column of this name. Raise SpecError with the nearest name if it does not exist."""
        known = (self._columns.get(_plain(each)) for each in (name, _ALIASES.get(name, name)))
        if (column := next(filter(None, known), None)) is None:
            near = nearest(_plain(name), self._columns)
            raise SpecError(
                f"{option} {shortened(name)}: unknown column{near} (use method, batch, gpu, state, tokens/s, a "
                "key of `ftbench list keys`, or a field of --format csv)"
            )
        return column

    def where(self, conditions: Iterable[str]) -> None:
        """Keep the runs that meet all conditions: `method=lora`, `rank=8,16`, `tokens/s>=5000`, `state!=ok`."""
        for text in conditions:
            match = _CONDITION.fullmatch(text)
            if match is None:
                raise SpecError(f"--where {shortened(text)}: write it as method=lora, batch=4,8 or tokens/s>=5000")
            name, sign, value = map(str.strip, match.groups())
            column = self.column("--where", name)
            choose = _ordered if sign in _ORDERED else _equal
            kept = choose(self.records, column, sign, value)
            if sign == "!=":
                left = {id(record) for record in kept}
                kept = [record for record in self.records if id(record) not in left]
            if not kept:
                raise SpecError(f"--where {shortened(text)}: no run matches{self._values(column, value)}")
            self.records = kept

    def _values(self, column: Column, value: str) -> str:
        values = list(filter(None, dict.fromkeys(_text(record, column) for record in self.records)))
        return f"{nearest(value, values)} (values: {units.listed(values or ['none'], _MOST_VALUES)})"

    def sort(self, name: str) -> None:
        """Sort the best first: descending if higher is better, ascending for other figures, words by the alphabet.

        A leading minus reverses the order. Unknown values come last.
        """
        column = self.column("--sort", name.removeprefix("-"))
        known = [record for record in self.records if _known(record, column)]
        unknown = [record for record in self.records if not _known(record, column)]
        known.sort(key=lambda record: _rank(record, column), reverse=column.more_is_better != name.startswith("-"))
        self.records = [*known, *unknown]


def _shown(record: Record, data: str) -> Record:
    """Return the texts of a record by the headings of the table of runs."""
    known = {
        "model": str(record["model"]).rsplit("/", 1)[-1], "gpu": record["gpu"] or CPU, "data": data,
        "with": ", ".join(record["optimizations"]).replace("_", " ") or "none", "method": record["method"],
        "batch": record["batch_size"], "state": state_of(record), "#": record.get("number"),
    }  # fmt: skip
    return {SEEN + name: value for name, value in known.items()}


def _columns(fields: Iterable[str]) -> dict[str, Column]:
    """Return the columns by name. Table headings take precedence over spec keys, and these over other fields."""
    columns = {column.heading: column for column in FIGURES}
    names = list(fields)
    columns |= {name.removeprefix(SEEN): Column(name.removeprefix(SEEN), name) for name in names if name[:6] == SEEN}
    keys = [name for name in names if name.startswith(PREFIX)]
    spec = dict(zip(headings(keys), keys, strict=True)) | {name.removeprefix(PREFIX): name for name in keys}
    columns = {heading: Column(heading, name) for heading, name in spec.items()} | columns
    fast = {column.source for column in FIGURES if column.more_is_better}
    rest = {name: Column(name, name, _words, name in fast or "_per_" in name) for name in names}
    return {_plain(name): column for name, column in (rest | columns).items()}


def _words(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _plain(name: str) -> str:
    return name.strip().casefold().replace("_", " ")


def _value(record: Record, column: Column) -> Any:
    """Return the value of a record. A failed run has figures of None."""
    value = record.get(column.source)
    return None if isinstance(value, float) and record["state"] != "ok" else value


def _text(record: Record, column: Column) -> str:
    value = _value(record, column)
    return "" if value is None else str(value)


def _known(record: Record, column: Column) -> bool:
    """Return whether a run is sorted by a value. Figures of contended runs are not valid, so these come last."""
    value = _value(record, column)
    disturbed = isinstance(value, float) and record.get("contention.contended")
    return value not in (None, "") and value == value and not disturbed


def _rank(record: Record, column: Column) -> tuple[bool, float, str]:
    number = _number(record[column.source])
    return (True, 0.0, str(record[column.source])) if number is None else (False, number, "")


def _number(value: object) -> float | None:
    try:
        number = float(str(value).replace(",", ""))
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _ordered(records: Sequence[Record], column: Column, sign: str, value: str) -> list[Record]:
    limit = _number(value)
    if limit is None:
        raise SpecError(f"--where {column.heading}{sign}{shortened(value)}: {sign} compares with a number")
    pairs = [(record, _number(_value(record, column))) for record in records]
    return [record for record, number in pairs if number is not None and _ORDERED[sign](number, limit)]


def _equal(records: Sequence[Record], column: Column, sign: str, value: str) -> list[Record]:
    """Return the records that equal one of the values. If there are none, those whose words contain a value."""
    wanted = [_SWITCHES.get(_plain(part), _plain(part)) for part in value.split(",")]
    numbers = {_number(part) for part in wanted} - {None}
    texts = [(record, _plain(_text(record, column))) for record in records]
    exact = [record for record, text in texts if text in wanted or _number(text) in numbers]
    words = [(record, text) for record, text in texts if _number(text) is None]
    return exact or [record for record, text in words if any(part and part in text for part in wanted)]


def matching(records: Sequence[Record], conditions: Sequence[str]) -> list[Record]:
    """Return the records that meet all conditions."""
    if not conditions:
        return list(records)
    selection = Selection(records)
    selection.where(conditions)
    kept = {record["path"] for record in selection.records}
    return [record for record in records if record["path"] in kept]


def arranged(records: Sequence[Record], sort: str | None, names: Sequence[str]) -> tuple[list[Record], list[Column]]:
    """Return the records in the requested order, and the requested columns."""
    if sort is None and not names:
        return list(records), []
    selection = Selection(records)
    if sort is not None:
        selection.sort(sort)
    columns = [selection.column("--columns", name) for name in names]
    if columns:
        return selection.records, columns
    order = {record["path"]: at for at, record in enumerate(selection.records)}
    return sorted(records, key=lambda record: order[record["path"]]), []

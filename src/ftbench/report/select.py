"""`--where`, `--sort` and `--columns`: which runs a report is about, in which order, and under which columns."""

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
from ftbench.report.render.document import Column
from ftbench.report.render.runs_table import FIGURES
from ftbench.spec.base import nearest, shortened
from ftbench.store.rundir import RunDir

_CONDITION = re.compile(r"([^=!<>]+)(<=|>=|!=|=|<|>)(.*)")
_ORDERED: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
_SWITCHES = {"true": "on", "false": "off", "yes": "on", "no": "off"}
_MOST_VALUES = 12  # that a message lists
SEEN = "shown."  # of the fields of a record that hold what a column shows


class Selection:
    """The runs of a report by what can be said of them: a heading of its tables, a key of the spec or the end of one,
    or a field of the records."""

    def __init__(self, records: Sequence[Record]) -> None:
        specs = [spec_facts(RunDir(Path(record["path"]))) for record in records]
        self.records = [
            record | {PREFIX + key: text for key, text in spec.items()} | _shown(record, data)
            for record, spec, data in zip(records, specs, data_labels(records), strict=True)
        ]
        self._columns = _columns(dict.fromkeys(name for record in self.records for name in record))

    def column(self, option: str, name: str) -> Column:
        """Return what is meant by a name. Raise SpecError, with the nearest, for one that nothing has."""
        if (column := self._columns.get(_plain(name))) is None:
            near = nearest(_plain(name), self._columns)
            raise SpecError(
                f"{option} {shortened(name)}: no run has such a column{near} (method, batch, gpu, state, tokens/s, a "
                "key of `ftbench list keys`, or a field of --format csv)"
            )
        return column

    def where(self, conditions: Iterable[str]) -> None:
        """Keep the runs of which all conditions hold: `method=lora`, `rank=8,16`, `tokens/s>=5000`, `state!=ok`."""
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
                raise SpecError(f"--where {shortened(text)}: no run has it{self._values(column, value)}")
            self.records = kept

    def _values(self, column: Column, value: str) -> str:
        values = list(filter(None, dict.fromkeys(_text(record, column) for record in self.records)))
        return f"{nearest(value, values)} (there are {units.listed(values or ['none'], _MOST_VALUES)})"

    def sort(self, name: str) -> None:
        """Put the best first: most of what more of is better, least of other figures, words by the alphabet; with a
        leading minus the other way round. What is unknown comes last."""
        column = self.column("--sort", name.removeprefix("-"))
        known = [record for record in self.records if _known(record, column)]
        unknown = [record for record in self.records if not _known(record, column)]
        known.sort(key=lambda record: _rank(record, column), reverse=column.more_is_better != name.startswith("-"))
        self.records = [*known, *unknown]


def _shown(record: Record, data: str) -> Record:
    """Return what the table of runs says of a record, by its headings."""
    known = {
        "model": str(record["model"]).rsplit("/", 1)[-1], "gpu": record["gpu"] or CPU, "data": data,
        "with": ", ".join(record["optimizations"]).replace("_", " ") or "none", "method": record["method"],
        "batch": record["batch_size"], "state": state_of(record), "#": record.get("number"),
    }  # fmt: skip
    return {SEEN + name: value for name, value in known.items()}


def _columns(fields: Iterable[str]) -> dict[str, Column]:
    """Return what each name means: headings of the table before keys of the spec, these before other fields."""
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
    """Return what a record has; a run that did not end well has no figures."""
    value = record.get(column.source)
    return None if isinstance(value, float) and record["state"] != "ok" else value


def _text(record: Record, column: Column) -> str:
    value = _value(record, column)
    return "" if value is None else str(value)


def _known(record: Record, column: Column) -> bool:
    value = _value(record, column)
    return value not in (None, "") and value == value


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
    """Return the records that have one of the values, or else, of words, one as a part of theirs: 16 is no 1."""
    wanted = [_SWITCHES.get(_plain(part), _plain(part)) for part in value.split(",")]
    numbers = {_number(part) for part in wanted} - {None}
    texts = [(record, _plain(_text(record, column))) for record in records]
    exact = [record for record, text in texts if text in wanted or _number(text) in numbers]
    words = [(record, text) for record, text in texts if _number(text) is None]
    return exact or [record for record, text in words if any(part and part in text for part in wanted)]


def matching(records: Sequence[Record], conditions: Sequence[str]) -> list[Record]:
    """Return the records of which all conditions hold."""
    if not conditions:
        return list(records)
    selection = Selection(records)
    selection.where(conditions)
    kept = {record["path"] for record in selection.records}
    return [record for record in records if record["path"] in kept]


def arranged(records: Sequence[Record], sort: str | None, names: Sequence[str]) -> tuple[list[Record], list[Column]]:
    """Return the records in the order asked for, and the columns that were named, whose fields they have."""
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

"""Write and read steps.csv.

The file grows by complete lines. A reader skips a damaged line with a warning. An empty field is None. NaN and
infinity are kept: they show that a training diverged.
"""

import csv
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import compress, repeat
from operator import itemgetter
from pathlib import Path

from ftbench.core import rows
from ftbench.store.rundir import MOST_CSV_BYTES, open_plain_file, writing

_NAN = re.compile(rb"(?im),[+-]?(?:nan|inf(?:inity)?)(?:,|\r?$)")


class StepsWriter:
    """Appends complete lines to a steps.csv, each batch of rows in one write."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with writing(path):
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.write(self._file, rows.header().encode())

    def append(self, steps: Iterable[rows.StepRow]) -> None:
        """Append rows without buffering. Raise MissingError for a full disk."""
        data = "".join(map(rows.to_csv, steps)).encode()
        with writing(self._path):
            while data:
                data = data[os.write(self._file, data) :]

    def close(self) -> None:
        try:
            os.fsync(self._file)
        finally:
            os.close(self._file)


class StepsTail:
    """Reads new rows of a steps.csv while another process writes it."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._header = path, 0, ""

    def read(self) -> list[rows.StepRow]:
        """Return the rows that were completed since the last call, without damaged ones."""
        with suppress(OSError, ValueError), open_plain_file(self._path, MOST_CSV_BYTES) as file:
            file.seek(self._offset)
            return self._rows_of(file.read())
        return []

    def _rows_of(self, data: bytes) -> list[rows.StepRow]:
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        text = whole.decode("utf-8", errors="replace")
        if not self._header:
            self._header, _, text = text.partition("\n")
        return list(_rows(f"{self._header}\n{text}", self._path.name, [])) if self._header else []


def read_steps(path: Path) -> tuple[list[rows.StepRow], list[str]]:
    """Return the rows of a steps.csv and warnings about damaged lines.

    A missing file gives an empty list. An incomplete last line (after a kill or a full disk) is dropped.
    """
    text, unread = _text(path)
    if unread:
        return [], [unread]
    whole, newline, torn = text.rpartition("\n")
    warnings = [f"{path.name}: the last line is not finished and was left out"] if torn else []
    return list(_rows(f"{whole}{newline}", path.name, warnings)), warnings


def has_nan(path: Path) -> bool:
    """Return whether a field of a steps.csv is NaN or infinite. A file that cannot be read has none."""
    with suppress(OSError, ValueError), open_plain_file(path, MOST_CSV_BYTES) as file:
        return bool(_NAN.search(file.read()))
    return False


def _text(path: Path) -> tuple[str, str | None]:
    """Return the text of a file and the problem with it. A missing file is empty."""
    try:
        with open_plain_file(path, MOST_CSV_BYTES) as file:
            return file.read().decode("utf-8", errors="replace"), None
    except FileNotFoundError:
        return "", None
    except (OSError, ValueError) as error:
        return "", f"{path.name}: {error}"


def read_columns(path: Path, names: Sequence[str]) -> dict[str, list[float | None]]:
    """Return columns of the training rows of a steps.csv, much faster than `read_steps`.

    Empty fields and missing columns are None. Rows without a step number are skipped. The result is empty without rows.
    """
    text = _text(path)[0].replace("\r\n", "\n")
    head, *lines = text.split("\n")[:-1] or [""]
    header = head.split(",")
    if "step" not in header or '"' in text or any(line.count(",") != len(header) - 1 for line in lines):
        return _checked_columns(path, names)
    wanted = [name for name in ("step", "phase", *names) if name in header]
    places = [header.index(name) for name in wanted]
    pick, last = itemgetter(*places, 0), max(places) + 1  # later fields are not split
    fields = dict(zip(wanted, zip(*(pick(line.split(",", last)) for line in lines), strict=True), strict=False))
    phases = fields.get("phase", repeat(""))
    trained = [
        bool(step) and phase in ("train", "") for step, phase in zip(fields.get("step", ()), phases, strict=False)
    ]
    count = sum(trained)
    unknown: list[float | None] = [None] * count
    try:
        return {name: _numbers(name, list(compress(fields[name], trained))) if name in fields else [*unknown]
                for name in names if count}  # fmt: skip
    except ValueError:
        return _checked_columns(path, names)


def _checked_columns(path: Path, names: Sequence[str]) -> dict[str, list[float | None]]:
    """Return columns by the slow reader, which checks each line of a damaged file."""
    train = [row for row in read_steps(path)[0] if row.phase in ("train", None) and row.step is not None]
    return {name: [getattr(row, name) for row in train] for name in names if train}


def _numbers(name: str, texts: Sequence[str]) -> list[float | None]:
    """Return the numbers of a column. Raise ValueError if one is out of the column's range."""
    numbers: list[float | None] = [*map(float, texts)] if all(texts) else [float(t) if t else None for t in texts]
    known = list(filter(None, numbers))
    finite = known if math.isfinite(sum(known)) else list(filter(math.isfinite, known))
    if len(finite) < len(known) and name not in rows.MAY_DIVERGE:
        raise ValueError(name)
    if finite and not (rows.can_hold(name, min(finite)) and rows.can_hold(name, max(finite))):
        raise ValueError(name)
    return numbers


def _rows(text: str, name: str, warnings: list[str]) -> Iterator[rows.StepRow]:
    names: list[str] | None = None
    for number, line in enumerate(text.split("\n")[:-1], start=1):  # a stray quote damages one row only
        try:
            values = next(csv.reader([line]))
            if names is not None:
                yield rows.parse(dict(zip(names, values, strict=True)))
            names = names or values
        except (ValueError, csv.Error, StopIteration):
            warnings.append(f"{name}: line {number} cannot be read and was left out")

"""Write and read steps.csv.

Only complete lines are appended. Readers skip a damaged line with a warning. An empty field becomes None. NaN and
infinity are kept, because they show that training diverged.
"""

import csv
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from ftbench.core import rows
from ftbench.store.rundir import MOST_CSV_BYTES, open_plain_file, writing

_NAN = re.compile(rb"(?im),[+-]?(?:nan|inf(?:inity)?)(?:,|\r?$)")


class StepsWriter:
    """Appends rows to a steps.csv. The rows of one call are written together."""

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
        """Return the valid rows that were completed since the last call."""
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
    """Return the rows of a steps.csv, and warnings about damaged lines.

    A missing file gives an empty list. An incomplete last line (after a kill or with a full disk) is left out.
    """
    text, unread = _text(path)
    if unread:
        return [], [unread]
    whole, newline, torn = text.rpartition("\n")
    warnings = [f"{path.name}: the last line is not finished and was left out"] if torn else []
    return list(_rows(f"{whole}{newline}", path.name, warnings)), warnings


def has_nan(path: Path) -> bool:
    """Return whether a steps.csv contains NaN or infinity. Return False for a file that cannot be read."""
    with suppress(OSError, ValueError), open_plain_file(path, MOST_CSV_BYTES) as file:
        return bool(_NAN.search(file.read()))
    return False


def _text(path: Path) -> tuple[str, str | None]:
    """Return the text of a file, and an error message or None. The text of a missing file is empty."""
    try:
        with open_plain_file(path, MOST_CSV_BYTES) as file:
            return file.read().decode("utf-8-sig", errors="replace"), None
    except FileNotFoundError:
        return "", None
    except (OSError, ValueError) as error:
        return "", f"{path.name}: {error}"


def read_columns(path: Path, names: Sequence[str]) -> dict[str, list[float | None]]:
    """Return {column name: values} for the training rows of a steps.csv. This is faster than `read_steps`.

    An empty field becomes None. A missing column becomes a list of None. Damaged rows and rows without a step number
    are skipped. Without rows, the dict is empty.
    """
    head, *lines = _text(path)[0].replace("\r\n", "\n").split("\n")[:-1] or [""]
    header = head.split(",")
    at = {name: header.index(name) for name in ("step", "phase", *names) if name in header}
    table: list[list[float | None]] = []
    for fields in (line.split(",") for line in lines if "step" in at):
        phase = fields[at["phase"]] if len(fields) == len(header) and "phase" in at else ""
        if len(fields) == len(header) and fields[at["step"]] and phase in ("train", ""):
            with suppress(ValueError):
                table.append([float(rows.value_of(name, fields[at[name]])) if name in at and fields[at[name]] else None
                              for name in names])  # fmt: skip
    return dict(zip(names, map(list, zip(*table, strict=True)), strict=True)) if table else {}


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

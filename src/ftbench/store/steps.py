"""Write and read steps.csv.

Only complete lines are appended. Readers skip a damaged line with a warning. An empty field becomes None. NaN and
infinity are kept, because they show that training diverged.
"""

import csv
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from ftbench.core import rows
from ftbench.store.rundir import MOST_CSV_BYTES, open_plain_file, writing


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
        data = b""
        with suppress(OSError, ValueError), open_plain_file(self._path, MOST_CSV_BYTES) as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        text = whole.decode("utf-8", errors="replace")
        if not self._header:
            self._header, _, text = text.partition("\n")
        return list(_rows(f"{self._header}\n{text}", self._path.name, [])) if self._header else []


def read_steps(path: Path, ended: bool = False) -> tuple[list[rows.StepRow], list[str]]:
    """Return the rows of a steps.csv, and warnings about damaged lines.

    A missing file gives an empty list. A last line without a line break (after a kill or with a full disk) is left out,
    except if the file has `ended`.
    """
    try:
        with open_plain_file(path, MOST_CSV_BYTES) as file:
            text = file.read().decode("utf-8-sig", errors="replace")
    except FileNotFoundError:
        return [], []
    except (OSError, ValueError) as error:
        return [], [f"{path.name}: {error}"]
    whole, newline, torn = (text.rstrip("\n") + "\n" if ended else text).rpartition("\n")
    warnings = [f"{path.name}: the last line is not finished and was left out"] if torn else []
    return list(_rows(f"{whole}{newline}", path.name, warnings)), warnings


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

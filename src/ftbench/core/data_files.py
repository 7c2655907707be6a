"""Rows of a user's JSON, JSONL, CSV or Parquet file, each with the place it has there."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

from ftbench.errors import DataError, file_problem, json_problem

_ROWS = 1024  # of a Parquet file that are made at once


class FileRows:
    """Rows of a file, each with the line (or record) it stands on."""

    def __init__(
        self, path: Path, numbered: Iterator[tuple[int, dict[str, Any]]], unit: str, most: int | None = None
    ) -> None:
        self._path, self._unit, self.folder = path, unit, path.parent
        self._rows = list(islice(numbered, most))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._rows[index][1]

    def where(self, index: int) -> str:
        return f"{self._path}, {self._unit} {self._rows[index][0]}"


def read_file(path: Path, most: int | None = None) -> FileRows:
    """Return the rows (of `most` the first) of a .json, .jsonl, .csv or .parquet file, or of the only one in a folder.
    Raise DataError that names file and row."""
    if path.is_dir():
        files = sorted(each for each in path.iterdir() if each.suffix.lower() in _READERS)
        if len(files) != 1:
            names = ", ".join(each.name for each in files[:4]) or "none"
            raise DataError(f"{path}: a folder must hold one file that names its images, and holds {names}")
        (path,) = files
    reader, unit = _READERS.get(path.suffix.lower(), (None, ""))
    if reader is None:
        raise DataError(
            f"{path}: {path.suffix or 'a name without ending'} is not known; give .json, .jsonl, .csv or .parquet"
        )
    try:
        rows = FileRows(path, reader(path), unit, most)
    except OSError as error:
        raise DataError(f"{path}: {file_problem(error)}") from None
    if not len(rows):
        raise DataError(f"{path}: holds no rows")
    return rows


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path}, line {number}: byte {error.start + 1} is not UTF-8; save the file as UTF-8"
                ) from None


def _jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            problem = json_problem(error)
            raise DataError(f"{path}, line {number}: not JSON ({problem}); each line is one object") from None
        yield number, _object(path, f"line {number}", row)


def _json(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        data = json.loads("".join(line for _, line in _lines(path)))
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}, line {error.lineno}: not JSON ({error.msg}); for one object a line name it .jsonl"
        ) from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read as JSON ({json_problem(error)})") from None
    if not isinstance(data, list):
        raise DataError(f"{path}: must hold a list of objects, not {type(data).__name__}")
    for number, row in enumerate(data, start=1):
        yield number, _object(path, f"record {number}", row)


def _object(path: Path, where: str, row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DataError(f"{path}, {where}: must be an object with named fields, not {type(row).__name__}")
    return row


def _csv(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    csv.field_size_limit(2**31 - 1)  # a text may be longer than the 128 KiB that csv allows by itself
    reader = csv.reader(line for _, line in _lines(path))
    try:
        names = next(reader, None)
        if not names:
            raise DataError(f"{path}: is empty; the first line names the columns")
        for values in reader:
            if not values:
                continue
            if len(values) != len(names):
                raise DataError(
                    f"{path}, line {reader.line_num}: {len(values)} fields where the header names {len(names)}"
                )
            yield reader.line_num, dict(zip(names, values, strict=True))
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: not CSV ({error})") from None


def _parquet(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not Parquet ({str(error).splitlines()[0]})") from None
    for number in range(1, table.num_rows + 1, _ROWS):
        part = table.slice(number - 1, _ROWS)
        try:
            yield from enumerate(part.to_pylist(), start=number)
        except (ValueError, OverflowError):
            _raise_for_row(path, part, number)


def _raise_for_row(path: Path, table: Any, first: int) -> NoReturn:
    """Raise DataError for the first value that Python cannot hold: text that is not UTF-8, a date out of its range."""
    for index in range(table.num_rows):
        for name in table.column_names:
            try:
                table.column(name)[index].as_py()
            except (ValueError, OverflowError) as error:
                raise DataError(f"{path}, row {first + index}: {name} cannot be read ({error})") from None
    raise AssertionError("every value can be read")


_READERS: dict[str, tuple[Callable[[Path], Iterator[tuple[int, dict[str, Any]]]], str]] = {
    ".jsonl": (_jsonl, "line"),
    ".json": (_json, "record"),
    ".csv": (_csv, "line"),
    ".parquet": (_parquet, "row"),
}

"""Read the rows of JSON, JSONL, CSV and Parquet files. Each row keeps its line number for error messages."""

import csv
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from ftbench.errors import DataError, MissingError, file_problem

LARGEST_IMAGE = 256 * 2**20  # bytes of a file
_ROWS = 1024  # number of rows of a Parquet file that are converted at once


def image_problem(error: Exception) -> str:
    """Return the reason why an image file cannot be used, in one line and without object addresses."""
    if isinstance(error, OSError) and error.strerror:
        return f"{str(error.filename)[-120:]}: {error.strerror}"
    message = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return re.sub(r" <_io\..*>", "", message)[:120]


def orientation(image: Any) -> int:
    """Return the EXIF orientation of an open image, from 1 to 8 (EXIF 2.32). 1 is upright. From 5 on, width and height
    are swapped. A missing or unreadable value counts as 1."""
    if image.format == "PNG" and "exif" not in image.info:
        return 1  # without this, Pillow decodes the image to search for metadata
    try:
        value = int(image.getexif().get(0x112, 1))
    except Exception:  # noqa: BLE001 - broken metadata raises anything
        return 1
    return value if 1 <= value <= 8 else 1


class FileRows:
    """The rows of one or more data files, with the file and the line number or record number of each row."""

    def __init__(self, folder: Path, rows: Sequence[tuple[Path, int, dict[str, Any]]]) -> None:
        self.folder, self._rows = folder, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._rows[index][2]

    def where(self, index: int) -> str:
        """Return the position of a row for error messages, such as `data.jsonl, line 3`."""
        path, number, _ = self._rows[index]
        return f"{path}, {_READERS[path.suffix.lower()][1]} {number}"


def read_file(path: Path, most: int | None = None) -> FileRows:
    """Read a .json, .jsonl, .csv or .parquet file, or the data files of a folder.

    Args:
        path: A file or a folder.
        most: Maximum number of rows to read, None for all.

    Raises:
        DataError: A file or a row cannot be read. The message names the file and the row.
    """
    try:
        files = files_of(path) if path.is_dir() else [path]
        rows = FileRows(files[0].parent, list(islice(_rows(files), most)))
    except OSError as error:
        raise DataError(f"{path}: {file_problem(error)}") from None
    if not len(rows):
        example = '{"prompt": "Hi", "completion": "Hello"}'
        raise DataError(f"{path}: the file is empty; it needs a row per sample, such as {example}")
    return rows


def _rows(files: Sequence[Path]) -> Iterator[tuple[Path, int, dict[str, Any]]]:
    for file in files:
        reader, _ = _READERS.get(file.suffix.lower(), (None, ""))
        if reader is None:
            suffix = file.suffix or "a name without an extension"
            raise DataError(f"{file}: {suffix} is not supported; use .json, .jsonl, .csv or .parquet")
        yield from ((file, number, row) for number, row in reader(file))


def files_of(folder: Path) -> list[Path]:
    """Return the data file in a folder, or else in its subfolder `data` (layout of the Hub).

    If there are several data files, return the files of the `train` split. Raise DataError if this is not clear."""
    for parent in (folder, folder / "data"):
        files = sorted(parent.iterdir()) if parent.is_dir() else []
        files = [each for each in files if each.suffix.lower() in _READERS]
        if len(files) > 1:
            files = [each for each in files if each.name.startswith("train")] or files
        if len(files) == 1 or (files and all(each.name.startswith("train") for each in files)):
            return files
        if files:
            names = ", ".join(each.name for each in files[:4])
            raise DataError(f"{folder}: contains several data files ({names}); give the path of one")
    raise DataError(f"{folder}: contains no .json, .jsonl, .csv or .parquet file (for images: one that lists them)")


@contextmanager
def _open_text(path: Path) -> Iterator[TextIO]:
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            yield file
    except UnicodeDecodeError:
        raise DataError(f"{path}: is not UTF-8; save the file as UTF-8") from None


def _jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with _open_text(path) as file:
        for number, line in enumerate(file, start=1):
            if not (line := line.strip()):
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                reason = f"column {error.colno}: {error.msg}" if isinstance(error, json.JSONDecodeError) else error
                raise DataError(f"{path}, line {number}: not JSON ({reason}); each line must be one object") from None
            yield number, _object(path, f"line {number}", row)


def _json(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with _open_text(path) as file:
        text = file.read()
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON ({error}); if each line is one object, rename it to .jsonl") from None
    if not isinstance(data, list):
        raise DataError(f"{path}: must contain a list of objects, not {type(data).__name__}")
    for number, row in enumerate(data, start=1):
        yield number, _object(path, f"record {number}", row)


def _object(path: Path, where: str, row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DataError(f"{path}, {where}: must be an object with named fields, not {type(row).__name__}")
    return row


def _csv(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    csv.field_size_limit(2**31 - 1)  # the default is 128 KiB
    with _open_text(path) as file:
        delimiter = max(",;\t", key=file.readline().count)  # spreadsheets of some countries write semicolons
        file.seek(0)
        reader = csv.DictReader(file, delimiter=delimiter, strict=True)  # not strict: an open quote takes in all rows
        begin = 2  # the line in which the current row begins
        try:
            if not reader.fieldnames:
                raise DataError(f"{path}: is empty; the first line must name the columns")
            for row in reader:
                if None in row or None in row.values():
                    wanted = f"must have {len(reader.fieldnames)} fields, as the header names"
                    raise DataError(f"{path}, line {reader.line_num}: {wanted}")
                yield reader.line_num, row
                begin = reader.line_num + 1
        except csv.Error as error:
            raise DataError(f"{path}, row from line {begin}: not CSV ({error}): check its quotes") from None


def _parquet(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise MissingError(f"{path}: Parquet files need pyarrow: pip install pyarrow") from None
    number = 1
    try:
        with open(path, "rb") as file:
            for batch in pyarrow.parquet.ParquetFile(file).iter_batches(_ROWS):
                yield from enumerate(batch.to_pylist(), start=number)
                number += batch.num_rows
    except Exception as error:  # broken files raise anything
        if isinstance(error, OSError) and error.filename is not None:
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{path}, row {number} or later: cannot be read ({reason})") from None


_READERS: dict[str, tuple[Callable[[Path], Iterator[tuple[int, dict[str, Any]]]], str]] = {
    ".jsonl": (_jsonl, "line"),
    ".json": (_json, "record"),
    ".csv": (_csv, "line"),
    ".parquet": (_parquet, "row"),
}

"""Rows of a user's JSON, JSONL, CSV or Parquet file, each with the place it has there."""

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

from ftbench.core.units import some
from ftbench.errors import DataError, MissingError, file_problem, json_problem

_ROWS = 1024  # of a Parquet file that are made at once
_MOST_LINE = 2**28  # bytes; a row with its images in it takes a hundredth
_HALF = re.compile(r"\\ud[89a-f]", re.IGNORECASE)  # what JSON writes characters beyond 16 bits with, two at a time
_IMAGES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"}


def image_problem(error: Exception) -> str:
    """Return why an image's file cannot be used, in a line and without the object that a decoder had it in."""
    if isinstance(error, OSError) and error.strerror:
        return f"{str(error.filename)[-120:]}: {file_problem(error, '{}')}"
    said = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return re.sub(r" <_io\..*>", "", said)[:120]


def orientation(image: Any) -> int:
    """Return how the camera of an opened image was held, 1 to 8 (EXIF 2.32, Orientation): 1 is upright, from 5 on width
    and height change places. What says nothing of it, or nothing that can be read, is upright."""
    if image.format == "PNG" and "exif" not in image.info:
        return 1  # Pillow would decode all of it, to see whether the chunk comes later
    try:
        held = int(image.getexif().get(0x112, 1))
    except Exception:  # noqa: BLE001 - what cameras and programs write there raises anything
        return 1
    return held if 1 <= held <= 8 else 1


class FileRows:
    """Rows of files that belong together, each with the line (or record) it stands on."""

    def __init__(
        self, folder: Path, numbered: Iterable[tuple[Path, int, dict[str, Any]]], most: int | None = None
    ) -> None:
        self.folder, self._rows = folder, list(islice(numbered, most))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._rows[index][2]

    def where(self, index: int) -> str:
        path, number, _ = self._rows[index]
        return f"{path}, {_READERS[path.suffix.lower()][1]} {number}" if number else str(path)


def read_file(path: Path, most: int | None = None) -> FileRows:
    """Return the rows (of `most` the first) of a .json, .jsonl, .csv or .parquet file, or of what a folder holds
    (`_files_of`). Raise DataError that names file and row."""
    try:
        files = _files_of(path) if path.is_dir() else [path]
        rows = FileRows(files[0].parent if files else path, _rows(files) if files else _by_class(path), most)
    except OSError as error:
        raise DataError(f"{path}: {file_problem(error)}") from None
    if not len(rows):
        raise DataError(f"{path}: holds no rows")
    return rows


def _rows(files: Sequence[Path]) -> Iterator[tuple[Path, int, dict[str, Any]]]:
    for file in files:
        reader, _ = _READERS.get(file.suffix.lower(), (None, ""))
        if reader is None:
            raise DataError(
                f"{file}: {file.suffix or 'a name without ending'} is not known; give .json, .jsonl, .csv or .parquet"
            )
        if file.exists() and not file.is_file():  # to read one may wait for ever, or never end
            raise DataError(f"{file}: is a pipe, a device or a folder; rows are in a file")
        yield from ((file, number, row) for number, row in reader(file))


def _files_of(folder: Path) -> list[Path]:
    """Return the file with rows in a folder or in its `data`, where a set of the hub has them; of several, those of the
    split `train`; none where it holds folders of images. Raise DataError for anything else."""
    for parent in (folder, folder / "data"):
        files = sorted(parent.iterdir()) if parent.is_dir() else []
        files = [each for each in files if each.suffix.lower() in _READERS]
        if len(files) > 1:
            files = [each for each in files if each.name.startswith("train")] or files
        if len(files) == 1 or (files and all(each.name.startswith("train") for each in files)):
            return files
        if files:
            names = ", ".join(each.name for each in files[:4])
            raise DataError(f"{folder}: a folder must hold one file that names its images, and holds {names}")
    return []


def _by_class(folder: Path) -> Iterator[tuple[Path, int, dict[str, Any]]]:
    """Yield a row for each image in the folders of a folder, or of its `train`: a class each, by their names. Raise
    DataError where there is none."""
    folders = [each for each in ((folder / "train"), folder) if each.is_dir()][:1]
    classes = sorted(each for parent in folders for each in parent.iterdir() if each.is_dir())
    images = 0
    for label in classes:
        for image in sorted(each for each in label.iterdir() if each.suffix.lower() in _IMAGES):
            images += 1
            yield image, 0, {"image": str(image.relative_to(folder)), "label": label.name}
    if not images:
        raise DataError(
            f"{folder}: a folder must hold one file that names its images, or folders of images by their class, and "
            "holds none"
        )


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open("rb") as file:
        for number, raw in enumerate(iter(partial(file.readline, _MOST_LINE + 1), b""), start=1):
            if len(raw) > _MOST_LINE:
                raise DataError(f"{path}, line {number}: is longer than {_MOST_LINE >> 20} MiB, which no row is")
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
        yield number, _object(path, f"line {number}", row, _HALF.search(line) is not None)


def _json(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        text = "".join(line for _, line in _lines(path))
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}, line {error.lineno}: not JSON ({error.msg}); for one object a line name it .jsonl"
        ) from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read as JSON ({json_problem(error)})") from None
    if not isinstance(data, list):
        raise DataError(f"{path}: must hold a list of objects, not {type(data).__name__}")
    halves = _HALF.search(text) is not None
    for number, row in enumerate(data, start=1):
        yield number, _object(path, f"record {number}", row, halves)


def _object(path: Path, where: str, row: Any, halves: bool) -> dict[str, Any]:
    """Return a row. Raise DataError where it is no object, or, with `halves` to be looked for, holds one."""
    if not isinstance(row, dict):
        raise DataError(f"{path}, {where}: must be an object with named fields, not {type(row).__name__}")
    try:
        if halves:
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise DataError(f"{path}, {where}: {half!r} is half of a character: mend the text") from None
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
                    f"{path}, line {reader.line_num}: {some(len(values), 'field')} where the header names {len(names)}"
                )
            yield reader.line_num, dict(zip(names, values, strict=True))
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: not CSV ({error})") from None


def _parquet(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise MissingError(f"{path}: to read Parquet takes pyarrow: pip install pyarrow") from None
    try:
        with path.open("rb") as file:
            table = pyarrow.parquet.read_table(file)
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise
        raise DataError(f"{path}: not Parquet ({(str(error).splitlines() or [type(error).__name__])[0]})") from None
    classes = _class_names(table.schema.metadata or {})
    for number in range(1, table.num_rows + 1, _ROWS):
        part = table.slice(number - 1, _ROWS)
        try:
            rows = part.to_pylist()
        except Exception:  # noqa: BLE001 - values of broken files raise anything
            _raise_for_row(path, part, number)
        try:
            named = [
                row | {key: names[row[key]] for key, names in classes.items() if row.get(key) is not None}
                for row in rows
            ]
        except (IndexError, TypeError):
            raise DataError(f"{path}: a class is none of {', '.join(map(str, classes))}'s") from None
        yield from enumerate(named, start=number)


def _class_names(metadata: dict[bytes, bytes]) -> dict[str, list[str]]:
    """Return the names of the classes that columns count, as files of the hub say them beside their schema."""
    try:
        features = json.loads(metadata.get(b"huggingface", b"{}")).get("info", {}).get("features", {})
        return {key: [*each["names"]] for key, each in features.items() if each.get("_type") == "ClassLabel"}
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return {}


def _raise_for_row(path: Path, table: Any, first: int) -> NoReturn:
    """Raise DataError for the first value that Python cannot hold: text that is not UTF-8, a date out of its range; or
    for the row, where two columns have one name."""
    for index in range(table.num_rows):
        for name, column in zip(table.column_names, table.columns, strict=True):
            try:
                column[index].as_py()
            except Exception as error:  # noqa: BLE001 - as above
                raise DataError(f"{path}, row {first + index}: {name} cannot be read ({error})") from None
    raise DataError(f"{path}, row {first}: its columns {', '.join(table.column_names)} cannot be told apart")


_READERS: dict[str, tuple[Callable[[Path], Iterator[tuple[int, dict[str, Any]]]], str]] = {
    ".jsonl": (_jsonl, "line"),
    ".json": (_json, "record"),
    ".csv": (_csv, "line"),
    ".parquet": (_parquet, "row"),
}

"""Rows of a data set under the names that its spec gives their columns: their format, and the example in each."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ftbench.core.data_files import read_file
from ftbench.core.data_formats import BadRow, Example, detect, example
from ftbench.errors import DataError, MissingError
from ftbench.spec.base import nearest
from ftbench.spec.datasets import Dataset

MOST_CHECKED = 1000  # rows of a file that are looked at before anything is started


def row_format(dataset: Dataset, row: Mapping[str, Any], where: str, pairs: bool = False) -> str:
    """Return the format of the rows, by their first, which are to be `pairs` or not. Raise DataError for columns of
    none, and for a column that the spec names and the row has not."""
    for role, column in dataset.columns.items():
        if column not in row:
            raise DataError(
                f"{where}: dataset.columns says that {role} is `{column}`, and there is no such column: "
                f"{', '.join(map(str, row))}{nearest(column, map(str, row))}"
            )
    if dataset.name == "wikipedia-ja":
        return "wikipedia-title"
    return dataset.format or dataset.source.format or detect(named_row(row, dataset), where, pairs)


def named_row(row: Mapping[str, Any], dataset: Dataset) -> dict[str, Any]:
    """Return a row with the columns that the spec names under the names that they stand for."""
    return {**row, **{role: row.get(column) for role, column in dataset.columns.items()}}


def row_example(dataset: Dataset, row: Mapping[str, Any], format_name: str, where: str) -> Example:
    """Return the example in a row. Raise DataError for one that cannot be used."""
    try:
        return example(named_row(row, dataset), format_name, dataset.prompt)
    except BadRow as error:
        raise DataError(f"{where}: {error} (format {format_name})") from None


def check_file(dataset: Dataset, pairs: bool = False) -> None:
    """Raise DataError for the first unusable row of a file, as far as it is looked at; rows are `pairs` or not."""
    if not dataset.path or not Path(dataset.path).is_file():
        return
    try:
        rows = read_file(Path(dataset.path), MOST_CHECKED)
    except MissingError:  # what reads Parquet is installed where training is
        return
    format_name = row_format(dataset, rows[0], rows.where(0), pairs)
    for index in range(len(rows)):
        row_example(dataset, rows[index], format_name, rows.where(index))

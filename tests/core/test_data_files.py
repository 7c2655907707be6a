"""Rows of data files: what Python cannot hold is told with its row."""

from __future__ import annotations

import pytest

from ftbench.core.data_files import read_file
from ftbench.errors import DataError

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def column(kind, *values):
    return pyarrow.array(values, kind)


def not_utf8():
    offsets, text = b"\0\0\0\0\2\0\0\0\4\0\0\0", b"ab\xff\xfe"
    return pyarrow.Array.from_buffers(pyarrow.utf8(), 2, [None, pyarrow.py_buffer(offsets), pyarrow.py_buffer(text)])


@pytest.mark.parametrize(
    "values",
    [
        not_utf8(),
        column(pyarrow.timestamp("us"), 1, 2**62),
        column(pyarrow.date32(), 1, 2**30),
        column(pyarrow.duration("s"), 1, 2**62),
    ],
    ids=["text", "timestamp", "date", "duration"],
)
def test_a_value_of_parquet_that_python_cannot_hold_is_told_with_its_row(tmp_path, values):
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"text": ["a", "b"], "odd": values}), path)
    with pytest.raises(DataError, match=r"rows\.parquet, row 2: odd cannot be read"):
        read_file(path)


def test_a_large_parquet_file_keeps_its_rows(tmp_path):
    texts = [f"text {i}" for i in range(2500)]
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "rows.parquet")
    rows = read_file(tmp_path / "rows.parquet")
    assert [rows[i]["text"] for i in range(len(rows))] == texts
    assert rows.where(2499).endswith("rows.parquet, row 2500")

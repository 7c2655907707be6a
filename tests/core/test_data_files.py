"""Rows of data files, and errors that name the row."""

from __future__ import annotations

import pytest

from ftbench.core.data_files import read_file
from ftbench.errors import DataError

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def not_utf8():
    offsets, text = b"\0\0\0\0\2\0\0\0\4\0\0\0", b"ab\xff\xfe"
    return pyarrow.Array.from_buffers(pyarrow.utf8(), 2, [None, pyarrow.py_buffer(offsets), pyarrow.py_buffer(text)])


@pytest.mark.parametrize(
    "values",
    [not_utf8(), pyarrow.array([1, 2**62], pyarrow.timestamp("us"))],
    ids=["text", "timestamp"],
)
def test_unreadable_parquet_values_are_errors(tmp_path, values):
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"text": ["a", "b"], "odd": values}), path)
    with pytest.raises(DataError, match=r"rows\.parquet, row 1 or later: cannot be read"):
        read_file(path)


def test_a_large_parquet_file_keeps_its_rows(tmp_path):
    texts = [f"text {i}" for i in range(2500)]
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "rows.parquet")
    rows = read_file(tmp_path / "rows.parquet")
    assert [rows[i]["text"] for i in range(len(rows))] == texts
    assert rows.where(2499).endswith("rows.parquet, row 2500")


def test_a_folder_of_the_hub_gives_its_train_split(tmp_path):
    (tmp_path / "data").mkdir()
    for name, labels in {"test-0": [1], "train-0": [0, 0], "train-1": [1]}.items():
        parquet.write_table(pyarrow.table({"labels": labels}), tmp_path / "data" / f"{name}.parquet")
    rows = read_file(tmp_path)
    assert [rows[index]["labels"] for index in range(len(rows))] == [0, 0, 1]
    assert rows.where(2) == f"{tmp_path / 'data' / 'train-1.parquet'}, row 1"


def test_a_folder_without_data_is_an_error(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="contains no"):
        read_file(tmp_path)


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_columns_of_a_csv_file_are_separated_as_in_its_header(tmp_path, separator):
    path = tmp_path / "rows.csv"
    path.write_text(f'\ufeffquestion{separator}answer\n"a, b; c"{separator}d\n', encoding="utf-8")
    assert read_file(path)[0] == {"question": "a, b; c", "answer": "d"}


@pytest.mark.parametrize("broken", ['"c, d', 'e,"f" g'])
def test_csv_row_with_a_broken_quote_is_an_error(tmp_path, broken):
    """Without an error, a quote that is not closed takes in all rows after it."""
    path = tmp_path / "rows.csv"
    path.write_text(f"question,answer\na,b\n{broken}\nh,i\nj,k\n")
    with pytest.raises(DataError, match=r"row from line 3: not CSV .*: check its quotes"):
        read_file(path)


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv"])
def test_text_in_another_encoding_is_an_error(tmp_path, ending):
    path = tmp_path / f"rows.{ending}"
    path.write_bytes('{"text": "是"}'.encode("shift_jis"))
    with pytest.raises(DataError, match="is not UTF-8; save the file as UTF-8"):
        read_file(path)

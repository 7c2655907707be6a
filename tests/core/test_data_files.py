"""Rows of data files, and errors that name the row."""

from __future__ import annotations

import json

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


def hub_table(labels):
    """Return a table as the Hub stores it: classes are numbers, their names are in the schema's metadata."""
    features = {"labels": {"names": ["rust", "healthy"], "_type": "ClassLabel"}, "image": {"_type": "Image"}}
    table = pyarrow.table({"image": [{"bytes": b"1", "path": None}] * len(labels), "labels": labels})
    return table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})


def test_class_numbers_of_a_hub_file_become_names(tmp_path):
    parquet.write_table(hub_table([1, 0, None]), tmp_path / "rows.parquet")
    rows = read_file(tmp_path / "rows.parquet")
    assert [rows[index]["labels"] for index in range(3)] == ["healthy", "rust", None]
    parquet.write_table(hub_table([7]), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows\.parquet: a class number of labels has no name"):
        read_file(tmp_path / "rows.parquet")


def test_a_folder_of_the_hub_gives_its_train_split(tmp_path):
    (tmp_path / "data").mkdir()
    for name, labels in {"test-0": [1], "train-0": [0, 0], "train-1": [1]}.items():
        parquet.write_table(hub_table(labels), tmp_path / "data" / f"{name}.parquet")
    rows = read_file(tmp_path)
    assert [rows[index]["labels"] for index in range(len(rows))] == ["rust", "rust", "healthy"]
    assert rows.where(2) == f"{tmp_path / 'data' / 'train-1.parquet'}, row 1"


@pytest.mark.parametrize("split", ["", "train"])
def test_each_folder_of_images_is_a_class(tmp_path, split):
    for label, name in ("rust", "b.jpg"), ("rust", "a.JPG"), ("healthy", "c.png"), ("healthy", "notes.txt"):
        (tmp_path / split / label).mkdir(parents=True, exist_ok=True)
        (tmp_path / split / label / name).write_bytes(b"")
    rows = read_file(tmp_path)
    assert [rows[index]["label"] for index in range(len(rows))] == ["healthy", "rust", "rust"]
    assert (rows.folder / rows[1]["image"]).name == "a.JPG"
    assert rows.where(1) == str(tmp_path / split / "rust" / "a.JPG")


def test_a_folder_without_data_is_an_error(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="neither a data file that lists images nor one folder of images per class"):
        read_file(tmp_path)


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv"])
def test_text_in_another_encoding_is_an_error(tmp_path, ending):
    path = tmp_path / f"rows.{ending}"
    path.write_bytes('{"text": "是"}'.encode("shift_jis"))
    with pytest.raises(DataError, match="is not UTF-8; save the file as UTF-8"):
        read_file(path)

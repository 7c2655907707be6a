"""Rows of data files: what Python cannot hold is told with its row."""

from __future__ import annotations

import json
import os
import sys

import pytest

from ftbench.core import data_files
from ftbench.core.data_files import read_file
from ftbench.errors import DataError, MissingError

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


def hub_table(labels):
    """As a set of the hub lies on a disk: classes are numbers, whose names stand beside the schema."""
    features = {"labels": {"names": ["rust", "healthy"], "_type": "ClassLabel"}, "image": {"_type": "Image"}}
    table = pyarrow.table({"image": [{"bytes": b"1", "path": None}] * len(labels), "labels": labels})
    return table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})


def test_classes_of_a_hub_file_are_their_names(tmp_path):
    parquet.write_table(hub_table([1, 0, None]), tmp_path / "rows.parquet")
    rows = read_file(tmp_path / "rows.parquet")
    assert [rows[index]["labels"] for index in range(3)] == ["healthy", "rust", None]
    parquet.write_table(hub_table([7]), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows\.parquet: a class is none of labels's"):
        read_file(tmp_path / "rows.parquet")


def test_a_copy_of_a_hub_set_is_its_split_for_training(tmp_path):
    (tmp_path / "data").mkdir()
    for name, labels in {"test-0": [1], "train-0": [0, 0], "train-1": [1]}.items():
        parquet.write_table(hub_table(labels), tmp_path / "data" / f"{name}.parquet")
    rows = read_file(tmp_path)
    assert [rows[index]["labels"] for index in range(len(rows))] == ["rust", "rust", "healthy"]
    assert rows.where(2) == f"{tmp_path / 'data' / 'train-1.parquet'}, row 1"


@pytest.mark.parametrize("split", ["", "train"])
def test_folders_of_images_are_classes(tmp_path, split):
    for label, name in ("rust", "b.jpg"), ("rust", "a.JPG"), ("healthy", "c.png"), ("healthy", "notes.txt"):
        (tmp_path / split / label).mkdir(parents=True, exist_ok=True)
        (tmp_path / split / label / name).write_bytes(b"")
    rows = read_file(tmp_path)
    assert [rows[index]["label"] for index in range(len(rows))] == ["healthy", "rust", "rust"]
    assert (rows.folder / rows[1]["image"]).name == "a.JPG"
    assert rows.where(1) == str(tmp_path / split / "rust" / "a.JPG")


def test_a_folder_without_rows_and_images_says_what_it_should_hold(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="one file that names its images, or folders of images by their class"):
        read_file(tmp_path)


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "parquet"])
@pytest.mark.parametrize("device", ["", "/dev/zero"])
def test_a_pipe_and_a_device_are_refused_and_not_waited_for(tmp_path, ending, device):
    path = tmp_path / f"rows.{ending}"
    path.symlink_to(device) if device else os.mkfifo(path)
    with pytest.raises(DataError, match="is a pipe, a device or a folder"):
        read_file(path)


def test_a_line_without_end_is_no_row(tmp_path, monkeypatch):
    monkeypatch.setattr(data_files, "_MOST_LINE", 100)
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n{"text": "' + "a" * 100)
    with pytest.raises(DataError, match="line 2: is longer than"):
        read_file(path)


@pytest.mark.parametrize(("ending", "where"), [("jsonl", "line 2"), ("json", "record 2")])
def test_half_of_a_character_is_named_with_its_row_and_both_halves_are_one(tmp_path, ending, where):
    path, rows = tmp_path / f"rows.{ending}", [{"text": "\U0001f600"}, {"text": ["a", "\ud83d b"]}]
    texts = [json.dumps(row) for row in rows]
    path.write_text("\n".join(texts) if ending == "jsonl" else f"[{','.join(texts)}]")
    with pytest.raises(DataError, match=rf"{where}: .*ud83d. is half of a character"):
        read_file(path)
    path.write_text(texts[0] if ending == "jsonl" else f"[{texts[0]}]")
    assert read_file(path)[0] == rows[0]


@pytest.mark.parametrize(
    "told",
    [
        {"info": {"features": {"label": {"_type": "ClassLabel", "names": {"a": 1}}}}},
        {"info": {"features": {"label": {"_type": "ClassLabel", "names": 3}}}},
        {"info": {"features": {}}},
        [],
    ],
)
def test_what_a_file_says_wrongly_of_its_classes_ends_in_a_sentence_or_in_their_numbers(tmp_path, told):
    table = pyarrow.table({"text": ["a"], "label": [7]})
    parquet.write_table(table.replace_schema_metadata({"huggingface": json.dumps(told)}), tmp_path / "rows.parquet")
    rows = tmp_path / "rows.parquet"
    if isinstance(told, dict) and isinstance(told["info"]["features"].get("label", {}).get("names"), dict):
        with pytest.raises(DataError, match="a class is none of label's"):
            read_file(rows)
    else:
        assert read_file(rows)[0]["label"] == 7


def test_metadata_nested_without_end_says_nothing(tmp_path):
    table = pyarrow.table({"text": ["a"]}).replace_schema_metadata({"huggingface": "[" * 100_000})
    parquet.write_table(table, tmp_path / "rows.parquet")
    assert read_file(tmp_path / "rows.parquet")[0] == {"text": "a"}


def test_columns_of_one_name_cannot_be_told_apart(tmp_path):
    parquet.write_table(pyarrow.table([["a"], ["b"]], names=["text", "text"]), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows\.parquet"):
        read_file(tmp_path / "rows.parquet")


def test_without_what_reads_parquet_the_package_is_named(tmp_path, monkeypatch):
    parquet.write_table(pyarrow.table({"text": ["a"]}), tmp_path / "rows.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingError, match="pip install pyarrow"):
        read_file(tmp_path / "rows.parquet")

"""Columns of any names become what is trained on, and rows that cannot be used are found before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ftbench.errors import DataError, SpecError
from ftbench.launch import checks
from ftbench.spec.datasets import Dataset, check_file, row_example, row_format
from ftbench.spec.experiment import Model
from ftbench.spec.load import load

TEXT = Model(id="tiny/qwen3")


def rows_file(folder: Path, *rows: dict) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"question": "2 + 2?", "answer": "4"}, {}),
        ({"question": "2 + 2?", "answer": "4"}, {"prompt": "question", "completion": "answer"}),
        ({"Frage": "2 + 2?", "Antwort": "4"}, {"instruction": "Frage", "output": "Antwort"}),
        ({"prompt": "other", "q": "2 + 2?", "completion": "4"}, {"prompt": "q"}),
    ],
)
def test_columns_map_names_to_roles(row, columns):
    dataset = Dataset(name="owner/set", columns=columns)
    messages = row_example(dataset, row, row_format(dataset, row, "row 1"), "row 1").messages
    assert [message["content"] for message in messages] == ["2 + 2?", "4"]
    assert [message["role"] for message in messages] == ["user", "assistant"]


def test_missing_column_suggests_a_similar_one():
    dataset = Dataset(name="owner/set", columns={"prompt": "questoin"})
    with pytest.raises(DataError, match=r"there is no column `questoin` for prompt.*did you mean question\?"):
        row_format(dataset, {"question": "a", "answer": "b"}, "row 1")


def test_unusable_rows_are_found_before_a_run(tmp_path):
    data = rows_file(tmp_path, {"question": "a", "answer": "b"}, {"question": "a", "answer": " "})
    spec = tmp_path / "spec.yaml"
    spec.write_text(f"model: tiny/qwen3\nmethod: lora\ndataset: {{name: file, path: {data}}}\n")
    with pytest.raises(DataError, match=r"rows.jsonl, line 2: `answer` is empty"):
        checks.check_needed(load(spec, []))


def test_half_of_a_surrogate_pair_names_its_line(tmp_path):
    row = {"messages": [{"role": "assistant", "content": "a\ud83d"}]}
    with pytest.raises(DataError, match=r"rows.jsonl, line 1: '\\ud83d' is half of a surrogate pair: remove it"):
        check_file(Dataset(name="file", path=str(rows_file(tmp_path, row))), TEXT)


def test_first_rows_of_a_large_file_are_checked(tmp_path):
    good, bad = {"text": "a"}, {"text": 1}
    check_file(Dataset(name="file", path=str(rows_file(tmp_path, *[good] * 1000, bad))), TEXT)
    with pytest.raises(DataError, match="line 1000"):
        check_file(Dataset(name="file", path=str(rows_file(tmp_path, *[good] * 999, bad))), TEXT)


def test_too_few_rows_are_found_before_a_run(tmp_path):
    data = rows_file(tmp_path, *[{"text": "a"}] * 40)
    spec = tmp_path / "spec.yaml"
    spec.write_text(f"model: tiny/qwen3\ndataset: {{name: file, path: {data}, samples: 33, eval_samples: 8}}\n")
    check_file(Dataset(name="file", path=str(data)), TEXT, needed=40)
    with pytest.raises(DataError, match=r"only 40 rows: too few for 33 samples and 8 to evaluate on; lower dataset"):
        checks.check_needed(load(spec))
    with pytest.raises(DataError, match=r"only 40 rows: too few for 41 samples; lower dataset"):
        checks.check_needed(load(spec, ["dataset.samples=41", "dataset.eval_samples=0"]))


def test_images_for_a_text_model_are_found_before_a_run(tmp_path, ftbench):
    data = rows_file(tmp_path, {"image": "a.png", "question": "a", "answer": "b"})
    spec = tmp_path / "spec.yaml"
    spec.write_text(f"model: tiny/qwen3\nmethod: lora\ndataset: {{name: file, path: {data}}}\n")
    with pytest.raises(DataError, match=r"rows.jsonl has images and tiny/qwen3 is text-only: use a model with images"):
        checks.check_needed(load(spec))
    for command in (("data",), ("estimate", "--gpu", "4090"), ("recommend", "--gpu", "4090")):
        code, _, err = ftbench(*command, spec)
        assert (code, "has images and tiny/qwen3 is text-only" in err) == (2, True)
    check_file(Dataset(name="file", path=str(data)), Model(id="tiny/llava-next"))


@pytest.mark.parametrize("key", [{"subset": "main"}, {"split": "test"}])
def test_subset_and_split_need_a_hub_dataset(key):
    assert Dataset(name="openai/gsm8k", **key)
    with pytest.raises(ValueError, match="goes with `name: owner/name`, not with alpaca"):
        Dataset(name="alpaca", **key)


def test_unknown_role_is_an_error(tmp_path):
    spec = tmp_path / "spec.yaml"
    spec.write_text("model: tiny/qwen3\nmethod: lora\ndataset: {name: owner/set, columns: {promt: question}}\n")
    with pytest.raises(SpecError, match="promt"):
        load(spec, [])


def test_folder_without_files_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"contains no \.json"):
        check_file(Dataset(name="file", path=str(tmp_path)), TEXT)

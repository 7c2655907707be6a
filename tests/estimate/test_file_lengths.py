"""Count the sample lengths of a local file before any run."""

from __future__ import annotations

import json
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest

from ftbench.core.hardware import find_gpu
from ftbench.errors import FtbenchError, SpecError
from ftbench.estimate.estimates import EstimateRequest, estimate
from ftbench.estimate.memory.estimate import estimate_memory
from ftbench.estimate.time.history import RunHistory
from ftbench.estimate.workload.largest import largest
from ftbench.estimate.workload.lengths import lengths_of
from ftbench.spec.datasets import Dataset
from ftbench.spec.experiment import Experiment

ROOT = Path(__file__).resolve().parents[2]
H200 = find_gpu("NVIDIA H200")


def spec_of(file: Path, **model: Any) -> Experiment:
    return Experiment.model_validate({
        "name": "x", "model": {"id": "Qwen/Qwen3-8B", **model}, "method": {"name": "lora"},
        "dataset": {"name": "file", "path": str(file)}, "train": {"precision": "bf16"},
    })  # fmt: skip


def written(path: Path, rows: int, words: int) -> Path:
    text = "word " * words
    path.write_text("".join(json.dumps({"prompt": "Say it.", "completion": text}) + "\n" for _ in range(rows)))
    return path


def times(path: Path, tmp_path: Path) -> dict[str, Any]:
    spec = tmp_path / "spec.yaml"
    spec.write_text(json.dumps({"model": "Qwen/Qwen3-8B", "dataset": {"name": "file", "path": str(path)},
                                "train": {"precision": "bf16"}}))  # fmt: skip
    answer = estimate(EstimateRequest(spec, gpu="H200 SXM", store=tmp_path / "none"))
    return json.loads(answer.document)["gpus"][0]["time"]


def test_rows_of_200_tokens_are_not_counted_as_2048_each(tmp_path):
    told = times(written(tmp_path / "data.jsonl", 6000, 160), tmp_path)
    assert told["real_tokens_per_step"] / told["samples_per_step"] == pytest.approx(210, rel=0.15)
    assert told["samples"] == 6000
    assert told["upper_bound"] is False
    assert "4 bytes per token" in told["lengths"]


def test_earlier_runs_on_a_file_do_not_hide_its_number_of_samples(tmp_path):
    spec = spec_of(written(tmp_path / "data.jsonl", 300, 160))
    histogram = {"edges": [0, 100, 200], "counts": [0, 64]}
    described = {"tokens": {"total": 9600}, "tokens_before_truncation": {"mean": 150, "histogram": histogram}}
    lengths = lengths_of(spec.dataset, [(spec.dataset, described)], spec.model)
    assert (lengths.source, lengths.rows) == ("recorded by a run on file", 300)
    assert lengths.mean == pytest.approx(150, rel=0.01)


def test_more_samples_than_the_file_has_are_an_error(tmp_path):
    spec = spec_of(written(tmp_path / "data.jsonl", 300, 160))
    history = RunHistory()
    for samples, held_out in ((290, 10), (None, 10)):
        data = spec.dataset.model_copy(update={"samples": samples, "eval_samples": held_out})
        assert history.with_sample_count(spec.model_copy(update={"dataset": data})).dataset.samples == 290
    data = spec.dataset.model_copy(update={"samples": 291, "eval_samples": 10})
    with pytest.raises(SpecError, match="has only 300 rows: too few for 291 samples and 10 to evaluate on"):
        history.with_sample_count(spec.model_copy(update={"dataset": data}))


def test_memory_uses_the_longest_sample_of_the_file(tmp_path):
    """8 letters and 800: 210 tokens at 4 bytes per token, at least a byte each; with two turns and a template."""
    path = written(tmp_path / "data.jsonl", 5000, 160)
    heaviest = largest(spec_of(path))
    assert heaviest.expected.length == 212
    assert heaviest.most.length == 7 + 800 + 2 * 5 + 100
    assert "the longest sample 212 tokens, at most 917" in heaviest.basis
    small = find_gpu("NVIDIA GeForce RTX 4090")
    assert estimate_memory(spec_of(path), small).verdict == "uncertain", "2,048 tokens would not fit"
    longer = json.dumps({"prompt": "Say it.", "completion": "word " * 3000}) + "\n"
    first, rest = path.read_text().split("\n", 1)
    path.write_text(f"{first}\n{longer}{rest}")  # only every second row is read, without this one
    assert largest(spec_of(path.rename(tmp_path / "other.jsonl"))).most.length == 2048


def test_the_bound_covers_all_samples_of_a_file(tmp_path):
    """Count with the tokenizer of a model with random weights, on text that it was not trained on."""
    pytest.importorskip("transformers", reason="training libraries are not installed")
    tokenizer = pytest.importorskip("ftbench.worker.model.tokenizer")
    prepare = pytest.importorskip("ftbench.worker.data.prepare")
    path = tmp_path / "data.jsonl"
    texts = ["0123456789" * 9, "\u3042\u6f22" * 40, "\U0001f600\x00\t " * 20, "zqxj" * 30]
    path.write_text("".join(json.dumps({"prompt": "?", "completion": text}) + "\n" for text in texts))
    spec = spec_of(path, id="tiny/qwen3", weights="random")
    samples = prepare.prepare(spec, tokenizer.build_tokenizer(4096), 4096).train
    longest = max(len(each.ids) for row in samples for each in row)
    assert longest <= largest(spec).most.length < 2048


@pytest.mark.parametrize("ending", [".json", ".csv", ".parquet"])
def test_every_kind_of_file_is_read(tmp_path, ending):
    rows = [{"instruction": "Say it.", "output": "x" * 4 * n} for n in range(1, 100)]
    path = tmp_path / f"data{ending}"
    if ending == ".json":
        path.write_text(json.dumps(rows))
    elif ending == ".csv":
        path.write_text("instruction,output\n" + "".join(f"Say it.,{row['output']}\n" for row in rows))
    else:
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), path)
    spec = spec_of(path)
    lengths = lengths_of(spec.dataset, model=spec.model)
    assert lengths.rows == 99
    assert sorted(lengths.values) == [n + 12 for n in range(1, 100)]  # 7 bytes of the question, 5 tokens a turn


def test_the_tokenizer_of_the_model_directory_is_used(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"word": 0, "?": 1}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    spec = spec_of(written(tmp_path / "data.jsonl", 10, 160), path=str(tmp_path))
    lengths = lengths_of(spec.dataset, model=spec.model)
    assert set(lengths.values) == {160 + 3 + 2 * 5}  # `Say it.` is three
    assert "by the model's tokenizer" in lengths.source


@pytest.mark.parametrize(("row", "columns"), [
    ({"question": "x" * 400, "answer": "y" * 800}, {"prompt": "question", "completion": "answer"}),
    ({"instruction": "x" * 400, "input": "", "output": "y" * 800, "text": "x" * 400 + "y" * 800}, {}),
    ({"messages": [{"role": "user", "content": "x" * 400}, {"role": "assistant", "content": "y" * 800}],
      "prompt": "x" * 400}, {}),
], ids=["renamed", "alpaca with its whole text", "messages with their prompt"])  # fmt: skip
def test_a_text_in_two_columns_is_counted_once(tmp_path, row, columns):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(row) + "\n")
    spec = spec_of(path)
    data = spec.dataset.model_copy(update={"columns": columns})
    assert lengths_of(data, model=spec.model).values == (1200 // 4 + 2 * 5,)


def test_lengths_respect_max_length_and_samples(tmp_path):
    spec = spec_of(written(tmp_path / "data.jsonl", 50, 160))
    data = spec.dataset.model_copy(update={"max_length": 64, "samples": 7})
    lengths = lengths_of(data, model=spec.model)
    assert (set(lengths.values), len(lengths.values), lengths.rows) == ({64}, 7, 50)


def test_missing_file_leaves_the_upper_bound_with_a_reason(tmp_path):
    row = times(tmp_path / "data.jsonl", tmp_path)
    assert row["upper_bound"] is True
    assert "No such file" in row["lengths"]
    assert "counts as max_length 2,048" in row["lengths"]


@pytest.mark.parametrize(("content", "problem"), [("{", "line 1: not JSON"), ("", "the file is empty")])
def test_unreadable_file_gets_no_estimate(tmp_path, content, problem):
    path = tmp_path / "data.jsonl"
    path.write_text(content)
    with pytest.raises(FtbenchError, match=problem):
        times(path, tmp_path)


@pytest.mark.parametrize("text", ["sample", "other"])
def test_bytes_per_token_of_the_random_weight_tokenizer(tmp_path, text):
    tokenizer = pytest.importorskip("ftbench.worker.model.tokenizer")
    pytest.importorskip("transformers")
    made = tokenizer.build_tokenizer(151936)
    path = tmp_path / "data.jsonl"
    if text == "sample":
        path = ROOT / "src" / "ftbench" / "facts" / "sample.jsonl"
        data = {"name": "sample"}
    else:
        rows = [{"text": part} for text in topics.values() for part in text.split("\n\n") if len(part) > 200]
        path.write_text("\n".join(map(json.dumps, rows)))
        data = {"name": "file", "path": str(path)}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    tokens = [sum(len(made(value)["input_ids"]) for value in row.values() if value) for row in rows]
    spec = spec_of(path, weights="random")
    data = Dataset.model_validate({**data, "max_length": 8192})
    lengths = lengths_of(data, model=spec.model)
    turns = sum(len([value for value in row.values() if value]) for row in rows) / len(rows)
    assert lengths.mean - 5 * turns == pytest.approx(sum(tokens) / len(tokens), rel=0.15)

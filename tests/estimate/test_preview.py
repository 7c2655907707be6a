"""`ftbench data`: lengths, truncation, packing and samples of a data set, without a GPU and without torch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ftbench.core.hardware import find_gpu
from ftbench.errors import DataError, MissingError, SpecError
from ftbench.estimate import preview
from ftbench.estimate.time.duration import estimate_duration
from ftbench.spec.datasets import Dataset
from ftbench.spec.load import load
from ftbench.worker.data import sources


def spec_of(folder: Path, rows: list[dict], more: str = "", model: str = "Qwen/Qwen3-0.6B") -> Path:
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "spec.yaml"
    path.write_text(
        f"model: {model}\nmethod: lora\ntrain: {{batch_size: 2}}\n"
        f"dataset: {{name: file, path: {data}, max_length: 100{more}}}\n"
    )
    return path


def test_lengths_truncation_and_packing_follow_from_the_rows(tmp_path):
    """4 bytes per token and 5 tokens per turn: 40 characters per side are 10 + 5 tokens, 30 per sample; 400 are 210."""
    short, long = [{"q": "a" * side, "a": "b" * side} for side in (40, 400)]
    spec = spec_of(tmp_path, [short, short, short, long], ", columns: {prompt: q, completion: a}")
    document = preview.preview(spec, [])
    assert (document["rows"], document["format"]) == (4, "prompt-completion")
    assert (document["tokens"]["p50"], document["tokens"]["max"]) == (30, 210)
    assert document["truncated_samples"] == document["answers_cut"] == 0.25
    assert document["truncated_tokens"] == pytest.approx(110 / 300)
    assert document["padding"] == pytest.approx(1 - 190 / (2 * 30 + 2 * 100))
    assert document["packing_gain"] == pytest.approx(260 / 200)  # into two rows of 100
    assert sum(document["tokens"]["histogram"]["counts"]) == 4
    text = preview.as_text(document)
    assert "30" in text
    assert "a training skips about 25.0 % of the samples" in text
    assert f"user: {'a' * 40}" in text
    assert max(map(len, text.splitlines()[:3])) < 200


def test_padding_is_that_of_the_estimate_and_of_shuffled_batches(tmp_path):
    """Rows of 20 and of 60 tokens: in file order, no batch of two would have padding."""
    spec = spec_of(tmp_path, [{"text": "a" * letters} for letters in [60] * 10 + [220] * 10], model="Qwen/Qwen3-8B")
    lengths = np.array([20] * 10 + [60] * 10)[np.random.default_rng(load(spec).dataset.seed).permutation(20)]
    padding = preview.preview(spec, [])["padding"]
    assert padding == pytest.approx(1 - lengths.sum() / (2 * lengths.reshape(10, 2).max(axis=1).sum()))
    assert padding == pytest.approx(estimate_duration(load(spec), find_gpu("NVIDIA H200")).padding)
    assert padding > 0


def test_synthetic_data_has_lengths_without_samples(tmp_path):
    spec = tmp_path / "spec.yaml"
    spec.write_text("model: tiny/qwen3\nmethod: lora\ndataset: {name: synthetic, samples: 50, length: 64}\n")
    document = preview.preview(spec, [])
    assert document["tokens"]["mean"] == 64
    assert document["samples"] == []
    assert "samples, by" not in preview.as_text(document)


def test_rows_that_cannot_be_used_are_named(tmp_path):
    with pytest.raises(DataError, match=r"line 1: columns a match no format .*dataset\.columns="):
        preview.preview(spec_of(tmp_path, [{"a": "b"}]), [])


class Rows(list):
    """Rows of a data set of the Hub."""

    folder = None

    def where(self, index: int) -> str:
        return f"row {index + 1}"


def test_images_of_the_hub_are_shown_as_markers(tmp_path, monkeypatch):
    rows = Rows({"image": {"bytes": b"png", "path": None}, "label": name} for name in ("rust", "healthy"))

    def exported(dataset: Dataset, pairs: bool, out: Path) -> dict:
        monkeypatch.setattr(sources, "open_rows", lambda _: rows)
        sources.export(dataset, out, 9, pairs)
        return json.loads(out.with_suffix(".count").read_text())

    monkeypatch.setattr(preview, "_exported", exported)
    (tmp_path / "spec.yaml").write_text("model: llava-hf/llava-v1.6-mistral-7b-hf\nmethod: lora\ndataset: beans\n")
    document = preview.preview(tmp_path / "spec.yaml", [])
    assert (document["rows"], document["format"]) == (2, "image-text")
    first, *_, last = (sample["text"] for sample in document["samples"])
    assert first.startswith("user: <image>")
    assert (first.endswith("\nassistant: rust"), last.endswith("\nassistant: healthy")) == (True, True)


def test_rows_of_the_hub_become_messages_in_a_file(tmp_path, monkeypatch):
    rows = Rows({"question": f"q{number}", "answer": "" if number == 2 else "a"} for number in range(6))
    monkeypatch.setattr(sources, "open_rows", lambda dataset: rows)
    sources.export(Dataset(name="owner/set"), tmp_path / "x.jsonl", 3)
    written = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert [row["messages"][0]["content"] for row in written] == [
        "q0",
        "q4",
    ]  # every second, less one without an answer
    assert json.loads((tmp_path / "x.count").read_text()) == {"rows": 6, "format": "question-answer"}


def test_a_child_that_reads_the_hub_for_too_long_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "python").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(preview.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(preview, "_EXPORT_S", 0.5)
    (tmp_path / "spec.yaml").write_text("model: tiny/qwen3\nmethod: lora\ndataset: {name: owner/set}\n")
    with pytest.raises(MissingError, match=r"^dataset owner/set: not read within 0\.5 s"):
        preview.preview(tmp_path / "spec.yaml", [])


def test_every_row_is_checked(tmp_path):
    rows = [{"question": "why", "answer": "so"}] * 9
    rows[2] = {"question": "why", "answer": 3}
    with pytest.raises(DataError, match="line 3: `answer` is int, not text"):
        preview.preview(spec_of(tmp_path, rows), [])


def test_images_count_with_the_models_tokens(tmp_path):
    spec = tmp_path / "spec.yaml"
    data = "{name: images, samples: 8, length: 40, image_size: [500, 500], images_per_sample: 2, max_length: 4000}"
    spec.write_text(f"model: llava-hf/llava-v1.6-mistral-7b-hf\nmethod: lora\ndataset: {data}\n")
    document = preview.preview(spec, [])
    assert document["tokens"]["mean"] == 2 * (2928 + 1) + 40
    assert document["images"] == {"tokens": 2 * 2928, "tiles": 10, "left_out": 1}
    assert "100.0 % of the samples are removed" in preview.as_text(document)
    pillow = pytest.importorskip("PIL.Image")
    pillow.new("RGB", (500, 500)).save(tmp_path / "a.png")
    spec = spec_of(tmp_path, [{"image": "a.png", "text": "b" * 40}], model="llava-hf/llava-v1.6-mistral-7b-hf")
    document = preview.preview(spec, ["dataset.max_length=4096"])
    assert 2928 + 40 / 4 < document["tokens"]["max"] < 2928 + 40
    assert document["truncated_samples"] == 0
    (tmp_path / "a.png").unlink()
    with pytest.raises(SpecError, match=r"rows\.jsonl, line 1: its image cannot be read .*No such file"):
        preview.preview(spec, ["dataset.max_length=4096", "dataset.seed=7"])


@pytest.mark.parametrize(("columns", "answered"), [("question", True), ("messages", True), ("prompt", False)])
def test_answers_of_prompts_are_neither_counted_nor_shown(tmp_path, columns, answered):
    """20 letters at 4 bytes per token, with 5 tokens for the turn; the third prompt is too long."""

    def row(letters):
        turns = [{"role": "user", "content": "a" * letters}, *[{"role": "assistant", "content": "b" * 400}] * answered]
        return {columns: turns} if columns != "question" else {"question": "a" * letters, "answer": "b" * 400}

    spec = spec_of(tmp_path, [row(20), row(60), row(4000)], ", format: prompt" * (not answered), "Qwen/Qwen3-8B")
    objective = {"name": "grpo", "num_generations": 4}
    document = preview.preview(spec, [f"objective={json.dumps(objective)}", "train.batch_size=8"])
    assert (document["tokens"]["p50"], document["tokens"]["max"]) == (20, 1005)
    assert document["padding"] == pytest.approx(1 - 30 / 40), "of 10 and 20 tokens, two prompts a step"
    text = preview.as_text(document)
    assert "tokens per prompt: mean" in text
    assert "longer than max_length 100: 33.3 % of the prompts, which are removed" in text
    assert "of a step's 2 prompts" in text
    assert "bbb" not in text
    assert "packing" not in text


@pytest.mark.parametrize("model", ["Qwen/Qwen3-8B", "llava-hf/llava-v1.6-mistral-7b-hf"])
def test_both_sequences_of_pairs_are_shown_and_no_packing(tmp_path, model):
    rows = [{"prompt": f"What is after {n}?", "chosen": f"{n + 1}.", "rejected": "I do not know."} for n in range(3)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = tmp_path / "pairs.yaml"
    spec.write_text(f"model: {model}\nobjective: dpo\ndataset: {{name: file, path: {path}}}\n")
    document = preview.preview(spec, [])
    assert (document["rows"], document["format"], document["tokens"]["count"]) == (3, "preference", 6)
    text = preview.as_text(document)
    assert "tokens per sequence: mean" in text
    assert "packing" not in text
    assert "assistant: 1.\n-- rejected:\nassistant: I do not know." in text

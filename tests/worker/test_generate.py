"""Answers before and after training show the effect of training and do not change it."""

from __future__ import annotations

import json

import pytest
import torch
from torch._dynamo.utils import counters

from conftest import spec_of
from ftbench.errors import DataError
from ftbench.spec.experiment import Generate
from ftbench.store.rundir import read_json
from ftbench.store.steps import read_steps
from ftbench.store.summary import summarise
from ftbench.worker import generate
from ftbench.worker.generate import answer, plain
from ftbench.worker.model import loading
from ftbench.worker.model.parts import decoder_layers
from ftbench.worker.model.tokenizer import build_tokenizer
from ftbench.worker.optimizations import chunked_loss
from ftbench.worker.optimizations import compile as compiled

PROMPTS = {
    "prompts": [
        {"id": "short", "prompt": "日本"},
        {"id": "long", "prompt": "GPUの記憶容量について、短く説明してください。"},
    ],
    "max_new_tokens": 12,
}
NOTHING_LEARNED = {"learning_rate": 1e-12}


def losses(run):
    return [row.loss for row in read_steps(run.steps)[0]]


def samples(run):
    return json.loads(run.samples.read_text("utf-8"))


@pytest.mark.parametrize(
    "changes",
    [
        {"method": {"name": "lora", "dropout": 0.3}},
        {"method": {"name": "full"}, "train": {"precision": "bf16", "max_steps": 2}},
        {"method": {"name": "qlora"}, "optimizations": {"gradient_checkpointing": True}},
        {"model": {"id": "tiny/gpt-oss"}, "optimizations": {"chunked_loss": True, "padding_free": True}},
    ],
    ids=["lora", "full-bf16", "qlora", "gpt-oss"],
)
def test_answers_do_not_change_training(train_here, changes):
    plain, answered = train_here(**changes), train_here(**changes, measure={"generate": PROMPTS})
    assert losses(plain) == losses(answered)
    assert not plain.samples.exists()
    found = samples(answered)
    assert [row["id"] for row in found["prompts"]] == ["short", "long"]
    assert all(row["before"] and row["after"] for row in found["prompts"])
    assert found["settings"]["top_k"] == 50
    assert "prompts" not in found["settings"]
    assert set(found["seconds"]) == {"before", "after"}


@pytest.mark.parametrize(("method", "greedy"), [
    ("lora", False), ("full", True),
    pytest.param("lora", True, marks=pytest.mark.exhaustive), pytest.param("full", False, marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_answers_stay_the_same_without_learning(train_here, method, greedy):
    run = train_here(
        method={"name": method},
        train={"precision": "bf16", **NOTHING_LEARNED},
        measure={"generate": {**PROMPTS, "greedy": greedy}},
    )
    assert all(row["before"] == row["after"] for row in samples(run)["prompts"])


def test_training_changes_answers(train_here):
    run = train_here(train={"learning_rate": 0.05}, method={"name": "full"}, measure={"generate": PROMPTS})
    assert any(row["before"] != row["after"] for row in samples(run)["prompts"])


def test_sampling_depends_on_the_seed_and_greedy_does_not(train_here):
    def answers(**settings):
        run = train_here(train={"max_steps": 1}, measure={"generate": PROMPTS | settings})
        return [row["before"] for row in samples(run)["prompts"]]

    sampled, greedy = answers(), answers(greedy=True)
    assert sampled == answers() != answers(seed=1)
    assert greedy == answers(greedy=True, seed=1) != sampled


def test_padding_does_not_change_an_answer(train_here):
    def answers(*prompts):
        run = train_here(train={"max_steps": 1}, measure={"generate": {**PROMPTS, "prompts": prompts, "greedy": True}})
        return {row["id"]: row["before"] for row in samples(run)["prompts"]}

    short, long = PROMPTS["prompts"]
    assert answers(short, long) == answers(short) | answers(long)


def test_stop_reason_is_length_or_time(train_here):
    run = train_here(train={"max_steps": 1}, measure={"generate": PROMPTS | {"greedy": True}})
    row = samples(run)["prompts"][0]
    assert row["tokens"]["before"] == 12
    assert row["stop"]["before"] == "length"
    cut = {"max_new_tokens": 4000, "max_seconds": 0.2, "greedy": True}
    row = samples(train_here(train={"max_steps": 1}, measure={"generate": PROMPTS | cut}))["prompts"][0]
    assert 0 < row["tokens"]["before"] < 4000
    assert row["stop"] == {"before": "time", "after": "time"}


def test_generation_has_separate_phases_and_memory(train_here):
    run = train_here(measure={"generate": PROMPTS})
    phases = read_json(run.phases)["phases"]
    assert [phase["name"] for phase in phases][-5:] == ["setup", "generate", "train", "finish", "generate"]
    for phase in phases:
        if phase["name"] == "generate":
            phase["peak_memory_gb"] = 1e6
    run.phases.write_text(json.dumps({"schema": 1, "phases": phases}))
    summary = summarise(run)
    assert summary.memory_gb["allocated_peak"] < 1e5
    assert summary.phases_s["generate"] > 0


def test_generation_uses_uncompiled_layers(cache):
    spec = spec_of(optimizations={"compile": True, "chunked_loss": True})
    source = loading.source_of(spec.model)
    model, tokenizer = loading.load_model(spec, source), loading.load_tokenizer(spec.model, source)
    chunked_loss.apply(model, spec)
    for layer in decoder_layers(model):
        layer.compile(backend="eager")
    ids = torch.tensor([[5, 6, 7, 8]])
    model.train()
    before, graphs = model(input_ids=ids).logits, counters["stats"]["unique_graphs"]
    assert graphs > 0
    with plain(model, spec):
        assert not any(module.training for module in model.modules())
        assert answer(model, tokenizer, Generate.model_validate(PROMPTS))[1][0][1] > 0
    assert counters["stats"]["unique_graphs"] == graphs
    assert all(module.training for module in model.modules())
    assert chunked_loss.is_on(model)
    assert torch.equal(model(input_ids=ids).logits, before)
    assert counters["stats"]["unique_graphs"] == graphs
    assert compiled.verify(model, spec) == []


def test_generation_replaces_attention_without_padding(cache):
    spec = spec_of(optimizations={"attention": "varlen", "padding_free": True}, train={"precision": "bf16"})
    source = loading.source_of(spec.model)
    model, tokenizer = loading.load_model(spec, source), loading.load_tokenizer(spec.model, source)
    with plain(model, spec):
        assert model.config._attn_implementation == "sdpa"
        assert answer(model, tokenizer, Generate.model_validate(PROMPTS))[0][0] > 0
    assert model.config._attn_implementation == "varlen"


def test_a_failing_chat_template_is_an_error_message(monkeypatch):
    tokenizer = build_tokenizer(8192)
    monkeypatch.setattr(tokenizer, "chat_template", "{{ 1 // 0 }}")
    with pytest.raises(DataError, match=r"^measure.generate: .* failed .*division"):
        generate._rendered(tokenizer, "Hi")

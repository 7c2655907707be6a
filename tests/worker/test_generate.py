"""Answers before and after training: they tell what training changed, and change nothing themselves."""

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

ASKED = {
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
def test_answers_change_nothing_in_the_training(train_here, changes):
    silent, asked = train_here(**changes), train_here(**changes, measure={"generate": ASKED})
    assert losses(silent) == losses(asked)
    assert not silent.samples.exists()
    found = samples(asked)
    assert [row["id"] for row in found["prompts"]] == ["short", "long"]
    assert all(row["before"] and row["after"] for row in found["prompts"])
    assert found["settings"]["top_k"] == 50
    assert "prompts" not in found["settings"]
    assert set(found["seconds"]) == {"before", "after"}


@pytest.mark.parametrize(("method", "greedy"), [
    ("lora", False), ("full", True),
    pytest.param("lora", True, marks=pytest.mark.exhaustive), pytest.param("full", False, marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_where_nothing_is_learned_the_answers_are_the_same(train_here, method, greedy):
    run = train_here(
        method={"name": method},
        train={"precision": "bf16", **NOTHING_LEARNED},
        measure={"generate": {**ASKED, "greedy": greedy}},
    )
    assert all(row["before"] == row["after"] for row in samples(run)["prompts"])


def test_training_shows_in_the_answers(train_here):
    run = train_here(train={"learning_rate": 0.05}, method={"name": "full"}, measure={"generate": ASKED})
    assert any(row["before"] != row["after"] for row in samples(run)["prompts"])


def test_sampling_follows_its_seed_and_greedy_needs_none(train_here):
    def answers(**settings):
        run = train_here(train={"max_steps": 1}, measure={"generate": ASKED | settings})
        return [row["before"] for row in samples(run)["prompts"]]

    sampled, greedy = answers(), answers(greedy=True)
    assert sampled == answers() != answers(seed=1)
    assert greedy == answers(greedy=True, seed=1) != sampled


def test_a_padded_prompt_is_answered_as_it_is_alone(train_here):
    def answers(*prompts):
        run = train_here(train={"max_steps": 1}, measure={"generate": {**ASKED, "prompts": prompts, "greedy": True}})
        return {row["id"]: row["before"] for row in samples(run)["prompts"]}

    short, long = ASKED["prompts"]
    assert answers(short, long) == answers(short) | answers(long)


def test_length_and_time_are_limits_and_said_to_be(train_here):
    run = train_here(train={"max_steps": 1}, measure={"generate": ASKED | {"greedy": True}})
    row = samples(run)["prompts"][0]
    assert row["tokens"]["before"] == 12
    assert row["stop"]["before"] == "length"
    cut = {"max_new_tokens": 4000, "max_seconds": 0.2, "greedy": True}
    row = samples(train_here(train={"max_steps": 1}, measure={"generate": ASKED | cut}))["prompts"][0]
    assert 0 < row["tokens"]["before"] < 4000
    assert row["stop"] == {"before": "time", "after": "time"}


def test_answering_has_phases_of_its_own_and_its_memory_is_not_trainings(train_here):
    run = train_here(measure={"generate": ASKED})
    phases = read_json(run.phases)["phases"]
    assert [phase["name"] for phase in phases][-5:] == ["setup", "generate", "train", "finish", "generate"]
    for phase in phases:
        if phase["name"] == "generate":
            phase["peak_memory_gb"] = 1e6
    run.phases.write_text(json.dumps({"schema": 1, "phases": phases}))
    summary = summarise(run)
    assert summary.memory_gb["allocated_peak"] < 1e5
    assert summary.phases_s["generate"] > 0


def test_compiled_layers_answer_uncompiled_and_stay_compiled(cache):
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
        assert answer(model, tokenizer, Generate.model_validate(ASKED))[1][0][1] > 0
    assert counters["stats"]["unique_graphs"] == graphs
    assert all(module.training for module in model.modules())
    assert chunked_loss.is_on(model)
    assert torch.equal(model(input_ids=ids).logits, before)
    assert counters["stats"]["unique_graphs"] == graphs
    assert compiled.verify(model, spec) == []


def test_attention_without_padding_makes_way_for_one_that_takes_it(cache):
    spec = spec_of(optimizations={"attention": "varlen", "padding_free": True}, train={"precision": "bf16"})
    source = loading.source_of(spec.model)
    model, tokenizer = loading.load_model(spec, source), loading.load_tokenizer(spec.model, source)
    with plain(model, spec):
        assert model.config._attn_implementation == "sdpa"
        assert answer(model, tokenizer, Generate.model_validate(ASKED))[0][0] > 0
    assert model.config._attn_implementation == "varlen"


def test_a_failing_chat_template_is_an_error_that_names_measure_generate(monkeypatch):
    tokenizer = build_tokenizer(8192)
    monkeypatch.setattr(tokenizer, "chat_template", "{{ 1 // 0 }}")
    with pytest.raises(DataError, match=r"^measure\.generate: .*refuses it .*division"):
        generate._written(tokenizer, "Hi")

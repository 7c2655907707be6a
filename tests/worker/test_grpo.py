"""Objective grpo: equal to a plain trl script, with generation recorded as a part of each step."""

from __future__ import annotations

import inspect
import json
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import Qwen3ForCausalLM, set_seed
from trl import GRPOConfig, GRPOTrainer

from conftest import spec_of
from ftbench.errors import DataError, NotAppliedError, SpecError
from ftbench.report.card import card
from ftbench.store.rundir import read_json
from ftbench.store.steps import read_steps
from ftbench.store.summary import summarise
from ftbench.worker import grpo, methods
from ftbench.worker.data.prepare import prepare
from ftbench.worker.data.tokens import IGNORE
from ftbench.worker.measure.meters import HostClock
from ftbench.worker.model import loading
from ftbench.worker.model.tokenizer import build_tokenizer
from ftbench.worker.train import prepared

GRPO = {"name": "grpo", "num_generations": 4, "max_completion_length": 6}
MADE = {"samples": 4, "mean_length": 8}
SGD = {"optimizer": "sgd", "max_grad_norm": 0, "learning_rate": 0.5, "lr_scheduler": "constant"}
PROMPTS = [f"Name a number after {n}." for n in range(6)]


def trained(run):
    return [row for row in read_steps(run.steps)[0] if row.phase == "train"]


def file_of(folder, rows, **more):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plain = {"name": "file", "path": str(path), "samples": None, "mean_length": None, "max_length": 64}
    return plain | {"format": "prompt"} | more


def of_plain_trl(spec, folder):
    """Return losses, gradient norms and rewards of a plain script with trl's own tokens and its own reward function."""
    source = loading.source_of(spec.model, spec.method)
    tokenizer, data = prepared(spec, source)
    dialogues = [[{"role": "user", "content": text}] for text in PROMPTS]
    by_ids = {
        tuple(tokenizer.apply_chat_template(each, add_generation_prompt=True, return_dict=False)): each
        for each in dialogues
    }
    method, train, objective = spec.method, spec.train, spec.objective
    full = method.name == "full"
    set_seed(train.seed)
    trainer = GRPOTrainer(
        model=str(source) if full else methods.load(method.name).load(spec, source),
        reward_funcs=lambda completion_ids, **_: [sum(1 - i % 2 for i in ids) / len(ids) for ids in completion_ids],
        args=GRPOConfig(
            output_dir=str(folder), per_device_train_batch_size=train.batch_size, learning_rate=train.learning_rate,
            gradient_accumulation_steps=train.gradient_accumulation_steps, lr_scheduler_type="constant", optim="sgd",
            max_grad_norm=0, num_train_epochs=1, seed=train.seed, use_cpu=True, bf16=False,
            gradient_checkpointing=False, logging_steps=1, logging_strategy="steps", save_strategy="no",
            report_to="none", disable_tqdm=True, shuffle_dataset=False, beta=objective.beta,
            num_generations=objective.num_generations, max_completion_length=objective.max_completion_length,
            temperature=objective.temperature, loss_type=objective.loss_type,
        ),
        train_dataset=Dataset.from_list([{"prompt": by_ids[tuple(row[0].ids)]} for row in data.train]),
        processing_class=tokenizer,
        peft_config=None if full else LoraConfig(
            r=method.rank, lora_alpha=method.alpha, target_modules=list(method.targets), task_type="CAUSAL_LM"
        ),
    )  # fmt: skip
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [(entry["loss"], entry["grad_norm"], entry["reward"]) for entry in logged]


@pytest.mark.parametrize(
    ("method", "train", "objective"),
    [
        ("full", {"batch_size": 4, "gradient_accumulation_steps": 2}, {"temperature": 0.8, "loss_type": "grpo"}),
        ("lora", {"batch_size": 4}, {"beta": 0.5}),
    ],
    ids=["full", "lora with a reference"],
)
def test_steps_equal_those_of_a_plain_trl_script(train_here, tmp_path, method, train, objective):
    rows = file_of(tmp_path, [{"prompt": text} for text in PROMPTS])
    changes = {"method": {"name": method}, "objective": GRPO | objective, "train": SGD | train, "dataset": rows}
    ours = [(row.loss, row.grad_norm, row.reward) for row in trained(train_here(**changes))]
    theirs = of_plain_trl(spec_of(**changes), tmp_path / "trl")
    assert len({norm for _, norm, _ in ours}) == len(ours) > 2
    for mine, plain in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(plain, rel=1e-4, abs=1e-6)  # the loss is nearly 0, its gradient is not


@pytest.fixture
def cut(monkeypatch):
    """Truncate completions to 1, 2, 3 … tokens and return them with their prompts."""
    seen, inner = [], GRPOTrainer._generate_single_turn

    def single_turn(self, prompts, *args, **kwargs):
        ids, nothing = inner(self, prompts, *args, **kwargs)
        seen.append((prompts, [row[: 1 + i % len(row)] for i, row in enumerate(ids)]))
        return seen[-1][1], nothing

    monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", single_turn)
    return seen


def test_counts_equal_the_trained_batches(train_here, monkeypatch, cut):
    seen, inner = [], GRPOTrainer.compute_loss

    def spy(self, model, inputs, *args, **kwargs):
        masks = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        seen.append((masks.sum(), masks.numel(), inputs["completion_mask"].sum(), len(masks)))
        return inner(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(GRPOTrainer, "compute_loss", spy)
    run = train_here(objective=GRPO, dataset=MADE, train={"batch_size": 4, "gradient_accumulation_steps": 2})
    rows = trained(run)
    steps = [[sum(map(int, column)) for column in zip(*seen[at : at + 2], strict=True)] for at in (0, 2)]
    assert [[row.real_tokens, row.padded_tokens, row.label_tokens, row.samples] for row in rows] == steps
    for row, (prompts, completions) in zip(rows, cut, strict=True):
        lengths = [len(p) + len(c) for p, c in zip(prompts, completions, strict=True)]
        even = [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completions]
        assert (row.longest_sequence, row.generated_tokens) == (max(lengths), row.label_tokens)
        assert row.reward == pytest.approx(sum(even) / len(even))
    described = read_json(run.applied)["dataset"]
    assert described["samples"] == 4
    assert described["label_tokens"] == 0  # prompts have no labels


def test_order_hash_depends_on_generated_tokens(train_here):
    runs = (train_here(objective=GRPO, dataset=MADE, train={"batch_size": 8, "seed": seed}) for seed in (1, 1, 2))
    made = [read_json(run.applied)["dataset"] for run in runs]
    assert made[0]["order_hash"] == made[1]["order_hash"] != made[2]["order_hash"]
    assert made[0]["hash"] == made[2]["hash"]


def test_parts_of_a_step_are_timed_and_generation_uses_a_cache(train_here, monkeypatch):
    """With a simulated clock: 5 s in generate, 3 s in the reward, 2 s in each loss."""
    now, widths, where = [100.0], [], []
    monkeypatch.setattr(HostClock, "mark", lambda self: now[0])

    def takes(name, seconds):
        inner = getattr(GRPOTrainer, name)

        def timed(self, *args, **kwargs):
            now[0] += seconds
            where.append(self.recorder.position)
            return inner(self, *args, **kwargs)

        monkeypatch.setattr(GRPOTrainer, name, timed)

    takes("_generate_single_turn", 5)
    takes("_calculate_rewards", 3)
    takes("compute_loss", 2)
    forward = Qwen3ForCausalLM.forward

    def widening(self, *args, **kwargs):
        if where[-1] == "generation":
            widths.append(kwargs["input_ids"].shape[1])
        return forward(self, *args, **kwargs)

    widening.__signature__ = inspect.signature(forward)
    monkeypatch.setattr(Qwen3ForCausalLM, "forward", widening)
    run = train_here(
        objective=GRPO | {"fixed_length": True}, dataset={"samples": 12, "mean_length": None, "length": 8},
        train={"batch_size": 4, "gradient_accumulation_steps": 2}, measure={"warmup": 1},
    )  # fmt: skip
    for row in trained(run):
        parts = (row.generation_s, row.scoring_s, row.forward_backward_s, row.optimizer_s)
        assert parts == (5, 3, 4, 0)
        assert row.step_time_s == 12
        assert row.label_tokens == row.generated_tokens == 8 * 6  # all have the full length
        assert 0 < row.generation_peak_gb <= row.peak_memory_gb
    assert where == ["generation", "scoring", "forward", "forward"] * 6
    assert widths == [8, 1, 1, 1, 1, 1] * 6  # the prompt, then one token at a time
    summary = summarise(run)
    assert summary.parts_s == {"generation": 5, "scoring": 3, "forward_backward": 4, "optimizer": 0}
    rates = {name: summary.tokens_per_s[name] for name in ("real", "generated", "trained")}
    assert rates == pytest.approx({"real": 8 * 14 / 12, "generated": 8 * 6 / 5, "trained": 8 * 14 / 4})
    assert summary.samples_per_s == pytest.approx(8 / 12)
    shown = card(summary, run)
    assert "generation 5.00 s, scoring 3.00 s, forward_backward 4.00 s, optimizer 0" in shown
    assert "; 9.6 generated tokens/s while generating" in shown
    assert "  loss " not in shown  # the advantages of a group sum to 0
    assert (summary.model_tflops, summary.mfu) == (None, None)  # the FLOPs of generation are not counted


LEARNS = {
    "objective": {"name": "grpo", "num_generations": 16, "max_completion_length": 8, "fixed_length": True},
    "method": {"name": "full"}, "dataset": {"samples": 20, "mean_length": None, "length": 8},
    "train": {"batch_size": 32, "learning_rate": 0.2, "lr_scheduler": "constant", "max_grad_norm": 0},
}  # fmt: skip


def test_reward_is_learned_only_by_a_learning_run(train_here):
    run = train_here(**LEARNS)
    rewards = [row.reward for row in trained(run)]
    assert rewards[0] < 0.7
    assert rewards[-1] > 0.8
    figures = summarise(run).loss
    assert (figures["reward_first"], figures["reward_last"]) == (rewards[0], rewards[-1])
    frozen = trained(train_here(**LEARNS, measure={"control": "learning_rate_0"}))
    assert max(row.reward for row in frozen) < 0.7


def test_optimizations_do_not_change_grpo(train_here):
    made = {"objective": GRPO, "dataset": MADE, "train": SGD | {"batch_size": 4}}
    plain, other = (
        trained(train_here(**made, optimizations=on))
        for on in ({}, {"gradient_checkpointing": True, "attention": "eager"})
    )
    for mine, theirs in zip(other, plain, strict=True):
        assert (mine.grad_norm, mine.reward) == pytest.approx((theirs.grad_norm, theirs.reward), rel=1e-4)
    assert len({row.grad_norm for row in plain}) == 4


def test_reference_is_the_base_model(train_here, monkeypatch):
    made = {"objective": GRPO | {"beta": 0.1}, "dataset": MADE, "train": {"batch_size": 4, "max_steps": 1}}
    applied = read_json(train_here(**made, method={"name": "qlora"}).applied)
    assert applied["reference"] == {"kind": "weights under the adapters", "in_step": True}
    assert applied["generation"] == {"by": "transformers generate", "reward": "share of even token ids"}
    assert (applied["loss"], applied["loss_normalisation"]) == ("dapo", "label tokens of the step")
    assert applied["parameters"]["trainable"] == 19_456
    monkeypatch.setattr(grpo.GrpoTrainer, "forget_copy", lambda self: None)
    with pytest.raises(NotAppliedError, match="the reference is not the base weights under the adapters"):
        train_here(**made)


def test_different_live_settings_are_reported():
    wanted = spec_of(objective=GRPO | {"fixed_length": True}, train={"batch_size": 4})
    live = SimpleNamespace(
        beta=0.0, num_generations=2, loss_type="dapo", has_copy=lambda: False, ref_model=None,
        generation_config=SimpleNamespace(max_new_tokens=6, temperature=1.0, min_new_tokens=None),
    )  # fmt: skip
    problems = grpo.GrpoTrainer.verify(live, wanted)
    assert problems == [
        "objective.num_generations is 4, but it trains with 2",
        "objective.fixed_length is on and completions may end earlier",
    ]


def test_prompts_are_read_from_every_format(tmp_path, cache):
    asked = [{"role": "user", "content": "two?"}]
    answered = [*asked, {"role": "assistant", "content": "2"}]
    forms = {
        "prompt": [{"prompt": "two?", "solution": "2"}, {"prompt": asked}],
        "prompt-completion": [{"prompt": "two?", "completion": "2"}],
        "question-answer": [{"question": "two?", "answer": "2"}],
        "messages": [{"messages": answered}],
    }
    tokenizer, wanted = build_tokenizer(2048), {"batch_size": 4}
    expected = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    for name, rows in forms.items():
        data = file_of(tmp_path, rows, format=name)
        for row in prepare(spec_of(objective=GRPO, dataset=data, train=wanted), tokenizer, 2048).train:
            assert (row[0].ids, set(row[0].labels)) == (expected, {IGNORE})


@pytest.mark.parametrize(
    ("rows", "more", "message"),
    [
        ([{"text": "a"}], {"format": None}, "it has no prompt: set dataset.format=prompt"),
        ([{"prompt": ""}], {}, "`prompt` is empty"),
        ([{"prompt": []}], {}, "it has no prompt"),
        ([{"prompt": "long " * 50}], {"max_length": 8}, "end of every row is beyond max_length 8: raise"),
        ([{"question": "a"}], {}, "`prompt` is missing"),
    ],
    ids=["text", "empty", "no messages", "too long", "no such column"],
)
def test_rows_without_prompts_are_an_error_with_a_fix(tmp_path, cache, rows, more, message):
    spec = spec_of(objective=GRPO, dataset=file_of(tmp_path, rows, **more), train={"batch_size": 4})
    with pytest.raises(DataError, match=message):
        prepare(spec, build_tokenizer(2048), 2048)


def test_unused_prompts_are_reported(train_here, tmp_path):
    rows = file_of(tmp_path, [{"prompt": text} for text in PROMPTS[:3]] + [{"prompt": "long " * 99}])
    made = {"objective": GRPO, "dataset": rows}
    applied = read_json(train_here(**made, train={"batch_size": 8}).applied)
    assert "skipped 1 prompt at the end: a step needs 2" in applied["warnings"]
    assert "skipped 1 row of file with the prompt's end beyond max_length 64" in applied["warnings"]
    with pytest.raises(SpecError, match="3 prompts, and a step needs 4: lower"):
        train_here(**made, train={"batch_size": 16})

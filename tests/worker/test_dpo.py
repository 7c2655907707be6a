"""Objective dpo: equal to a plain trl script, and recorded like any other run."""

from __future__ import annotations

import json
import math

import pytest
from datasets import Dataset
from peft import LoraConfig
from transformers import set_seed
from trl import DPOConfig, DPOTrainer

from conftest import spec_of, train_in
from ftbench.core.hardware import find_gpu
from ftbench.errors import DataError, NotAppliedError, SpecError
from ftbench.estimate.memory.estimate import constants, estimate_memory
from ftbench.estimate.time.history import RunHistory
from ftbench.estimate.time.work import step_work
from ftbench.estimate.workload.batches import batches_of
from ftbench.estimate.workload.model import trainable_shape
from ftbench.spec.experiment import Experiment
from ftbench.store.rates import tflops
from ftbench.store.rundir import read_json
from ftbench.store.steps import read_steps
from ftbench.store.summary import summarise
from ftbench.worker import dpo, methods
from ftbench.worker.data.prepare import prepare
from ftbench.worker.data.tokens import IGNORE
from ftbench.worker.model import loading
from ftbench.worker.model.tokenizer import build_tokenizer
from ftbench.worker.train import prepared

DPO = {"name": "dpo", "beta": 0.3}
COMPUTED = DPO | {"precompute_ref_log_probs": True}
SGD = {"optimizer": "sgd", "max_grad_norm": 0, "learning_rate": 0.05, "lr_scheduler": "constant"}
PAIRS = [
    {"prompt": f"Name a number after {n}.", "chosen": f"{n + 1} is after {n}.", "rejected": f"{n - 1}, perhaps?"}
    for n in range(12)
]


def trained(run):
    return [row for row in read_steps(run.steps)[0] if row.phase == "train"]


def losses(run):
    return [row.loss for row in trained(run)]


def pairs_file(folder, rows=PAIRS):
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"name": "file", "path": str(path), "samples": None, "mean_length": None, "max_length": 64}


def of_plain_trl(spec, folder):
    """Return losses and gradient norms of a plain script with trl's own tokens, collator, reference and loop."""
    source = loading.source_of(spec.model, spec.method)
    tokenizer, data = prepared(spec, source)
    by_ids = {tuple(_written(tokenizer, row, "chosen")): row for row in PAIRS}
    in_order = [by_ids[tuple(pair[0].ids)] for pair in data.train]
    rows = [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "chosen": [{"role": "assistant", "content": row["chosen"]}],
            "rejected": [{"role": "assistant", "content": row["rejected"]}],
        }
        for row in in_order
    ]
    method, train = spec.method, spec.train
    full = method.name == "full"
    model = str(source) if full else methods.load(method.name).load(spec, source)
    set_seed(train.seed)
    trainer = DPOTrainer(
        model=model,
        args=DPOConfig(
            output_dir=str(folder), per_device_train_batch_size=train.batch_size, learning_rate=train.learning_rate,
            lr_scheduler_type="constant", optim="sgd", max_grad_norm=0, num_train_epochs=1, seed=train.seed,
            use_cpu=True, bf16=False, gradient_checkpointing=False, train_sampling_strategy="sequential",
            logging_steps=1, logging_strategy="steps", save_strategy="no", report_to="none",
            beta=spec.objective.beta, max_length=64,
            precompute_ref_log_probs=spec.objective.precompute_ref_log_probs, disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=None if full else LoraConfig(
            r=method.rank, lora_alpha=method.alpha, target_modules=list(method.targets), task_type="CAUSAL_LM"
        ),
    )  # fmt: skip
    trainer.train()
    return [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]


def _written(tokenizer, row, side):
    messages = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[side]}]
    return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)


@pytest.mark.parametrize(
    ("method", "objective"), [("full", DPO), ("lora", COMPUTED)], ids=["full in step", "lora computed"]
)
def test_losses_equal_those_of_a_plain_trl_script(train_here, tmp_path, method, objective):
    changes = {"method": {"name": method}, "objective": objective, "train": SGD, "dataset": pairs_file(tmp_path)}
    ours = [(row.loss, row.grad_norm) for row in trained(train_here(**changes))]
    assert ours[0][0] == pytest.approx(math.log(2), rel=1e-5)  # model and reference are equal
    assert ours[0][0] - ours[-1][0] > 1e-3
    for mine, theirs in zip(ours, of_plain_trl(spec_of(**changes), tmp_path / "trl"), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize(
    ("method", "objective"), [("full", DPO), ("full", COMPUTED), ("lora", DPO), ("qlora", COMPUTED)], ids=str
)
def test_kind_and_place_of_the_reference_are_recorded(train_here, method, objective):
    train = {"precision": "bf16", "max_steps": 1}  # the reference has the same rounding as the model
    run = train_here(method={"name": method}, objective=objective, dataset={"eval_samples": 2}, train=train)
    kinds = {"full": "second model", "lora": "weights under the adapters", "qlora": "weights under the adapters"}
    in_step = objective is DPO
    applied, phases = read_json(run.applied), [phase["name"] for phase in read_json(run.phases)["phases"]]
    assert applied["reference"] == {
        "kind": kinds[method] if in_step else "computed before training",
        "in_step": in_step,
    }
    assert ("reference" in phases) != in_step
    assert applied["loss"] == "sigmoid"
    assert applied["parameters"]["trainable"] == (applied["parameters"]["total"] if method == "full" else 19_456)
    assert trained(run)[0].loss == pytest.approx(math.log(2), rel=1e-6)
    assert summarise(run).loss["eval"] is not None


def test_pair_is_one_sample_with_two_sequences(train_here, monkeypatch):
    seen, inner = [], dpo.DpoTrainer.compute_loss

    def spy(self, model, inputs, *args, **kwargs):
        mask, answers = inputs["attention_mask"], inputs["completion_mask"]
        seen.append((int(mask.sum()), mask.numel(), int(answers[:, 1:].sum()), mask.shape[0] // 2, mask.shape[1]))
        return inner(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(dpo.DpoTrainer, "compute_loss", spy)
    run = train_here(objective=DPO, dataset={"samples": 11})
    rows = trained(run)
    counted = [(r.real_tokens, r.padded_tokens, r.label_tokens, r.samples, r.longest_sequence) for r in rows]
    assert counted == seen
    assert [row.samples for row in rows] == [2, 2, 2, 2, 2, 1]
    described = read_json(run.applied)["dataset"]
    assert (described["samples"], described["tokens"]["count"]) == (11, 22)
    assert described["tokens"]["total"] == sum(row.real_tokens for row in rows)
    assert described["label_tokens"] == sum(row.label_tokens for row in rows)


def test_all_pairs_of_a_step_have_the_same_weight(train_here):
    """11 pairs: with accumulation, the last micro-batch of the second step has only one pair."""
    whole, parts = {"batch_size": 6}, {"batch_size": 2, "gradient_accumulation_steps": 3}
    runs = [train_here(objective=DPO, dataset={"samples": 11}, train=SGD | size) for size in (whole, parts)]
    plain, accumulated = ([(row.loss, row.grad_norm) for row in trained(run)] for run in runs)
    assert len(plain) == 2
    for mine, theirs in zip(accumulated, plain, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    assert read_json(runs[1].applied)["loss_normalisation"] == "pairs of the step"


def test_rewards_show_whether_a_preference_is_learned(train_here):
    made = {
        "objective": DPO, "dataset": {"samples": 48, "structure": "tasks"}, "method": {"name": "full"},
        "train": {"batch_size": 8, "learning_rate": 3e-3},
    }  # fmt: skip
    run = train_here(**made)
    rows = trained(run)
    assert (rows[0].reward_accuracy, rows[0].reward_margin) == (0, 0)
    assert rows[-1].reward_accuracy > 0.8
    assert rows[-1].reward_margin > 0.1
    last = summarise(run).loss
    assert (last["reward_accuracy"], last["reward_margin"]) == (rows[-1].reward_accuracy, rows[-1].reward_margin)
    spoiled = trained(train_here(**made, measure={"control": "reversed_gradient"}))
    assert spoiled[-1].reward_margin < rows[-1].reward_margin / 2


FEW = {"samples": 6, "max_length": 32}


@pytest.fixture(scope="module")
def plain(tmp_path_factory, cache):
    folder = tmp_path_factory.mktemp("plain")
    return trained(train_in(folder, train=SGD, dataset=FEW, objective=DPO))


@pytest.mark.parametrize(
    ("switches", "objective"),
    [
        ({"gradient_checkpointing": True, "attention": "eager", "loader_processes": 1}, DPO),
        ({"fused_lora": True}, COMPUTED),
    ],
    ids=str,
)
def test_optimizations_do_not_change_dpo(train_here, plain, switches, objective):
    switched = trained(train_here(train=SGD, dataset=FEW, objective=objective, optimizations=switches))
    for mine, theirs in zip(switched, plain, strict=True):
        assert (mine.loss, mine.grad_norm) == pytest.approx((theirs.loss, theirs.grad_norm), rel=1e-4)
    assert plain[0].loss != pytest.approx(plain[-1].loss, rel=1e-3)


@pytest.mark.exhaustive
def test_compiled_layers_do_not_change_dpo(train_here, compiler):
    data = {"length": 16, "mean_length": None, "samples": 4, "max_length": 32}  # one graph per layer
    rows, compiled = (
        trained(train_here(train=SGD, dataset=data, objective=DPO, optimizations={"compile": on}))
        for on in (False, True)
    )
    for mine, theirs in zip(compiled, rows, strict=True):
        assert (mine.loss, mine.grad_norm) == pytest.approx((theirs.loss, theirs.grad_norm), rel=1e-4)


def test_length_grouping_pads_pairs_less(train_here, plain):
    grouped = trained(train_here(train=SGD, dataset=FEW, objective=DPO, optimizations={"length_grouping": True}))
    assert sum(row.real_tokens for row in plain) == sum(row.real_tokens for row in grouped)
    assert sum(row.padded_tokens for row in plain) > sum(row.padded_tokens for row in grouped)


@pytest.mark.parametrize(
    ("rows", "objective", "message"),
    [
        (
            [{"prompt": "a", "completion": "b"}],
            DPO,
            "objective dpo needs columns chosen and rejected.*dataset.columns=.*objective",
        ),
        (PAIRS, {"name": "sft"}, "the rows are preference pairs: set objective to dpo.*completion: chosen"),
        ([*PAIRS, PAIRS[0] | {"rejected": PAIRS[0]["chosen"]}], DPO, "line 13: `chosen` and `rejected` are equal"),
        ([*PAIRS, {"prompt": "a", "chosen": "b", "rejected": None}], DPO, "line 13.*`rejected` is missing"),
        ([PAIRS[0] | {"chosen": [{"role": "user", "content": "q"}]}], DPO, "no message has the role assistant"),
    ],
    ids=["no pairs", "pairs for sft", "the same answers", "a missing answer", "no answer"],
)
def test_rows_without_pairs_are_an_error_with_a_fix(tmp_path, cache, rows, objective, message):
    spec = spec_of(objective=objective, dataset=pairs_file(tmp_path, rows))
    with pytest.raises(DataError, match=message):
        prepare(spec, build_tokenizer(2048), 2048)


@pytest.mark.parametrize(
    ("data", "train", "message"),
    [
        ({"max_length": 4}, {}, r"every row is beyond max_length 4: raise dataset\.max_length$"),
        ({"longest_first": True}, {"batch_size": 13}, r"13 samples, and there are 12: lower train\.batch_size$"),
    ],
    ids=["answers beyond max_length", "fewer pairs than a batch"],
)
def test_unusable_sizes_are_an_error_with_a_fix(tmp_path, cache, data, train, message):
    spec = spec_of(objective=DPO, dataset=pairs_file(tmp_path) | data, train=train)
    with pytest.raises((DataError, SpecError), match=message):
        prepare(spec, build_tokenizer(2048), 2048)


def test_all_published_formats_of_pairs_are_read(tmp_path, cache):
    plain = {"prompt": "two?", "chosen": "2", "rejected": "3"}
    asked, chosen, rejected = (
        [{"role": role, "content": plain[key]}]
        for role, key in (("user", "prompt"), ("assistant", "chosen"), ("assistant", "rejected"))
    )
    rows = [
        plain,
        {"prompt": asked, "chosen": chosen, "rejected": rejected},
        {"prompt": "two?", "chosen": chosen, "rejected": rejected},
        {"prompt": "two?", "chosen": asked + chosen, "rejected": asked + rejected},
        {"prompt": None, "chosen": asked + chosen, "rejected": asked + rejected},
    ]
    tokenizer = build_tokenizer(2048)
    made = prepare(spec_of(objective=DPO, dataset=pairs_file(tmp_path, rows)), tokenizer, 2048).train
    assert len({tuple(tuple(side.ids + side.labels) for side in pair) for pair in made}) == 1
    chosen_side, rejected_side = made[0]
    answer = [token for token in chosen_side.labels if token != IGNORE]
    assert tokenizer.decode(answer).startswith("2")
    assert "two?" not in tokenizer.decode(answer)
    assert chosen_side.labels.count(IGNORE) == rejected_side.labels.count(IGNORE)
    renamed = [{"q": row["prompt"], "good": row["chosen"], "bad": row["rejected"]} for row in rows[:1]]
    named = pairs_file(tmp_path, renamed) | {"columns": {"prompt": "q", "chosen": "good", "rejected": "bad"}}
    assert prepare(spec_of(objective=DPO, dataset=named), tokenizer, 2048).train[0][0].ids == chosen_side.ids


def test_synthetic_pairs_share_a_prompt_and_differ(cache):
    spec = spec_of(objective=DPO, dataset={"samples": 50, "mean_length": 4})
    first, again = (prepare(spec, build_tokenizer(2048), 2048).train for _ in range(2))
    assert first == again
    for chosen, rejected in first:
        prompt = min(len(chosen.ids), len(rejected.ids)) // 2
        assert chosen.ids[:prompt] == rejected.ids[:prompt]
        assert chosen.ids != rejected.ids
        assert chosen.labels == [IGNORE] * prompt + chosen.ids[prompt:]


def test_wrong_reference_fails_the_run(train_here, monkeypatch):
    monkeypatch.setattr(dpo.DpoTrainer, "forget_copy", lambda self: None)
    with pytest.raises(NotAppliedError, match="the reference is a copy of the adapters"):
        train_here(objective=DPO)


@pytest.mark.parametrize(("method", "objective", "gib"), [("full", DPO, 0.17171), ("lora", COMPUTED, 0.15428)])
def test_memory_estimate_agrees_with_the_recorded_peak(method, objective, gib):
    """The GiB were measured with the real trainer on fake tensors, with trl's kernel for log-probabilities."""
    spec = Experiment.model_validate({
        "name": "pairs", "model": {"id": "tiny/qwen3", "weights": "random"}, "method": {"name": method},
        "objective": objective, "train": {"batch_size": 8},
        "dataset": {"name": "synthetic", "samples": 16, "length": 256, "max_length": 256},
    })  # fmt: skip
    parts = estimate_memory(spec, find_gpu("H200")).parts
    assert sum(parts.values()) / constants().allocated_factor == pytest.approx(gib, rel=0.01)
    assert ("reference model" in parts) == (method == "full")


def test_work_includes_both_sequences_and_the_reference():
    def work(**changes):
        spec = spec_of(**changes)
        batches = batches_of(spec, RunHistory().lengths(spec))
        return step_work(spec, trainable_shape(spec), batches).groups[0][1]["products"]

    even = {"dataset": {"length": 64, "mean_length": None}, "method": {"name": "full"}}
    computed, in_step = (work(**even, objective=each) for each in (COMPUTED, DPO))
    layer, head, positions = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 192, 2048 * 64, 2 * 2 * 64
    assert computed == pytest.approx(6 * (2 * layer + head) * positions)  # all positions of two sequences per pair
    assert in_step == pytest.approx(computed * 4 / 3)  # an additional forward pass


def test_flops_include_the_reference_if_it_runs_in_the_step(train_here):
    """By hand for tiny/qwen3: 2 FLOPs per parameter and position, plus causal attention."""
    run = train_here(objective=DPO, dataset={"length": 32, "mean_length": None}, method={"name": "full"})
    rows, applied = trained(run), read_json(run.applied)
    described, window = applied["dataset"], sum(row.step_time_s for row in rows)
    without = applied | {"reference": applied["reference"] | {"in_step": False}}
    more = [(a - b) * window * 1e12 for a, b in
            zip(tflops(rows, applied, described), tflops(rows, without, described), strict=True)]  # fmt: skip
    layer = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 192
    positions, labels, attention = 24 * 32, 24 * 16, 2 * 4 * 64 * 16
    assert more[0] == pytest.approx(positions * (2 * 2 * layer + attention) + labels * 2 * 2048 * 64)
    assert more[1] == pytest.approx(positions * (2 * 2 * layer + attention + 2 * 2048 * 64))

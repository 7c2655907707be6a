"""Pairs under objective dpo: what trl's own script trains, recorded as any other run."""

from __future__ import annotations

import json

import pytest
from datasets import Dataset
from peft import LoraConfig
from transformers import set_seed
from trl import DPOConfig, DPOTrainer

from conftest import spec_of
from ftbench.core.hardware import find_gpu
from ftbench.estimate.memory.constants import constants
from ftbench.estimate.memory.estimate import estimate_memory
from ftbench.estimate.time.history import RunHistory
from ftbench.estimate.time.work import step_work
from ftbench.estimate.workload.batches import batches_of
from ftbench.estimate.workload.trainable import trainable_shape
from ftbench.spec.experiment import Experiment
from ftbench.store.flop_rates import of_steps
from ftbench.store.rundir import read_json
from ftbench.store.steps import read_steps
from ftbench.worker import methods
from ftbench.worker.model import loading
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
    """The losses and gradient norms of a script that knows nothing of ftbench: the same pairs as dialogues, trl's own
    tokens, collator, reference and loop."""
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


@pytest.mark.parametrize(("method", "objective", "gib"), [("full", DPO, 0.17171), ("lora", COMPUTED, 0.15428)])
def test_estimate_of_memory_agrees_with_the_recorded_peak(method, objective, gib):
    """GiB that the real trainer allocated on tensors without memory, with trl's kernel for the log-probabilities."""
    spec = Experiment.model_validate({
        "name": "pairs", "model": {"id": "tiny/qwen3", "weights": "random"}, "method": {"name": method},
        "objective": objective, "train": {"batch_size": 8},
        "dataset": {"name": "synthetic", "samples": 16, "length": 256, "max_length": 256},
    })  # fmt: skip
    parts = estimate_memory(spec, find_gpu("H200")).parts
    assert sum(parts.values()) / constants().allocated_factor == pytest.approx(gib, rel=0.01)
    assert ("reference model" in parts) == (method == "full")


def test_time_counts_both_sequences_and_the_reference_of_a_step():
    def work(**changes):
        spec = spec_of(**changes)
        return step_work(spec, trainable_shape(spec), batches_of(spec, RunHistory().lengths(spec))).groups[0][1][
            "products"
        ]

    even = {"dataset": {"length": 64, "mean_length": None}, "method": {"name": "full"}}
    computed, held = (work(**even, objective=each) for each in (COMPUTED, DPO))
    layer, head, positions = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 192, 2048 * 64, 2 * 2 * 64
    assert computed == pytest.approx(6 * (2 * layer + head) * positions)  # of all positions, and two sequences a pair
    assert held == pytest.approx(computed * 4 / 3)  # a forward pass beside forward and backward


def test_a_references_forward_pass_counts_where_it_runs_in_the_step(train_here):
    """By hand for tiny/qwen3: 2 FLOPs a parameter and position, and scores and values of half the square."""
    run = train_here(objective=DPO, dataset={"length": 32, "mean_length": None}, method={"name": "full"})
    rows, applied = trained(run), read_json(run.applied)
    described, window = applied["dataset"], sum(row.step_time_s for row in rows)
    without = applied | {"reference": applied["reference"] | {"in_step": False}}
    more = [(a - b) * window * 1e12 for a, b in
            zip(of_steps(rows, applied, described), of_steps(rows, without, described), strict=True)]  # fmt: skip
    layer = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 192
    positions, labels, attention = 24 * 32, 24 * 16, 2 * 4 * 64 * 16
    assert more[0] == pytest.approx(positions * (2 * 2 * layer + attention) + labels * 2 * 2048 * 64)
    assert more[1] == pytest.approx(positions * (2 * 2 * layer + attention + 2 * 2048 * 64))

"""Megatron and verl: the order of the rows, the layout of the weights, and real runs.

Real runs need the environment in the folder FTBENCH_FRAMEWORKS. verl trains on a GPU only.
"""

from __future__ import annotations

import hashlib
import types

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_frameworks import run_both
from torch.utils.data import DataLoader, DistributedSampler
from transformers import Qwen3Config, Qwen3ForCausalLM

from conftest import spec_of
from ftbench.errors import SpecError
from ftbench.store import rundir
from ftbench.store.steps import read_steps
from ftbench.worker import frameworks
from ftbench.worker.data.collate import token_hash
from ftbench.worker.data.tokens import IGNORE, Tokens
from ftbench.worker.frameworks import live, megatron_model, own_loop, prepare, session, verl
from ftbench.worker.measure import effective_config
from ftbench.worker.outcome import Phases
from ftbench.worker.training_run import TrainingRun

VERL = {"framework": "verl", "python": "/nowhere/bin/python"}
FULL, LORA = {"name": "full"}, {"name": "lora", "rank": 4, "alpha": 8}


def spec_with(shares=1, accumulate=1, framework="verl", method=FULL, **train):
    several = {"gpus": shares, "strategy": "fsdp" if framework == "verl" else "ddp"} if shares > 1 else {}
    settings = {"batch_size": 2, "gradient_accumulation_steps": accumulate, "optimizer": "adamw_torch"} | train
    launch, data = VERL | {"framework": framework} | several, {"samples": 16}
    return spec_of(method=method, train=settings, launch=launch, dataset=data)


def tokens_of(count):
    return [[Tokens([7 * row + place for place in range(4 + row % 3)], [1] * (4 + row % 3), 9)] for row in range(count)]


@pytest.mark.parametrize(("rows", "shares", "accumulate"), [(11, 1, 2), (12, 2, 1), (9, 2, 2)])
def test_steps_are_the_batches_of_trl(rows, shares, accumulate):
    """`token_hash` verifies the order of our own ranks after each run."""
    spec = spec_with(shares, accumulate, "megatron", max_steps=7)
    given = tokens_of(rows)
    steps = [*own_loop.steps_of(spec, rows)]
    assert len(steps) == 7
    for share in range(shares):
        batches = [step[micro][share] for step in steps for micro in range(len(step))]
        tokens = [np.asarray(given[row][0].ids, dtype=np.int64) for batch in batches for row in batch]
        expected = token_hash(given, spec, len(batches), slice(share, None, shares))
        assert expected == hashlib.sha256(b"".join(each.tobytes() for each in tokens)).hexdigest()


def test_number_of_steps_follows_from_epochs():
    assert own_loop.total_steps(spec_with(accumulate=2, max_steps=None, epochs=3), 11) == 9
    assert own_loop.total_steps(spec_with(accumulate=2, max_steps=5, epochs=3), 11) == 5


@pytest.mark.parametrize(("shares", "accumulate"), [(1, 1), (2, 2)])
def test_verl_s_sampler_yields_the_batches_of_trl(shares, accumulate):
    spec = spec_with(shares, accumulate, max_steps=5)
    order = verl.unshuffled(spec, 16)
    for share in range(shares):
        sampler = DistributedSampler(order, num_replicas=shares, rank=share, shuffle=True, drop_last=True)
        loader = DataLoader(order, batch_size=2 * accumulate, sampler=sampler, drop_last=True)
        trained = [batch.tolist() for batch in loader]
        assert trained == [[row for micro in step for row in micro[share]] for step in own_loop.steps_of(spec, 16)]


def test_verl_refuses_rows_that_it_would_drop():
    with pytest.raises(SpecError, match="15 rows are not a multiple of the batch of a step, 4"):
        verl.unshuffled(spec_with(accumulate=2, max_steps=5), 15)


def test_verl_s_settings():
    values = verl.configuration(spec_with(accumulate=4, max_grad_norm=0.0), "data/model")
    assert values["data"]["use_dynamic_bsz"] is False
    assert (values["data"]["train_batch_size"], values["data"]["micro_batch_size_per_gpu"]) == (8, 2)
    assert values["optim"]["clip_grad"] == 1e30  # verl cannot turn clipping off
    assert values["data"]["custom_cls"] == {"path": "pkg://ftbench.worker.frameworks.verl", "name": "VerlRows"}
    assert "lora_rank" not in values["model"]
    for targets in ("all-linear", ["q_proj"]):
        adapted = verl.configuration(spec_with(accumulate=4, method=LORA | {"targets": targets}), "data/model")
        assert adapted["data"] == values["data"]
        adapters = {"lora_rank": 4, "lora_alpha": 8, "target_modules": targets}
        assert adapted["model"] == values["model"] | adapters
        assert type(adapted["model"]["lora_alpha"]) is int


class Engine:
    """Has the methods of verl's engine that a step calls, in their order."""

    def __init__(self, model):
        self.module, self._autocast_dtype = model, torch.float32
        self.engine_config = types.SimpleNamespace(strategy="fsdp2")
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 - step / 8)

    def train_batch(self, batches):
        self.optimizer.zero_grad()
        for batch in batches:
            loss, _ = self.forward_step(batch, loss_function=None)
            loss.backward()
        return self.optimizer_step()

    def forward_step(self, batch, loss_function):
        ids = torch.nested.to_padded_tensor(batch["input_ids"], 0)
        labels = torch.where(torch.nested.to_padded_tensor(batch["loss_mask"], 0) > 0, ids, IGNORE)
        return self.module(ids, labels=labels).loss / 2, {}

    def optimizer_step(self):
        self.optimizer.step()
        return 0.5

    def lr_scheduler_step(self):
        self.lr_scheduler.step()


@pytest.mark.parametrize("method", [FULL, LORA], ids=["full", "lora"])
def test_recording_of_verl_s_engine(tmp_path, monkeypatch, method):
    monkeypatch.chdir(tmp_path)
    prepare.write_rows(tmp_path / frameworks.DATA, tokens_of(16))
    spec = spec_with(accumulate=2, max_steps=3, learning_rate=1e-3, method=method)
    directory = rundir.create(tmp_path, "tests", "verl")
    rundir.write_json(directory.machine, {"gpus": []})
    run = TrainingRun(spec, directory, Phases(directory, "train"))
    shape = {"vocab_size": 128, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    model = Qwen3ForCausalLM(Qwen3Config(**shape, num_attention_heads=2, num_key_value_heads=1))
    if method is LORA:
        adapters = LoraConfig(r=4, lora_alpha=8, target_modules=[*spec.method.targets], task_type="CAUSAL_LM")
        build = verl._with_trl_adapters(lambda _, module: get_peft_model(module, adapters), spec.train.seed)
        model = build(None, model)
    engine = Engine(model)
    run.write_facts(**effective_config.of_model(model))
    assert live.model_problems(model, spec) == []
    recording = verl._Recording(run, engine, padded=True)
    recording.recorder.start(3)
    verl.VerlRows.spec = spec
    data = verl.VerlRows()
    sampler = DistributedSampler(data, num_replicas=1, rank=0, shuffle=True)
    indices = iter(sampler)
    for _ in range(3):
        batches = [[data[next(indices)] for _ in range(2)] for _ in range(2)]
        engine.train_batch([
            {key: torch.nested.as_nested_tensor([row[key] for row in rows], layout=torch.jagged) for key in rows[0]}
            for rows in batches
        ])  # fmt: skip
        engine.lr_scheduler_step()
    run.finish()
    session._check_order(run)
    steps, _ = read_steps(directory.steps)
    assert [(row.real_tokens, row.label_tokens, row.padded_tokens) for row in steps] == [
        (19, 15, 22),
        (20, 16, 22),
        (21, 17, 24),
    ]
    assert [row.learning_rate for row in steps] == pytest.approx([1e-3, 0.875e-3, 0.75e-3])
    assert {row.grad_norm for row in steps} == {0.5}
    assert steps[0].loss == pytest.approx(np.log(128), rel=0.05)
    assert run.facts["optimizer"]["class"] == "torch.optim.adamw.AdamW"
    assert run.facts["loss"] == "verl.workers.utils.losses.sft_loss"
    sides = 2 * (16 + 16) + 2 * (16 + 8) + 3 * (16 + 32)  # q and o, k and v, gate, up and down
    trained = {"full": run.facts["parameters"]["total"], "lora": 4 * sides}
    assert run.facts["parameters"]["trainable"] == trained[spec.method.name]
    assert "warnings" not in run.facts


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_of_megatron_and_back(ranks):
    config = Qwen3Config(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, head_dim=4, tie_word_embeddings=False,
    )  # fmt: skip
    given = Qwen3ForCausalLM(config).state_dict()
    layer = [f"decoder.layers.0.{name}" for name in megatron_model._IN_LAYER]
    names = [*layer, "embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight"]
    back = {}
    for name in names:
        parts = [given[source] for source in megatron_model.sources(name, first_layer=1)]
        shares = [megatron_model.share_of(name, parts, 2, rank, ranks) for rank in range(ranks)]
        back |= dict(zip(megatron_model.sources(name, 1), megatron_model.joined(name, shares, 2, 32), strict=True))
        if name.endswith("linear_qkv.weight"):  # a group: 4 query heads, their key head, their value head
            query, key, value = parts
            assert torch.equal(torch.cat(shares)[24:48], torch.cat([query[16:], key[4:], value[4:]]))
    assert all(torch.equal(back[name], given[name]) for name in back)
    assert {*back} == {name for name in given if ".layers.0." not in name}
    assert megatron_model.sources("output_layer.weight", tied=True) == ["model.embed_tokens.weight"]


@pytest.mark.frameworks
@pytest.mark.parametrize(
    ("model", "train", "launch"),
    [
        ("tiny/qwen3", "gradient_accumulation_steps: 2, optimizer: sgd, learning_rate: 1.0e-2, max_grad_norm: 0", ""),
        ("tiny/llama", "weight_decay: 0.1, warmup_steps: 2, lr_scheduler: cosine, learning_rate: 1.0e-3", ""),
        ("tiny/llama", "weight_decay: 0.1", "gpus=2 strategy=tp"),
        ("tiny/qwen3", "weight_decay: 0.1", "gpus=2 strategy=pp micro_batches=2"),
    ],
)
def test_megatron_trains_as_trl_in_float32(model, train, launch, tmp_path):
    text = (
        f"model: {{id: {model}, weights: random, dtype: float32}}\nmethod: full\n"
        f"dataset: {{name: sample, samples: 14, max_length: 128}}\n"
        f"train: {{max_steps: 8, batch_size: 2, precision: fp32, {train}}}\n"
    )
    more = [f"launch.{each}" for each in launch.split()]
    (ours, our_steps), (theirs, their_steps) = run_both("megatron", text, tmp_path, *more)
    for name in ("parameters", "matmul_shape", "trained_dtype", "loss_normalisation", "product_precision"):
        assert theirs[name] == ours[name]
    assert theirs["dataset"]["order_hash"] == ours["dataset"]["order_hash"]
    for our, their in zip(our_steps, their_steps, strict=True):
        assert their.loss == pytest.approx(our.loss, rel=2e-6)
        assert their.grad_norm == pytest.approx(our.grad_norm, rel=1e-5)
        for name in ("real_tokens", "label_tokens", "samples", "learning_rate"):
            assert getattr(their, name) == getattr(our, name)

"""unsloth makes its own batches, with the samples, the order and the loss of every other method. It needs a GPU: these
tests use trl's collator, as unsloth does, and tests/gpu trains with unsloth itself."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from conftest import spec_of, train_in
from ftbench.errors import NotAppliedError
from ftbench.spec.methods import PROJECTIONS
from ftbench.store.rundir import read_json
from ftbench.store.steps import read_steps
from ftbench.worker.data.collate import Collator, counting
from ftbench.worker.data.tokens import IGNORE
from ftbench.worker.methods import lora, unsloth
from ftbench.worker.model import random_weights

ROWS = [
    {"input_ids": np.arange(5, 12), "labels": np.array([IGNORE, IGNORE, *range(7, 12)]), "lengths": np.array([7])},
    {"input_ids": np.arange(20, 23), "labels": np.arange(20, 23), "lengths": np.array([3])},
]
PACKED = [{"input_ids": np.arange(5, 15), "labels": np.arange(5, 15), "lengths": np.array([4, 6])}]


@pytest.mark.parametrize(("rows", "free"), [(ROWS, True), (ROWS, False), (PACKED, True)])
def test_a_librarys_batch_has_the_counts_of_ours(rows, free):
    theirs = counting(DataCollatorForLanguageModeling(0, padding_free=free).torch_call)(rows)
    ours = Collator(spec_of(optimizations={"packing" if rows is PACKED else "padding_free": free}), 0, 64, None)(rows)
    for name in ("input_ids", "position_ids" if free else "attention_mask"):
        assert torch.equal(theirs[name], ours[name])
    assert torch.equal(theirs["labels"][:, 1:], ours["labels"][:, 1:])
    assert theirs["count"] == ours["count"]
    assert (theirs["count"].real, theirs["count"].padded) == (10, 10 if free else 14)


@pytest.mark.parametrize(("key", "at", "message"), [("input_ids", 8, "the tokens of"), ("labels", 4, "which tokens")])
def test_a_batch_with_other_tokens_or_labels_is_an_error(key, at, message):
    def collate(examples):
        batch = DataCollatorForLanguageModeling(0, padding_free=True).torch_call(examples)
        batch[key][0, at] += 1
        return batch

    with pytest.raises(NotAppliedError, match=message):
        counting(collate)(ROWS)


def test_each_step_has_the_loss_of_plain_lora(tmp_path, cache, monkeypatch):
    changes = {"train": {"precision": "fp32", "learning_rate": 1e-3}, "dataset": {"eval_samples": 2}}
    plain = train_in(tmp_path / "plain", **changes)
    monkeypatch.setattr(unsloth, "batches_itself", lambda spec, pixels: True)
    padding_free = {"padding_free": True, "packing": False}
    build = sys.modules["ftbench.worker.trainer"].SFTConfig
    monkeypatch.setattr("ftbench.worker.trainer.SFTConfig", lambda **options: build(**options | padding_free))
    other = train_in(tmp_path / "other", **changes)
    steps = [read_steps(run.steps)[0] for run in (plain, other)]
    for one, two in zip(*steps, strict=True):
        assert two.loss == pytest.approx(one.loss, rel=1e-5)
        assert (two.real_tokens, two.label_tokens, two.samples) == (one.real_tokens, one.label_tokens, one.samples)
        assert two.padded_tokens == two.real_tokens
    assert len({read_json(run.applied)["dataset"]["order_hash"] for run in (plain, other)}) == 1


@pytest.mark.parametrize(("model", "experts", "targets"), [
    ("tiny/gpt-oss", False, ["q_proj", "k_proj", "v_proj", "o_proj"]), ("tiny/gpt-oss", True, [*PROJECTIONS]),
    ("tiny/qwen3", False, [*PROJECTIONS]),
])  # fmt: skip
def test_unsloth_gets_adapters_on_experts_only_if_the_spec_requests_them(cache, monkeypatch, model, experts, targets):
    asked = {}
    loader = SimpleNamespace(get_peft_model=lambda model, **options: asked.update(options))
    monkeypatch.setattr(unsloth, "_loader", lambda config: loader)
    spec = spec_of(model={"id": model}, method={"name": "unsloth", "experts": experts})
    loaded = lora.load(spec_of(model={"id": model}), str(random_weights.materialise(spec.model)))
    unsloth.adapt(loaded, spec)
    assert asked["target_modules"] == targets
    assert bool(asked["target_parameters"]) == experts
    for path, module in loaded.named_modules():
        if experts and path.endswith("mlp.experts"):
            module.down_proj = type("Mxfp4ExpertParam", (torch.nn.Parameter,), {})(module.down_proj.data)
    asked.clear()
    unsloth.adapt(loaded, spec)
    assert ("target_parameters" not in asked) == experts


def test_adapters_on_experts_that_the_spec_does_not_request_are_an_error(cache):
    changes = {"model": {"id": "tiny/gpt-oss"}, "method": {"name": "lora", "experts": True}}
    spec = spec_of(**changes)
    model = lora.adapt(lora.load(spec, str(random_weights.materialise(spec.model))), spec)
    found = [unsloth.verify(model, spec_of(model=changes["model"], method={"name": "unsloth", "experts": experts}))
             for experts in (False, True)]  # fmt: skip
    message = "method.experts is off, but the experts have adapters"
    assert [message in problems for problems in found] == [True, False]


def forward_of(graphs, graph_shapes, graphs_off):
    """Return a function with the variables of a layer that unsloth compiles."""

    def run(layer):
        return graphs, graph_shapes, graphs_off

    return lambda layer: run(layer)


def live(monkeypatch, batches="padding-free", compiled=False, shapes=0, maximum=False):
    """Return a trainer with the attributes that unsloth leaves on its objects."""
    layer = type("Layer", (), {"forward": forward_of(shapes > 0, set(range(shapes)), [False])})
    layers = [layer(), layer()]
    for each in layers:
        each._unsloth_block_checked = 2 if compiled else 0
    modules = {
        "unsloth": SimpleNamespace(__version__="1"),
        "unsloth.utils.packing": SimpleNamespace(_PACKED_INFO_CACHE={"cuda:0": {}}),
        "unsloth.models._utils": SimpleNamespace(UNSLOTH_COMPILE_MAXIMUM=maximum),
        "unsloth.utils.padding_choice": SimpleNamespace(decide_auto_padding_free=lambda *_: (True, "GPU bound")),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(unsloth, "decoder_layers", lambda model: layers)
    collator = SimpleNamespace(padding_free=batches != "padded")
    arguments = SimpleNamespace(packing=batches == "packed")
    model = SimpleNamespace(modules=list)
    return SimpleNamespace(model=model, args=arguments, data_collator=collator, train_dataset=[], processing_class=None)


@pytest.mark.parametrize(
    ("changes", "state", "problem"),
    [
        ({}, {}, None),
        ({}, {"batches": "padded", "compiled": True}, None),
        ({"optimizations": {"packing": True}}, {"batches": "packed"}, None),
        ({"optimizations": {"packing": True}}, {}, "packing is on and unsloth's batches are padding-free"),
        ({"optimizations": {"padding_free": True}}, {"batches": "padded"}, "padding_free is on and unsloth's"),
        ({"method": {"padded": True}}, {}, "method.padded is on and unsloth's batches are padding-free"),
        ({"method": {"block_compile": False}}, {"compiled": True}, "block_compile is off and unsloth compiled 2"),
        ({"method": {"cuda_graphs": True}}, {}, "cuda_graphs is on and unsloth recorded no graph: 0 layers"),
        ({"method": {"cuda_graphs": True}}, {"batches": "padded", "compiled": True, "shapes": 1}, None),
        ({"method": {"compile_maximum": True}}, {}, "compile_maximum is on, but"),
        ({"method": {"compile_maximum": True}}, {"maximum": True}, None),
    ],
)
def test_a_choice_that_was_not_applied_is_a_problem(changes, state, problem, monkeypatch):
    spec = spec_of(**changes | {"method": {"name": "unsloth"} | changes.get("method", {})})
    trainer = live(monkeypatch, **state)
    problems = unsloth.verify_choices(trainer, spec)
    assert len(problems) == (problem is not None)
    assert not problem or problem in problems[0]
    facts = unsloth.applied(trainer)
    assert facts["batches"] == state.get("batches", "padding-free")
    assert facts["compiled_layers"] == 2 * state.get("compiled", False)
    assert facts["cuda_graph_shapes"] == state.get("shapes", 0)


def test_attention_without_sample_boundaries_is_a_problem(monkeypatch):
    trainer = live(monkeypatch)
    sys.modules["unsloth.utils.packing"]._PACKED_INFO_CACHE = {}
    (problem,) = unsloth.verify_choices(trainer, spec_of(method={"name": "unsloth"}))
    assert "did not get the sample boundaries" in problem


@pytest.mark.parametrize(
    ("method", "optimizations", "arguments"),
    [
        ({}, {}, {"packing": False}),
        ({}, {"padding_free": True}, {"packing": False, "padding_free": True}),
        ({"padded": True}, {}, {"packing": False, "padding_free": False}),
        ({}, {"packing": True}, {"packing": True}),
    ],
)
def test_unsloth_decides_unless_the_spec_does(method, optimizations, arguments):
    spec = spec_of(method={"name": "unsloth"} | method, optimizations=optimizations)
    assert unsloth.batching(spec) == arguments
    assert unsloth.batches_itself(spec, None)
    assert not unsloth.batches_itself(spec, object())


@pytest.mark.parametrize(
    ("method", "optimizations", "message"),
    [
        ({"padded": True}, {"packing": True}, "method.padded"),
        ({"cuda_graphs": True, "block_compile": False}, {}, "method.cuda_graphs needs method.block_compile"),
        ({}, {"packing": True, "fixed_shape": True}, "needs one sample per row"),
    ],
)
def test_choices_that_exclude_each_other_are_errors(method, optimizations, message):
    with pytest.raises(ValueError, match=message):
        spec_of(method={"name": "unsloth"} | method, optimizations=optimizations)

"""Tiny models are trained, and the recorded values are correct."""

from __future__ import annotations

import itertools
import math
import time

import pytest
import torch
import transformers
from peft.tuners.lora import LoraLayer

from conftest import spec_of, train_in
from ftbench.errors import MissingError, NotAppliedError, SpecError
from ftbench.spec.experiment import Model
from ftbench.store.rundir import read_json
from ftbench.store.steps import read_steps
from ftbench.store.summary import summarise
from ftbench.worker import methods, trainer
from ftbench.worker.data.collate import Collator
from ftbench.worker.device import check_device
from ftbench.worker.model import loading
from ftbench.worker.model.random_weights import materialise

SGD = {"optimizer": "sgd", "learning_rate": 0.05}
PICTURES = {"name": "images", "samples": 8, "image_size": [56, 40], "mean_length": 24, "max_length": 128}
METHODS = ["lora", "qlora", "full"]


def rows_of(run):
    rows, warnings = read_steps(run.steps)
    assert warnings == []
    return rows


@pytest.fixture(scope="module")
def runs(tmp_path_factory, cache):
    """A run of each method."""
    folder = tmp_path_factory.mktemp("runs")
    return {name: train_in(folder, method={"name": name}, dataset={"eval_samples": 2}) for name in METHODS}


@pytest.mark.parametrize("method", METHODS)
def test_each_method_learns_and_is_recorded(runs, method):
    run = runs[method]
    rows = rows_of(run)
    train = [row for row in rows if row.phase == "train"]
    assert [row.step for row in train] == [1, 2, 3, 4, 5, 6]
    assert all(math.isfinite(row.loss) and row.grad_norm > 0 and row.step_time_s > 0 for row in train)
    assert [row.phase for row in rows].count("evaluate") == 1
    assert train[0].learning_rate == pytest.approx(1e-3)
    assert all(row.peak_memory_gb >= row.memory_allocated_gb > 0 for row in train)
    summary = summarise(run)
    assert summary.parameters["trainable"] > 0
    assert summary.loss["eval"] is not None
    applied = read_json(run.applied)
    assert applied["optimizer"]["class"].endswith("AdamW")
    assert applied["optimizer"]["state"]


def test_adapters_have_the_requested_scale_and_dropout(cache):
    spec, method = spec_of(method={"rank": 4, "alpha": 12, "dropout": 0.25}), methods.load("lora")
    model = method.adapt(method.load(spec, loading.source_of(spec.model)), spec)
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    assert {(layer.scaling["default"], layer.lora_dropout["default"].p) for layer in layers} == {(3.0, 0.25)}


def test_applied_lists_4_bit_layers_of_qlora(runs):
    applied = read_json(runs["qlora"].applied)
    assert applied["model"]["modules"]["Linear4bit"] == 14  # seven projections in each of two layers
    assert "uint8" in applied["model"]["weights_gb_by_dtype"]


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", "float32"), ("bf16", "bfloat16")])
def test_adapters_of_a_4_bit_model_have_the_precision_of_the_training(train_here, precision, dtype):
    """trl casts them to bfloat16, but the reference of a parity check needs float32."""
    train = {"precision": precision, "max_steps": 1}
    applied = read_json(train_here(method={"name": "qlora"}, train=train).applied)
    assert {*applied["optimizer"]["state"]} == {f"exp_avg: {dtype}", f"exp_avg_sq: {dtype}"}


@pytest.mark.parametrize(("upcast", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
def test_upcast_sets_the_dtype_of_weights_that_are_not_quantised(cache, upcast, dtype):
    method = methods.load("qlora")
    spec = spec_of(model={"dtype": "bfloat16"}, method={"name": "qlora", "upcast": upcast})
    model = method.adapt(method.load(spec, loading.source_of(spec.model)), spec)
    assert {p.dtype for name, p in model.named_parameters() if "norm" in name or "embed" in name} == {dtype}


def test_quantised_parameters_are_counted_before_packing(runs):
    lora, qlora = (read_json(runs[name].applied) for name in ("lora", "qlora"))
    assert lora["parameters"] == qlora["parameters"]
    assert lora["matmul_shape"] == qlora["matmul_shape"]


def test_token_counts_equal_the_models_inputs(train_here, monkeypatch):
    seen = []
    inner = trainer.Trainer.compute_loss

    def spy(self, model, inputs, *args, **kwargs):
        if self.model.training:
            labels, mask = inputs["labels"], inputs["attention_mask"]
            seen.append(
                (int(mask.sum()), mask.numel(), int((labels[:, 1:] != -100).sum()), mask.shape[0], mask.shape[1])
            )
        return inner(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(trainer.Trainer, "compute_loss", spy)
    run = train_here(
        dataset={"name": "sample", "samples": 11, "eval_samples": 3, "mean_length": None}, train={"batch_size": 2}
    )
    counted = [
        (row.real_tokens, row.padded_tokens, row.label_tokens, row.samples, row.longest_sequence)
        for row in rows_of(run)
        if row.phase == "train"
    ]
    assert counted == seen
    assert sum(row[0] for row in counted) == read_json(run.applied)["dataset"]["tokens"]["total"]


def test_accumulation_and_a_short_last_batch_are_counted(train_here):
    run = train_here(
        dataset={"samples": 11, "eval_samples": 2, "length": 16, "mean_length": None},
        train={"batch_size": 2, "gradient_accumulation_steps": 2, "epochs": 2},
        measure={"eval": "epoch"},
    )
    rows = rows_of(run)
    assert [row.phase for row in rows] == ["train"] * 3 + ["evaluate"] + ["train"] * 3 + ["evaluate"]
    assert [row.samples for row in rows] == [4, 4, 3, 2, 4, 4, 3, 2]
    assert [row.real_tokens for row in rows] == [64, 64, 48, 32, 64, 64, 48, 32]
    assert [row.step for row in rows] == [1, 2, 3, 3, 4, 5, 6, 6]
    assert [row.epoch for row in rows if row.phase == "evaluate"] == [1.0, 2.0]
    assert read_json(run.applied)["dataset"]["label_tokens"] == sum(row.label_tokens for row in rows[:3]) == 11 * 15


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_evaluation_does_not_change_later_steps(train_here, method):
    made = {"method": {"name": method}, "dataset": {"samples": 4, "eval_samples": 2}, "train": {"epochs": 2}}
    runs = [rows_of(train_here(**made, measure={"eval": when})) for when in ("end", "epoch")]
    end, epoch = ([(row.loss, row.grad_norm) for row in rows if row.phase == "train"] for rows in runs)
    assert epoch == end


@pytest.mark.parametrize("given", [{}, {"model": {"id": "tiny/qwen2.5-vl"}, "dataset": PICTURES}])
def test_accumulation_equals_one_large_batch(train_here, given):
    """The micro-batches have different numbers of labels."""

    def losses(batch, accumulation):
        run = train_here(train=SGD | {"batch_size": batch, "gradient_accumulation_steps": accumulation}, **given)
        return [row.loss for row in rows_of(run)], read_json(run.applied)["dataset"]["order_hash"]

    (one, order), (accumulated, same) = losses(4, 1), losses(2, 2)
    assert one == pytest.approx(accumulated, rel=1e-4)
    assert (order == same) or given  # the hash has the images of a batch after its tokens


def test_same_spec_gives_same_losses_and_tokens(train_here, runs):
    first, again, full = runs["lora"], train_here(dataset={"eval_samples": 2}), runs["full"]
    other = train_here(dataset={"eval_samples": 2}, train={"seed": 1, "max_steps": 1})
    assert rows_of(other)[0].grad_norm != rows_of(first)[0].grad_norm  # other adapters
    assert [row.loss for row in rows_of(first)] == [row.loss for row in rows_of(again)]
    orders = {read_json(run.applied)["dataset"]["order_hash"] for run in (first, again, full)}
    assert len(orders) == 1


def test_first_loss_is_that_of_the_untrained_model(runs):
    """Adapters start at zero, so the first loss is about log(vocabulary) for random weights."""
    assert rows_of(runs["lora"])[0].loss == pytest.approx(math.log(2048), rel=0.02)


def test_gpt_oss_warns_that_only_attention_is_trained(train_here):
    applied = read_json(train_here(model={"id": "tiny/gpt-oss"}, train={"max_steps": 1}).applied)
    kinds = applied["parameters"]["by_kind"]
    assert kinds["attention"]["trainable"] > 0
    assert kinds["experts"]["trainable"] == 0
    text = " ".join(applied["warnings"])
    assert "gate_proj, up_proj, down_proj" in text
    assert "experts" in text


ATTENTION = 2 * 8 * ((64 + 64) + 2 * (64 + 32) + (64 + 64))  # layers, rank, q + k and v + o of the tiny models


@pytest.mark.parametrize("model", ["tiny/gpt-oss", "tiny/qwen3-moe"])
@pytest.mark.parametrize(
    ("method", "optimizations"), [({"targets": "all-linear"}, {"fused_lora": True}), ({"name": "qlora"}, {})], ids=str
)
def test_experts_get_no_adapters_by_default(train_here, model, method, optimizations):
    run = train_here(model={"id": model}, method=method, optimizations=optimizations, train={"max_steps": 1})
    applied = read_json(run.applied)
    assert applied["parameters"]["trainable"] == ATTENTION
    assert applied["parameters"]["by_kind"]["experts"]["trainable"] == 0


@pytest.mark.parametrize("targets", [{}, {"targets": "all-linear"}])
@pytest.mark.parametrize("model", ["tiny/gpt-oss", "tiny/qwen3-moe"])
def test_experts_get_adapters_on_request(train_here, model, targets):
    run = train_here(model={"id": model}, method={"experts": True, **targets}, train={"max_steps": 1})
    applied = read_json(run.applied)
    experts = 2 * 4 * 8 * ((64 + 2 * 64) + (64 + 64))  # layers, experts, rank, gate and up in one + down
    assert applied["parameters"]["by_kind"]["experts"]["trainable"] == experts
    assert applied["parameters"]["trainable"] == ATTENTION + experts


@pytest.mark.parametrize(
    ("model", "method", "message"),
    [
        (
            "tiny/qwen3-moe",
            {"targets": ["gate_proj", "up_proj", "down_proj"]},
            "are not linear layers: set method.experts to on",
        ),
        ("tiny/qwen3", {"experts": True}, "method.experts"),
        ("tiny/qwen3", {"targets": ["nonsense_proj"]}, "^method.targets: .*nonsense_proj"),
        ("tiny/qwen3-moe", {"targets": ["experts"]}, "^method.targets: .* is not supported"),
    ],
)
def test_unusable_targets_are_rejected(train_here, model, method, message):
    with pytest.raises(SpecError, match=message):
        train_here(model={"id": model}, method=method)


def test_ignored_optimization_fails_the_run(train_here, monkeypatch):
    monkeypatch.setattr(trainer, "sft_config", _without_checkpointing(trainer.sft_config))
    with pytest.raises(NotAppliedError, match=r"gradient_checkpointing is True, but 0 % of the layers use it"):
        train_here(optimizations={"gradient_checkpointing": True})
    allowed = train_here(
        optimizations={"gradient_checkpointing": True}, measure={"allow_fallback": True}, train={"max_steps": 1}
    )
    assert any("gradient_checkpointing" in warning for warning in read_json(allowed.applied)["warnings"])


def _without_checkpointing(arguments):
    def changed(*args, **kwargs):
        made = arguments(*args, **kwargs)
        made.gradient_checkpointing = False
        return made

    return changed


def test_8_bit_optimizer_with_32_bit_state_fails_the_run(train_here):
    with pytest.raises(NotAppliedError, match="has no 8-bit state"):
        train_here(train={"optimizer": "adamw_bnb_8bit"})


def test_8_bit_optimizer_is_verified_by_its_state(train_here):
    run = train_here(train={"optimizer": "adamw_bnb_8bit", "max_steps": 1}, method={"name": "full"})
    assert any("uint8" in name for name in read_json(run.applied)["optimizer"]["state"])


def test_matmul_shape_counts_the_models_parameters(runs):
    """By hand for tiny/qwen3: seven projections in two layers, and the tied head."""
    shape = read_json(runs["lora"].applied)["matmul_shape"]
    layer = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 192
    assert shape["base"] == 2 * layer
    assert shape["head"] == 2048 * 64
    assert shape["base_trained"] == 0
    assert shape["adapters"] == 2 * 8 * (64 * 2 * 4 - 2 * 32 + 3 * (64 + 192))
    assert shape["attention_width"] == [64, 64]


def test_full_fine_tuning_trains_all_parameters(runs):
    applied = read_json(runs["full"].applied)
    assert applied["parameters"]["trainable"] == applied["parameters"]["total"] == 229_760
    assert applied["matmul_shape"]["base_trained"] == applied["matmul_shape"]["base"]


def test_phases_are_contiguous(runs):
    phases = read_json(runs["lora"].phases)["phases"]
    assert all(a["end_s"] == b["start_s"] for a, b in itertools.pairwise(phases))
    names = [phase["name"] for phase in phases]
    assert names[:6] == ["import", "make_weights", "prepare_data", "load", "setup", "train"]
    assert "evaluate" in names


def test_amd_gpu_is_rejected(monkeypatch):
    check_device(None)
    monkeypatch.setattr(torch.version, "hip", "7.1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(MissingError, match=r"built for ROCm.*Estimates for AMD GPUs.* to measure the CPU"):
        check_device(None)


def test_local_directory_is_loaded_like_published_weights(train_here, runs):
    """The files of a random model give the same losses with `weights: pretrained` and a path."""
    random = Model(id="tiny/qwen3", weights="random", dtype="float32")
    local = {"id": "mine/tiny", "weights": "pretrained", "path": str(materialise(random))}
    run = train_here(model=local, dataset={"eval_samples": 2})
    assert [r.loss for r in rows_of(run)] == [r.loss for r in rows_of(runs["lora"])]


def test_unreachable_model_is_an_error_with_a_fix(train_here, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(MissingError, match=r"cannot be loaded: .* set model\.weights=random"):
        train_here(model={"id": "nobody/nothing", "weights": "pretrained"})


def test_slow_loader_makes_the_run_data_bound(train_here, monkeypatch):
    """The simulated clock advances by 0.1 s per forward pass and by `slow` seconds per batch."""
    now, slow = 0.0, 0.001

    def lasting(function, seconds):
        def call(*arguments, **named):
            nonlocal now
            now += seconds()
            return function(*arguments, **named)

        return call

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    monkeypatch.setattr(Collator, "__call__", lasting(Collator.__call__, lambda: slow))
    monkeypatch.setattr(transformers.Qwen3Model, "forward", lasting(transformers.Qwen3Model.forward, lambda: 0.1))
    assert summarise(train_here(dataset={"samples": 24})).bound["verdict"] is None
    slow = 0.15
    bound = summarise(train_here(dataset={"samples": 24})).bound
    assert bound["verdict"] == "data-bound"
    assert 0.5 < bound["data_wait"] <= 0.6  # there is no batch after the last step

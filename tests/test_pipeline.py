"""Pipeline parallelism over gloo: with SGD, all ranks together learn the same as one process."""

from __future__ import annotations

import gc
import itertools
import json
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="training libraries are not installed")

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from commands import ENDLESS, Command, write_spec
from ftbench.core import pipeline
from ftbench.core.units import GIB
from ftbench.estimate.memory.estimate import estimate_memory
from ftbench.estimate.workload.model import shape_of
from ftbench.estimate.workload.sharding import rank_model, sharding_of
from ftbench.spec.experiment import Experiment
from ftbench.store import rundir
from ftbench.store.rundir import RunDir
from ftbench.store.steps import read_steps
from ftbench.worker.parallel import stages
from sweeps import Night, write_sweep
from test_several_gpus import (
    KEPT,
    SGD,
    assert_over,
    assert_same_adapters,
    figures,
    learned,
    ranks_of,
    wait_for_ranks,
)  # fmt: skip

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("cache")]
SHAPE = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "max_position_embeddings": 4096,
}  # fmt: skip
SLIDING = {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2}
MODELS = {
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True},
    "llama": {"model_type": "llama", "tie_word_embeddings": False},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": False, **SLIDING},
    "mistral": {"model_type": "mistral", "tie_word_embeddings": False, "sliding_window": 16},
    "gemma2": {"model_type": "gemma2", "tie_word_embeddings": True, "sliding_window": 16},
    "gemma3_text": {"model_type": "gemma3_text", "tie_word_embeddings": True, "sliding_window": 16},
    "qwen3_moe": {"model_type": "qwen3_moe", "tie_word_embeddings": False, "moe_intermediate_size": 32,
                  "num_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip
# 21 prompts with answers of different lengths: the last step has too few rows for its micro-batches.
DATA = {"name": "synthetic", "samples": 21, "mean_length": 20, "max_length": 64, "eval_samples": 3}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a function that trains a spec at a global batch of 8, each spec once per module."""
    runs: dict[str, Command] = {}

    def train(launch: dict[str, Any], family: str = "qwen3", **parts: Any) -> Command:
        key = json.dumps([launch, family, parts])
        if key not in runs:
            runs[key] = run(tmp_path_factory.mktemp("pipeline"), launch, family, parts)
        return runs[key]

    return train


def run(folder: Path, launch: dict[str, Any], family: str, parts: dict[str, Any], before: Any = None) -> Command:
    shape = folder / f"{family}.json"
    shape.write_text(json.dumps(SHAPE | MODELS[family]))
    shares = 2 if launch.get("gpus") == 4 or "fsdp" in launch.get("strategy", "") else 1
    exact = parts["method"]["name"] != "qlora"  # its norm has 16 bits in one process
    clipped = SGD | ({"max_grad_norm": 0.2} if exact else {})
    train = {"batch_size": 8 // shares, "precision": "fp32", **clipped, **parts.get("train", {})}
    model = {"id": family, "path": str(shape), "weights": "random", "dtype": "float32"}
    spec = write_spec(folder, **{"dataset": DATA, "model": model, **parts, "train": train, "launch": launch})
    with Command(spec, folder / "out", before=before) as command:
        command.finish()
    assert command.code == 0, command.stderr
    return command


def spec_of(command: Command) -> Experiment:
    values = rundir.read_json(command.run.spec_json)
    return Experiment.model_validate({key: values[key] for key in Experiment.model_fields})


FULL, LORA = {"method": {"name": "full"}}, {"method": {"name": "lora"}, **KEPT}
SAVED = FULL | KEPT
AGAIN = {"train": {"batch_size": 4, "gradient_accumulation_steps": 2}}
TWICE = {"train": {"batch_size": 2, "gradient_accumulation_steps": 2}}
PP, DDP, FSDP, TP = {"pp": 2}, {"gpus": 4, "pp": 2}, {"pp": 2, "strategy": "pp+fsdp"}, {"pp": 2, "tp": 2}
ALL = {"pp": 2, "strategy": "pp+tp+fsdp"}
exhaustive = partial(pytest.param, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize(
    ("launch", "family", "parts"),
    [
        (PP, "qwen3", SAVED),
        (FSDP | {"micro_batches": 2}, "qwen3", SAVED | TWICE),
        exhaustive(DDP, "qwen3", LORA),
        exhaustive(FSDP, "qwen3", SAVED),
        exhaustive(TP, "qwen3", LORA),
        exhaustive(PP, "qwen3", LORA),
        exhaustive(PP, "qwen3", FULL | AGAIN),
        exhaustive(DDP, "qwen3", SAVED),
        exhaustive(FSDP, "qwen3", LORA),
        exhaustive(TP, "qwen3", SAVED),
        exhaustive(TP, "llama", FULL),
        exhaustive(ALL, "qwen3", SAVED),
        exhaustive(ALL, "qwen3", LORA),
        *[exhaustive(PP | {"schedule": name}, "qwen3", FULL) for name in ("gpipe", "interleaved-1f1b", "zbv")],
        exhaustive(FSDP | {"schedule": "interleaved-1f1b"}, "qwen3", FULL),
        exhaustive(PP | {"micro_batches": 8, "split": [3, 1]}, "qwen3", FULL),
        exhaustive({"pp": 4, "micro_batches": 4}, "qwen3", FULL),
        exhaustive(PP, "qwen3", {"method": {"name": "qlora"}}),
        exhaustive(PP, "qwen3", LORA | {"optimizations": {"gradient_checkpointing": True}}),
        exhaustive(PP, "qwen3", LORA | {"optimizations": {"packing": True}, "dataset": DATA | {"samples": 60}}),
        *[exhaustive(PP, family, FULL) for family in [*MODELS][1:]],
        *[exhaustive(PP, family, LORA) for family in [*MODELS][1:]],
    ],
    ids=str,
)
def test_stages_learn_the_same_as_one_process(trained, launch, family, parts):
    one, several = trained({}, family, **parts | {"train": {}}), trained(launch, family, **parts)
    assert learned(several) == learned(one)
    assert figures(several, "loss") == pytest.approx(figures(one, "loss"), rel=2e-6)
    precise = 2**-8 if parts["method"]["name"] == "qlora" else 2e-6  # its adapters have 16 bits
    assert figures(several, "grad_norm") == pytest.approx(figures(one, "grad_norm"), rel=precise)
    if "measure" in parts:
        assert_same_adapters(one, several)
    assert several.summary()["parameters"] == one.summary()["parameters"]
    assert_stages_are_as_estimated(several)


def test_stages_compute_in_the_precision_of_the_spec(trained):
    half = FULL | {"train": {"precision": "bf16", "max_steps": 1}}
    exact, one, several = trained({}, **SAVED, train={}), trained({}, **half), trained(PP, **half)
    assert figures(several, "loss")[0] == pytest.approx(figures(one, "loss")[0], rel=1e-6)
    assert figures(one, "loss")[0] != pytest.approx(figures(exact, "loss")[0], rel=3e-6)


def test_sharded_stages_keep_weights_in_32_bits(trained):
    half = FULL | {"train": {"precision": "bf16", "optimizer": "adamw_torch", "max_steps": 1}}
    half |= {"model": {"id": "tiny/qwen3", "weights": "random", "dtype": "bfloat16"}}
    one, several = trained({}, **half), trained(FSDP, **half)
    assert figures(several, "loss")[0] == pytest.approx(figures(one, "loss")[0], rel=1e-3)
    states = rundir.read_json(several.run.applied)["optimizer"]["state"]
    assert {*states} == {"exp_avg: float32", "exp_avg_sq: float32"}


def test_dropout_is_on_after_an_evaluation(trained):
    """Each step trains all samples, and the adapters stay at their initial values: only dropout changes the norm."""
    parts = {"method": {"name": "lora", "dropout": 0.5}, "dataset": DATA | {"samples": 8}}
    train = {"epochs": 3, "learning_rate": 1e-12}
    norms = figures(trained(PP, **parts, train=train, measure={"eval": "epoch"}), "grad_norm")
    assert len(norms) == 3
    assert all(one != pytest.approx(other, rel=1e-3) for one, other in itertools.combinations(norms, 2))


def assert_stages_are_as_estimated(command: Command) -> None:
    """Check the layers and the number of weights of each rank, of which all states are multiples."""
    spec = spec_of(command)
    sharding, ranks = sharding_of(spec.launch), range(spec.launch.gpus)
    facts = [rundir.read_json(command.run.of_rank(rank).applied)["parallel"] for rank in ranks]
    assert all(0 < each["busy_s"] < each["pass_s"] for each in facts)
    assert command.summary()["ranks"]["layers"] == facts[0]["split"] == list(spec.launch.split or facts[0]["split"])
    if spec.method.name != "full":
        return
    for rank, each in zip(ranks, facts, strict=True):
        stage = rank // (spec.launch.tp or 1) % spec.launch.pp
        model = rank_model(shape_of(spec.model), replace(sharding, rank=stage))
        shards = sharding.holders if sharding.states == "fsdp" else 1
        assert each["elements_of_rank"] == pytest.approx(model.total / shards, rel=0.05 if spec.launch.tp else 0)


def count_bytes(folder: Path) -> None:
    """Let each rank write the bytes of all its weights, gradients and optimizer states after an optimizer step."""

    def count(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        weights = [each for each in gc.get_objects() if issubclass(type(each), torch.nn.Parameter) and not each.is_meta]
        tensors = {
            "weights": weights, "gradients": [each.grad for each in weights if each.grad is not None],
            "states": [each for state in optimizer.state.values() for each in state.values() if torch.is_tensor(each)],
        }  # fmt: skip
        blocks = {name: {each.untyped_storage() for each in kind} for name, kind in tensors.items()}
        sizes = {name: sum({each.data_ptr(): each.nbytes() for each in kind}.values()) for name, kind in blocks.items()}
        (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(sizes))

    register_optimizer_step_post_hook(count)


@pytest.mark.parametrize(
    ("stages", "method", "family"),
    [
        (4, "full", "qwen3"),
        *[
            exhaustive(count, method, family)
            for count, method, family in itertools.product((2, 4), ("full", "lora"), ("qwen3", "llama"))
            if (count, method, family) != (4, "full", "qwen3")
        ],
    ],
)
def test_ranks_keep_the_estimated_bytes(tmp_path, stages, method, family):
    """The embedding is tied in qwen3, and not in llama."""
    parts = {"method": {"name": method}, "train": {"optimizer": "adamw_torch", "max_steps": 1}}
    launch = {"pp": stages, "micro_batches": 4}
    spec = spec_of(run(tmp_path, launch, family, parts, before=partial(count_bytes, tmp_path)))
    for rank in range(stages):
        parts = estimate_memory(spec, 80.0, rank=rank).parts
        assert rundir.read_json(tmp_path / f"{rank}.json") == pytest.approx({
            "weights": (parts["weights"] + parts.get("adapters", 0)) * GIB, "gradients": parts["gradients"] * GIB,
            "states": parts["optimizer state"] * GIB,
        }, rel=0.05)  # fmt: skip


def test_killed_stage_is_named(tmp_path):
    """`test_killed_rank_is_named` kills rank 1."""
    with Command(write_spec(tmp_path, **{**ENDLESS, "launch": PP | {"micro_batches": 2}}), tmp_path / "out") as command:
        wait_for_ranks(command)
        ranks_of(command)[0].kill()
        command.finish(within=30)
    assert_over(command, "error", "rank 0: killed by SIGKILL from outside")


@pytest.mark.exhaustive
def test_killed_sweep_of_pipelines_is_resumed(tmp_path):
    """A sweep names a killed stage and repeats the cell. If it is killed itself, its ranks end, and it resumes."""
    launch = {"mock": "off", "pp": 2, "micro_batches": 2}
    spec = write_sweep(tmp_path, {"train.seed": [1, 2]}, launch=launch, train={"max_steps": 60})

    def training(night: Night) -> list[RunDir]:
        """Return the running runs of which both ranks have written a step."""
        runs = [run for run in night.runs() if rundir.read_json(run.state).get("state") == "running"]
        return [run for run in runs if all(read_steps(run.of_rank(rank).steps)[0] for rank in (0, 1))]

    with Night(spec, tmp_path / "out", experiment="night") as night:
        night.until(lambda: training(night))
        ranks_of(night)[1].kill()
        night.until(lambda: night.superseded() and training(night))
        state = rundir.read_json(night.superseded()[0].state)
        assert (state["state"], state["rank"], len(night.runs())) == ("error", 1, 1)
        night.kill()
    with Night(spec, tmp_path / "out", experiment="night") as night:
        night.finish()
    assert (night.code, night.told()) == (0, ["ok", "ok"]), night.stderr


def slow() -> None:
    """Let each stage take 120 ms to pass a micro-batch forward and 240 ms to pass it back."""

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
            time.sleep(0.12)
            return value.clone()

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            time.sleep(0.24)
            return gradient

    compute = stages.Layers._computed
    stages.Layers._computed = lambda *given: Sleep.apply(compute(*given))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("schedule", "count", "micro"), [("gpipe", 2, 4), ("1f1b", 2, 4), ("1f1b", 4, 8)])
def test_equal_stages_wait_as_their_schedule_says(tmp_path, schedule, count, micro):
    launch = {"pp": count, "micro_batches": micro, "schedule": schedule}
    command = run(tmp_path, launch, "llama", FULL | {"dataset": DATA | {"samples": 48}}, before=slow)
    assert command.summary()["ranks"]["bubble"] == pytest.approx((count - 1) / (micro + count - 1), rel=0.1)


def test_waiting_follows_from_the_schedule():
    assert [pipeline.bubble("1f1b", 4, 12), pipeline.bubble("interleaved-1f1b", 4, 12)] == [3 / 15, 3 / 27]
    assert [pipeline.in_flight("1f1b", 4, 12, rank) for rank in range(4)] == [4, 3, 2, 1]
    assert pipeline.in_flight("gpipe", 4, 12, 0) == 12
    assert [*pipeline.layers_of((3, 4), 1)] == [3, 4, 5, 6]
    assert pipeline.of_rank("zbv", 4, 1) == [1, 6]


@pytest.mark.parametrize(
    ("costs", "stages", "split"),
    [
        ([1] * 8 + [0], 4, (2, 2, 2, 2)),
        ([1] * 28 + [10], 2, (19, 9)),
        ([4, 1, 1, 1, 1], 2, (1, 3)),
        ([1, 1, 0], 2, (1, 1)),
    ],
)
def test_default_stages_are_equally_slow(costs, stages, split):
    assert pipeline.balanced(costs, [costs[-1], *costs], stages) == split

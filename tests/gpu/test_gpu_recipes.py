"""Each recipe, method and optimization trains on a GPU, is verified, has consistent figures and learns the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from methods import CAPABILITY, METHODS, ON_GPU, SPEC, cases, check_figures, why

from ftbench.store.steps import read_steps

torch = pytest.importorskip("torch", reason="training libraries are not installed")
pytestmark = [*ON_GPU, pytest.mark.timeout(300)]
LOSS_TOLERANCE = {"fp8": 0.02, "fused-lora-fp8": 0.02, "fused-lora-fp8-fast": 0.02,
                  "kernels-fp8": 0.02, "full-fp8": 0.02, "recipe-fastest-full-fp8": 0.02}  # fmt: skip


@pytest.mark.parametrize("name", cases(*(name for name in METHODS if "unsloth" not in name)))
def test_it_trains_and_every_figure_is_there(run, name):
    check_figures(*run(*METHODS[name]))


SAME = (
    "checkpointing", "compile", "fp8", "eager", "fused", "chunked-loss", "liger", "compile-dynamic",
    "selective", "offload", "padding-free", "varlen", "flex", "checkpoint-offload", "small-chunks", "fused-lora",
    "weight-offload", "weight-offload-chunked", "fused-lora-compile", "fused-lora-dynamic",
    "fused-lora-fp8", "fused-lora-fp8-fast",
    "kernels", "kernels-compile", "kernels-checkpointing", "kernels-fp8",
)  # fmt: skip


@pytest.mark.parametrize("name", cases(*SAME))
def test_an_optimization_learns_what_plain_lora_learns(run, name):
    plain, other = run()[1]["summary"], run(*METHODS[name])[1]["summary"]
    assert plain["dataset"]["order_hash"] == other["dataset"]["order_hash"]
    assert other["loss"]["last"] == pytest.approx(plain["loss"]["last"], rel=LOSS_TOLERANCE.get(name, 0.005))


PAIRS = {
    "recipe-fastest": "fastest-launched", "fp8-graphed": "recipe-fastest-fp8",  # replayed and not
    "kernels-fastest": "recipe-fastest", "kernels-qlora": "qlora",
    "full-fp8": "full-unclipped", "recipe-fastest-full-fp8": "recipe-fastest-full",
    "experts-fused": "experts", "gpt-oss-varlen": "gpt-oss-attention", "gpt-oss-flex": "gpt-oss-attention",
}  # fmt: skip


@pytest.mark.parametrize("name", cases(*PAIRS))
def test_it_learns_what_the_same_without_it_learns(run, name):
    plain, other = run(*METHODS[PAIRS[name]])[1]["summary"], run(*METHODS[name])[1]["summary"]
    assert plain["dataset"]["order_hash"] == other["dataset"]["order_hash"]
    for place in ("first", "last"):
        tolerance = LOSS_TOLERANCE.get(name, 0.005)
        assert other["loss"][place] == pytest.approx(plain["loss"][place], rel=tolerance)


@pytest.mark.parametrize(
    ("there", "away", "change"),
    [
        ("experts-sgd", "experts-graphed", 1.5),
        ("expert-adapters-sgd", "expert-adapters", 1.3),
        ("gpt-oss-sgd", "gpt-oss-graphed", 1.2),
    ],
)
def test_the_fastest_layers_with_experts_learn_what_the_plain_run_learns(run, there, away, change):
    """With this learning rate of SGD, the norm of the gradients changes from step to step."""
    norms = []
    for name in (there, away):
        code, document = run(*METHODS[name])
        assert code == 0, why(document)
        norms.append([row.grad_norm for row in read_steps(Path(document["run_dir"], "steps.csv"))[0][:10]])
    assert max(norms[0]) > change * norms[0][0]
    assert norms[1] == pytest.approx(norms[0], rel=0.05)


@pytest.mark.parametrize("name", ["recipe-fastest-small", "recipe-fastest", "experts-graphed", "gpt-oss-graphed"])
def test_every_step_is_a_replay_of_one_graph(run, name):
    if name != "recipe-fastest-small" and CAPABILITY != (9, 0):
        pytest.skip("cuda_graph: auto is on only with compute capability 9.0")
    document = run(*METHODS[name])[1]
    applied = json.loads(Path(document["run_dir"], "applied.json").read_text())
    assert applied["cuda_graph_replays"] == document["summary"]["steps"]["total"]


@pytest.mark.exhaustive
def test_fused_lora_saves_time_and_needs_no_more_memory(alone):
    compiled = alone("optimizations.compile=on", "optimizations.chunked_loss=on")[1]["summary"]
    fused = alone(*METHODS["fused-lora-compile"])[1]["summary"]
    assert not [text for each in (compiled, fused) for text in each["warnings"] if "wall clock" in text]
    assert fused["step_time_s"]["median"] < compiled["step_time_s"]["median"]
    assert fused["memory_gb"]["allocated_peak"] < 1.03 * compiled["memory_gb"]["allocated_peak"]


@pytest.mark.exhaustive
def test_an_ablation_finds_that_compiling_pays(tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC)
    asked = ["--only", "compile,chunked_loss", "--repeats", "2", "--steps", "20", "--out", str(tmp_path), "--json"]
    command = [sys.executable, "-m", "ftbench", "ablate", str(path), *asked]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    found = json.loads(ended.stdout)
    assert ended.returncode == 0
    variants = {variant["value"]: variant for variant in found["variants"]}
    assert variants["compile"]["speed_verdict"] == "higher"
    assert variants["compile"]["break_even_steps"] > 1

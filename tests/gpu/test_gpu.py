"""On a GPU: each method and optimization trains, is proven, and its figures hold together: `pytest tests/gpu`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="training libraries are not installed")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine"),
    pytest.mark.timeout(300),
]
SPEC = """
model: {id: Qwen/Qwen3-0.6B, weights: random}
dataset: {name: synthetic, samples: 96, length: 512, max_length: 512}
train: {batch_size: 4}
"""
METHODS = {
    "lora": [],
    "qlora": ["method=qlora"],
    "full": ["method=full"],
    "checkpointing": ["optimizations.gradient_checkpointing=on"],
    "qlora-checkpointing": ["method=qlora", "optimizations.gradient_checkpointing=on"],
    "compile": ["optimizations.compile=on"],
    "fp8": ["optimizations.compile=on", "optimizations.fp8=tensorwise"],
    "fp8-rowwise": ["optimizations.compile=on", "optimizations.fp8=rowwise"],
    "fused-lora": ["optimizations.fused_lora=on"],
    "fused-lora-compile": ["optimizations.fused_lora=on", "optimizations.compile=on", "optimizations.chunked_loss=on"],
    "fused-lora-dynamic": ["optimizations.fused_lora=on", "optimizations.compile=dynamic"],
    "fused-lora-qlora": ["method=qlora", "optimizations.fused_lora=on", "optimizations.gradient_checkpointing=on"],
    "fused-lora-fp8": ["optimizations.fused_lora=on", "optimizations.compile=on", "optimizations.fp8=tensorwise"],
    "cudnn": ["optimizations.attention=cudnn"],
    "cudnn-compile": ["optimizations.attention=cudnn", "optimizations.compile=on"],
    "eager": ["optimizations.attention=eager"],
    "fused": ["train.optimizer=adamw_torch_fused"],
    "paged-8bit": ["train.optimizer=paged_adamw_8bit"],
    "unsloth": ["method=unsloth"],
    "unsloth-lora": ["method={name: unsloth, load_in_4bit: off, use_gradient_checkpointing: off}"],
    "chunked-loss": ["optimizations.chunked_loss=on"],
    "liger": ["optimizations.liger=on"],
    "compile-dynamic": ["optimizations.compile=dynamic", "optimizations.chunked_loss=on"],
    "selective": ["optimizations.gradient_checkpointing=selective"],
    "offload": ["optimizations.activation_offload=on"],
    "padding-free": ["optimizations.padding_free=on"],
    "varlen": ["optimizations.padding_free=on", "optimizations.attention=varlen"],
    "flex": ["optimizations.padding_free=on", "optimizations.attention=flex_attention"],
    "packing": ["optimizations.packing=on", "optimizations.attention=varlen"],
    "gpt-oss": ["model=tiny/gpt-oss", "method.experts=on"],
}
LOSS_TOLERANCE = {"fp8": 0.02, "fp8-rowwise": 0.02, "fused-lora-fp8": 0.02}


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """Runs the spec in its own process, once for each list of changes."""
    folder = tmp_path_factory.mktemp("gpu")
    (folder / "spec.yaml").write_text(SPEC)
    done: dict[tuple[str, ...], tuple[int, dict]] = {}

    def once(*sets: str) -> tuple[int, dict]:
        if sets not in done:
            command = [
                sys.executable,
                "-m",
                "ftbench",
                "run",
                str(folder / "spec.yaml"),
                "--json",
                "--out",
                str(folder / "out"),
            ]
            changes = [part for text in sets for part in ("--set", text)]
            ended = subprocess.run([*command, *changes], stdout=subprocess.PIPE, text=True, env=os.environ)
            done[sets] = ended.returncode, json.loads(ended.stdout)
        return done[sets]

    return once


@pytest.mark.parametrize("name", METHODS)
def test_it_trains_and_every_figure_is_there(run, name):
    code, document = run(*METHODS[name])
    summary = document["summary"]
    assert (code, summary["state"]) == (0, "ok"), summary["reason"]
    assert summary["steps"]["total"] == 24
    assert summary["tokens_per_s"]["real"] > 0
    assert 0 < summary["memory_gb"]["allocated_peak"] <= summary["memory_gb"]["reserved_peak"]
    assert summary["memory_gb"]["reserved_peak"] < summary["memory_gb"]["device_peak"]
    assert summary["energy"]["joules"] > 0
    assert summary["model_tflops"] > 0
    assert summary["mfu"] is None or 0 < summary["mfu"] < 1
    assert not [warning for warning in summary["warnings"] if "wall clock" in warning]


SAME = (
    "checkpointing", "compile", "fp8", "fp8-rowwise", "eager", "fused", "chunked-loss", "liger", "compile-dynamic",
    "selective", "offload", "padding-free", "varlen", "flex", "fused-lora", "fused-lora-compile", "fused-lora-dynamic",
    "fused-lora-fp8", "cudnn", "cudnn-compile",
)  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_an_optimization_learns_what_plain_lora_learns(run, name):
    plain, other = run()[1]["summary"], run(*METHODS[name])[1]["summary"]
    assert plain["dataset"]["order_hash"] == other["dataset"]["order_hash"]
    assert other["loss"]["last"] == pytest.approx(plain["loss"]["last"], rel=LOSS_TOLERANCE.get(name, 0.005))


def test_checkpointing_saves_memory_and_compile_saves_time(run):
    plain = run()[1]["summary"]
    assert (
        run(*METHODS["checkpointing"])[1]["summary"]["memory_gb"]["allocated_peak"]
        < plain["memory_gb"]["allocated_peak"]
    )
    assert run(*METHODS["compile"])[1]["summary"]["step_time_s"]["median"] < plain["step_time_s"]["median"]


def test_fused_lora_saves_time_and_needs_no_more_memory(run):
    compiled = run("optimizations.compile=on", "optimizations.chunked_loss=on")[1]["summary"]
    fused = run(*METHODS["fused-lora-compile"])[1]["summary"]
    assert fused["step_time_s"]["median"] < compiled["step_time_s"]["median"]
    assert fused["memory_gb"]["allocated_peak"] < 1.03 * compiled["memory_gb"]["allocated_peak"]


def test_out_of_memory_is_a_result(run):
    code, document = run("train.batch_size=4096", "dataset.samples=4096", "model=Qwen/Qwen3-0.6B")
    assert code == 1
    summary = document["summary"]
    assert summary["state"] == "oom"
    assert summary["oom"]["kind"] == "allocator"
    assert summary["oom"]["bytes_requested"] > 0
    assert summary["oom"]["step"] == 1
    assert Path(document["run_dir"], "state.json").is_file()

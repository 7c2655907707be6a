"""Full-size models and ablations on a GPU, beyond the tests of each method in gpu/test_gpu.py; most of the
time goes into gpt-oss: `pytest gpu/test_large.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from methods import LARGE, METHODS, ON_GPU, SPEC, why

torch = pytest.importorskip("torch", reason="training libraries are not installed")
pytestmark = [*ON_GPU, pytest.mark.timeout(300)]


MOST_GIB = {
    "small-8b": 7.6,
    "smallest-8b": 3.5,
    "smallest-exact-8b": 4.5,
    "smallest-full-8b": 20.0,
    "smallest-32b": 8.0,
}


@pytest.mark.parametrize("name", MOST_GIB)
def test_a_small_recipe_needs_no_more_than_it_promises(run, name):
    """7.6 is unsloth in 4 bits, b4 x 2,048, on an H200."""
    code, document = run(*LARGE[name])
    assert code == 0, why(document)
    assert document["summary"]["memory_gb"]["allocated_peak"] <= MOST_GIB[name]


def test_an_ablation_finds_that_compiling_pays(tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC)
    asked = ["--only", "compile,chunked_loss", "--repeats", "2", "--steps", "20", "--out", str(tmp_path), "--json"]
    command = [sys.executable, "-m", "ftbench", "ablate", str(path), *asked]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    found = json.loads(ended.stdout)
    assert ended.returncode == 0
    variants = {variant["name"]: variant for variant in found["variants"]}
    assert variants["compile"]["speed_verdict"] == "higher"
    assert variants["compile"]["break_even_steps"] > 1
    assert {variant["learning"] for variant in variants.values()} <= {"follows", "cannot tell"}
    assert found["best"]["changes"]["optimizations.compile"]


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gpt-oss-20b-experts"])
def test_gpt_oss_20b_trains_on_one_card_with_its_experts_in_mxfp4(run, name):
    """About a minute: 12.8 GiB of random weights are made in memory."""
    code, document = run(*LARGE[name])
    summary = document["summary"]
    assert (code, summary["state"]) == (0, "ok"), why(document)
    applied = json.loads((Path(document["run_dir"]) / "applied.json").read_text())
    assert applied["model"]["weights_gb_by_dtype"]["uint8"] == pytest.approx(9.46, abs=0.05)
    assert summary["memory_gb"]["allocated_peak"] < 32
    assert summary["parameters"]["total"] == pytest.approx(20.9e9, rel=0.01)


@pytest.mark.timeout(600)
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.mem_get_info()[1] < 90e9, reason="gpt-oss-120b needs a card of 96 GB"
)
def test_gpt_oss_120b_trains_on_one_card_without_a_download(alone):
    code, document = alone("model=openai/gpt-oss-120b", "method={name: qlora, quant_type: mxfp4}", "dataset.samples=32")
    assert code == 0, why(document)
    assert 60 < document["summary"]["memory_gb"]["allocated_peak"] < 90


def test_fused_lora_saves_time_and_needs_no_more_memory(alone):
    compiled = alone("optimizations.compile=on", "optimizations.chunked_loss=on")[1]["summary"]
    fused = alone(*METHODS["fused-lora-compile"])[1]["summary"]
    assert not [text for each in (compiled, fused) for text in each["warnings"] if "wall clock" in text]
    assert fused["step_time_s"]["median"] < compiled["step_time_s"]["median"]
    assert fused["memory_gb"]["allocated_peak"] < 1.03 * compiled["memory_gb"]["allocated_peak"]

"""Profiles of real training on a GPU. `pytest gpu/test_profile.py`, about three minutes."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from methods import GPU, ON_GPU, SPEC

from ftbench.profile.trace import read
from ftbench.store.rundir import RunDir

torch = pytest.importorskip("torch", reason="training libraries are not installed")
pytestmark = [*ON_GPU, pytest.mark.timeout(300)]
# Steps that the GPU limits: their time does not change if other programs use the CPU.
LONG_STEPS = [
    "model.id=Qwen/Qwen3-1.7B", "train.batch_size=8",
    "dataset={name: synthetic, samples: 112, length: 2048, max_length: 2048}",
]  # fmt: skip
KINDS = {
    "lora": LONG_STEPS,
    "full": ["method=full"],
    "qlora": ["method=qlora"],
    "unsloth": ["method={name: unsloth, load_in_4bit: off, use_gradient_checkpointing: off}"],
    "compiled": ["optimizations.compile=on", "optimizations.chunked_loss=on"],
    "fp8": ["optimizations.compile=on", "optimizations.chunked_loss=on", "optimizations.fp8=tensorwise"],
    "liger": ["optimizations.liger=on"],
    "checkpointing": ["optimizations.gradient_checkpointing=on", "train.gradient_accumulation_steps=2"],
}


def ftbench(command: str, folder: Path, *sets: str) -> tuple[int, dict]:
    spec = folder / "spec.yaml"
    spec.write_text(SPEC)
    changes = [part for text in sets for part in ("--set", text)]
    ended = subprocess.run(
        [sys.executable, "-m", "ftbench", command, str(spec), "--json", "--out", str(folder / "out"), *changes],
        stdout=subprocess.PIPE, text=True, env=os.environ,
    )  # fmt: skip
    return ended.returncode, json.loads(ended.stdout)


FIRST = ("lora",)  # of the ordinary call, which has 9 minutes
CASES = [pytest.param(kind, marks=[pytest.mark.exhaustive] * (kind not in FIRST)) for kind in KINDS]


@pytest.fixture(scope="session")
def profiled(request, tmp_path_factory):
    """Return the run and the printed document of a profile, made once per kind of training. The runs take turns on
    the GPU; their start and end overlap."""

    def made(kind: str) -> tuple[int, dict]:
        more = [*KINDS[kind], *(["dataset.samples=192"] if kind == "checkpointing" else [])]
        return ftbench("profile", tmp_path_factory.mktemp(kind), *more)

    asked = (item.callspec.params.get("kind") for item in request.session.items if hasattr(item, "callspec"))
    kinds = dict.fromkeys(kind for kind in asked if kind in KINDS)
    pool = ThreadPoolExecutor(3)
    begun = {kind: pool.submit(made, kind) for kind in kinds}

    def once(kind: str) -> tuple[RunDir, dict]:
        if kind not in begun:
            begun[kind] = pool.submit(made, kind)
        code, document = begun[kind].result()
        assert code == 0, document["summary"]["reason"]
        return RunDir(Path(document["run_dir"])), document["profile"]

    yield once
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("kind", CASES)
def test_nearly_all_of_the_gpus_time_has_a_group(profiled, kind):
    _, document = profiled(kind)
    others = [kernel["name"] for kernel in document["kernels"] if kernel["group"] == "other"]
    assert document["device"] == "cuda"
    assert document["covered_share"] >= 0.95, others[:10]
    shares = {group["group"]: group["share"] for group in document["groups"]}
    assert shares["matmul"] > 0.1
    assert shares["attention"] > 0.005
    assert shares["loss"] > 0.005
    assert shares["optimizer"] > 0
    assert ("quantise/dequantise" in shares) == (kind in ("qlora", "fp8"))


@pytest.mark.parametrize("kind", CASES)
def test_what_the_gpu_did_was_launched_in_a_phase(profiled, kind):
    run, document = profiled(kind)
    phases = {phase["phase"]: phase["device_ms"] for phase in document["phases"]}
    total = sum(phases.values())
    assert phases.get("other", 0.0) < 0.02 * total
    assert phases["backward"] > phases["optimizer"]
    assert sum(end - begin for begin, end, _ in read(run.profile / "trace.json.gz").phases) == pytest.approx(
        document["window_ms"], rel=0.05
    )


@pytest.mark.parametrize("kind", CASES)
def test_the_gpu_is_busy_for_no_longer_than_a_step_takes(profiled, kind):
    _, document = profiled(kind)
    assert 0 < document["busy_share"] <= 1
    assert document["busy_share"] <= document["busy_share_unprofiled"] * 1.05 <= 1.05
    assert document["gpu"] == GPU["name"]


@pytest.mark.parametrize("kind", CASES)
def test_the_snapshot_of_the_memory_has_the_stacks_of_a_step(profiled, kind):
    """pytorch.org/memory_viz reads these keys."""
    run, _ = profiled(kind)
    found = pickle.loads((run.profile / "memory.pickle").read_bytes())
    events = [entry for entry in found["device_traces"][0] if entry["action"] == "alloc"]
    assert found["segments"]
    assert any(frame["name"] == "forward" for entry in events for frame in entry["frames"])


def test_the_time_before_the_profiler_is_that_of_an_ordinary_run(profiled, tmp_path):
    _, document = profiled("lora")
    code, plain = ftbench("run", tmp_path, *LONG_STEPS)
    assert code == 0
    assert document["step_ms"]["before"] == pytest.approx(plain["summary"]["step_time_s"]["median"] * 1e3, rel=0.15)

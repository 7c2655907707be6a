"""On a GPU: each method and optimization trains, is proven, and its figures hold together: `pytest tests/gpu`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
from methods import METHODS, SHARED, SPEC

torch = pytest.importorskip("torch", reason="training libraries are not installed")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine"),
    pytest.mark.timeout(300),
]
SIDE_BY_SIDE = max(1, min(6, (os.cpu_count() or 1) // 3))
ASKED = "measure.generate={prompts: [{id: a, prompt: 東京は}, {id: b, prompt: Why does ice float}], max_new_tokens: 24}"
LOSS_TOLERANCE = {"fp8": 0.02, "fp8-rowwise": 0.02, "fused-lora-fp8": 0.02}


@pytest.fixture(scope="session")
def train(tmp_path_factory):
    """Runs the spec with changes in its own process: exit code and document."""
    folder = tmp_path_factory.mktemp("gpu")
    (folder / "spec.yaml").write_text(SPEC)

    def started(*sets: str) -> tuple[int, dict]:
        changes = [part for text in sets for part in ("--set", text)]
        command = [sys.executable, "-m", "ftbench", "run", str(folder / "spec.yaml"), "--json", *changes]
        ended = subprocess.run([*command, "--out", str(folder / "out")], stdout=subprocess.PIPE, text=True)
        return ended.returncode, json.loads(ended.stdout)

    return started


@pytest.fixture(scope="session")
def run(request, train):
    """Each list of changes once, several at a time on the same GPU: for everything but speed."""
    pool = ThreadPoolExecutor(SIDE_BY_SIDE)
    asked = dict.fromkeys(sets for item in request.session.items for sets in needed(item))
    begun = {sets: pool.submit(train, SHARED, *sets) for sets in asked}

    def once(*sets: str) -> tuple[int, dict]:
        if sets not in begun:
            begun[sets] = pool.submit(train, SHARED, *sets)
        return begun[sets].result()

    once.rest = lambda: wait(begun.values())
    yield once
    pool.shutdown(cancel_futures=True)


def needed(item: pytest.Item) -> list[tuple[str, ...]]:
    """The lists of changes that a test with a method's name looks at."""
    name = item.callspec.params.get("name") if hasattr(item, "callspec") else None
    if name not in METHODS:
        return []
    return [(), METHODS[name], *([(*METHODS[name], ASKED)] if "answers" in item.name else [])]


@pytest.fixture(scope="session")
def alone(run, train):
    """Each list of changes once, with the GPU to itself."""
    done: dict[tuple[str, ...], tuple[int, dict]] = {}

    def once(*sets: str) -> tuple[int, dict]:
        run.rest()
        if sets not in done:
            done[sets] = train(*sets)
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
    "selective", "offload", "padding-free", "varlen", "flex", "checkpoint-offload", "small-chunks", "fused-lora",
    "fused-lora-compile", "fused-lora-dynamic", "fused-lora-fp8", "cudnn", "cudnn-compile",
)  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_an_optimization_learns_what_plain_lora_learns(run, name):
    plain, other = run()[1]["summary"], run(*METHODS[name])[1]["summary"]
    assert plain["dataset"]["order_hash"] == other["dataset"]["order_hash"]
    assert other["loss"]["last"] == pytest.approx(plain["loss"]["last"], rel=LOSS_TOLERANCE.get(name, 0.005))


GOLDEN = json.loads(Path(__file__).with_name("golden.json").read_text("utf-8"))


@pytest.mark.parametrize("name", GOLDEN["methods"])
def test_it_is_as_it_was_on_the_same_gpu(run, name):
    """golden.json says by which machine and commit it was made; `scripts/golden` makes it."""
    if torch.cuda.get_device_name() != GOLDEN["gpu"]:
        pytest.skip(f"the golden runs were made on {GOLDEN['gpu']}")
    summary, golden = run(*METHODS[name])[1]["summary"], GOLDEN["methods"][name]
    for place in ("first", "last"):
        assert summary["loss"][place] == pytest.approx(golden[f"loss_{place}"], rel=LOSS_TOLERANCE.get(name, 0.001))
    assert summary["memory_gb"]["allocated_peak"] == pytest.approx(golden["allocated_peak_gb"], rel=0.01)
    assert summary["parameters"]["trainable"] == golden["trainable"]


def test_checkpointing_saves_memory(run):
    peaks = [run(*sets)[1]["summary"]["memory_gb"]["allocated_peak"] for sets in (METHODS["checkpointing"], ())]
    assert peaks[0] < peaks[1]


def test_compile_saves_time(alone):
    times = [alone(*sets)[1]["summary"]["step_time_s"]["median"] for sets in (METHODS["compile"], ())]
    assert times[0] < times[1]


def test_checkpoints_in_host_memory_leave_the_gpu_and_change_nothing(run):
    on, away = run(*METHODS["checkpointing"])[1], run(*METHODS["checkpoint-offload"])[1]
    assert away["summary"]["loss"]["last"] == pytest.approx(on["summary"]["loss"]["last"], rel=1e-4)
    moved = json.loads(Path(away["run_dir"], "applied.json").read_text())["checkpoints_moved_gb"]
    one = 4 * 512 * 1024 * 2 / 2**30  # a layer's input: batch x length x width of Qwen3-0.6B in bfloat16
    assert moved == pytest.approx(28 * one, rel=0.01)  # in the first step, after which it is read
    saved = on["summary"]["memory_gb"]["allocated_peak"] - away["summary"]["memory_gb"]["allocated_peak"]
    assert saved > 0.5 * 28 * one


def test_what_is_not_quantised_may_stay_in_16_bits_and_needs_less(run):
    peaks = [run(*METHODS[name])[1]["summary"]["memory_gb"]["allocated_peak"]
             for name in ("qlora-checkpointing", "qlora-16-bit", "recipe-smallest")]  # fmt: skip
    assert peaks == sorted(peaks, reverse=True)


def test_smallest_needs_no_more_than_unsloths_qlora_at_the_same_batch(run):
    shape = ["model=Qwen/Qwen3-8B", "dataset.samples=24", "dataset.length=2048", "dataset.max_length=2048"]
    code, document = run(*shape, "recipe=smallest")
    assert code == 0, document["summary"]["reason"]
    assert document["summary"]["memory_gb"]["allocated_peak"] <= 7.6  # unsloth 4 bit, b4 x 2,048, on an H200


def test_an_ablation_finds_that_compiling_pays(tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC)
    asked = ["--only", "compile,chunked_loss", "--repeats", "2", "--steps", "20", "--out", str(tmp_path), "--json"]
    command = [sys.executable, "-m", "ftbench", "ablate", str(path), *asked]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    found = json.loads(ended.stdout)
    assert ended.returncode == 0
    rungs = {rung["name"]: rung for rung in found["rungs"]}
    assert rungs["compile"]["speed_verdict"] == "higher"
    assert rungs["compile"]["break_even_steps"] > 1
    assert {rung["loss_parity"] for rung in rungs.values()} == {"within"}
    assert found["best"]["changes"]["optimizations.compile"]


@pytest.mark.parametrize("name", ["lora", "qlora", "full", "compile", "fp8", "checkpointing", "varlen", "unsloth"])
def test_answers_change_nothing_in_the_training(run, name):
    plain, (code, asked) = run(*METHODS[name])[1]["summary"], run(*METHODS[name], ASKED)
    assert code == 0, asked["summary"]["reason"]
    found = json.loads((Path(asked["run_dir"]) / "samples.json").read_text("utf-8"))
    assert all(row["before"] is not None and row["after"] is not None for row in found["prompts"])
    assert all(row["tokens"]["before"] > 0 for row in found["prompts"])
    summary = asked["summary"]
    assert summary["loss"]["last"] == pytest.approx(plain["loss"]["last"], rel=1e-3)
    for peak in ("allocated_peak", "reserved_peak"):
        assert summary["memory_gb"][peak] == pytest.approx(plain["memory_gb"][peak], rel=0.02)


def test_answers_take_no_time_from_the_steps(alone):
    times = [alone(*sets)[1]["summary"]["step_time_s"]["median"] for sets in ((ASKED,), ())]
    assert times[0] == pytest.approx(times[1], rel=0.1)


def test_mxfp4_is_written_out_by_one_kernel_as_it_is_step_by_step():
    from torch._dynamo.utils import counters

    from ftbench.worker import mxfp4

    counters.clear()
    for shape in ((32, 5760, 90), (32, 2880, 90), (4, 5760, 90)):
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, device="cuda")
        scales = torch.randint(100, 140, shape, dtype=torch.uint8, device="cuda")
        wide = mxfp4.written_out(blocks, scales, torch.bfloat16)
        assert torch.equal(wide[:2].cpu(), mxfp4.written_out(blocks[:2].cpu(), scales[:2].cpu(), torch.bfloat16))
    assert counters["stats"]["unique_graphs"] <= 2


def test_mxfp4_products_on_the_gpu_are_those_of_the_cpu():
    from ftbench.worker import mxfp4

    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (8, 256, 4, 16), dtype=torch.uint8)
    scales = torch.full((8, 256, 4), 120, dtype=torch.uint8)
    ends = torch.tensor([0, 7, 7, 30, 31, 50, 63, 64], dtype=torch.int32)
    found = []
    for place in ("cpu", "cuda"):
        rows = torch.linspace(-1, 1, 64 * 128).view(64, 128).bfloat16().to(place).requires_grad_()
        result = mxfp4._FrozenProduct.apply(rows, blocks.to(place), scales.to(place), ends.to(place))
        result.float().square().sum().backward()
        found.append((result.detach().cpu().float(), rows.grad.cpu().float()))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02 * float(ours.abs().max()))


@pytest.mark.parametrize("experts", ["off", "on"])
def test_gpt_oss_20b_trains_on_one_card_with_its_experts_in_mxfp4(run, experts):
    """About a minute: 12.8 GiB of random weights are made in memory."""
    method = f"method={{name: qlora, quant_type: mxfp4, experts: {experts}}}"
    code, document = run("model=openai/gpt-oss-20b", method, "dataset.samples=32")
    summary = document["summary"]
    assert (code, summary["state"]) == (0, "ok"), summary["reason"]
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
    assert code == 0, document["summary"]["reason"]
    assert 60 < document["summary"]["memory_gb"]["allocated_peak"] < 90


def test_fused_lora_saves_time_and_needs_no_more_memory(alone):
    compiled = alone("optimizations.compile=on", "optimizations.chunked_loss=on")[1]["summary"]
    fused = alone(*METHODS["fused-lora-compile"])[1]["summary"]
    assert fused["step_time_s"]["median"] < compiled["step_time_s"]["median"]
    assert fused["memory_gb"]["allocated_peak"] < 1.03 * compiled["memory_gb"]["allocated_peak"]


def test_out_of_memory_is_a_result(alone):
    code, document = alone("train.batch_size=4096", "dataset.samples=4096", "model=Qwen/Qwen3-0.6B")
    assert code == 1
    summary = document["summary"]
    assert summary["state"] == "oom"
    assert summary["oom"]["kind"] == "allocator"
    assert summary["oom"]["bytes_requested"] > 0
    assert summary["oom"]["step"] == 1
    assert Path(document["run_dir"], "state.json").is_file()

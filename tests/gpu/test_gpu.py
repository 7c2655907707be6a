"""Each method and optimization trains on a GPU, is verified, and has consistent figures; the least tested ones start
first. About six minutes on an H200 with 16 cores: `pytest gpu/test_gpu.py`, after tests/gpu/test_streams.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from methods import METHODS, ON_GPU, why

from ftbench.store.steps import read_steps

torch = pytest.importorskip("torch", reason="training libraries are not installed")
pytestmark = [*ON_GPU, pytest.mark.timeout(300)]
LOSS_TOLERANCE = {"fp8": 0.02, "fp8-rowwise": 0.02, "fused-lora-fp8": 0.02, "fused-lora-fp8-fast": 0.02,
                  "kernels-fp8": 0.02}  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_it_trains_and_every_figure_is_there(run, name):
    code, document = run(*METHODS[name])
    summary = document["summary"]
    assert (code, summary["state"]) == (0, "ok"), why(document)
    assert summary["steps"]["total"] == 24
    assert summary["tokens_per_s"]["real"] > 0
    assert 0 < summary["memory_gb"]["allocated_peak"] <= summary["memory_gb"]["reserved_peak"]
    assert summary["memory_gb"]["reserved_peak"] < summary["memory_gb"]["device_peak"]
    assert summary["energy"]["joules"] > 0
    assert summary["model_tflops"] > 0
    assert summary["mfu"] is None or 0 < summary["mfu"] < 1


SAME = (
    "checkpointing", "compile", "fp8", "fp8-rowwise", "eager", "fused", "chunked-loss", "liger", "compile-dynamic",
    "selective", "offload", "padding-free", "varlen", "flex", "checkpoint-offload", "small-chunks", "fused-lora",
    "weight-offload", "weight-offload-chunked", "fused-lora-compile", "fused-lora-dynamic",
    "fused-lora-fp8", "fused-lora-fp8-fast", "cudnn",
    "cudnn-compile", "kernels", "kernels-compile", "kernels-checkpointing", "kernels-fp8",
)  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_an_optimization_learns_what_plain_lora_learns(run, name):
    plain, other = run()[1]["summary"], run(*METHODS[name])[1]["summary"]
    assert plain["dataset"]["order_hash"] == other["dataset"]["order_hash"]
    assert other["loss"]["last"] == pytest.approx(plain["loss"]["last"], rel=LOSS_TOLERANCE.get(name, 0.005))


PAIRS = {
    "recipe-fastest-small": "recipe-fastest",  # replayed and not
    "kernels-fastest": "recipe-fastest", "kernels-qlora": "qlora",
    "experts-fused": "experts", "gpt-oss-varlen": "gpt-oss-attention", "gpt-oss-flex": "gpt-oss-attention",
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_it_learns_what_the_same_without_it_learns(run, name):
    plain, other = run(*METHODS[PAIRS[name]])[1]["summary"], run(*METHODS[name])[1]["summary"]
    assert plain["dataset"]["order_hash"] == other["dataset"]["order_hash"]
    for place in ("first", "last"):
        assert other["loss"][place] == pytest.approx(plain["loss"][place], rel=0.005)


@pytest.mark.parametrize(("name", "batches", "compiled"), [
    ("unsloth-unequal", "padding-free", 0), ("unsloth-padded", "padded", 28), ("unsloth-graphs", "padded", 28),
    ("unsloth-packing", "packed", 0),
])  # fmt: skip
def test_unsloth_chooses_its_batches_and_each_step_has_the_loss_of_lora(run, name, batches, compiled):
    document = run(*METHODS[name])[1]
    found = json.loads(Path(document["run_dir"], "applied.json").read_text())["unsloth"]
    assert (found["batches"], found["compiled_layers"]) == (batches, compiled)
    assert found["cuda_graph_shapes"] == (name == "unsloth-graphs")
    if not name.endswith(("unequal", "padded")):
        return
    plain = run(*METHODS["lora-unequal"])[1]
    rows = [read_steps(Path(each["run_dir"], "steps.csv"))[0] for each in (plain, document)]
    for one, two in zip(*rows, strict=True):
        assert two.loss == pytest.approx(one.loss, rel=0.005)
        assert (two.real_tokens, two.label_tokens) == (one.real_tokens, one.label_tokens)


def test_every_step_is_a_replay_of_one_graph(run):
    document = run(*METHODS["recipe-fastest-small"])[1]
    applied = json.loads(Path(document["run_dir"], "applied.json").read_text())
    assert applied["cuda_graph_replays"] == document["summary"]["steps"]["total"]


GOLDEN = json.loads(Path(__file__).with_name("golden.json").read_text("utf-8"))


@pytest.mark.parametrize("name", GOLDEN["methods"])
def test_it_is_as_it_was_on_the_same_gpu(run, name):
    """golden.json names its machine and commit; `scripts/golden` makes it."""
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


def test_checkpoints_in_host_memory_leave_the_gpu_and_change_nothing(run):
    on, away = run(*METHODS["checkpointing"])[1], run(*METHODS["checkpoint-offload"])[1]
    assert away["summary"]["loss"]["last"] == pytest.approx(on["summary"]["loss"]["last"], rel=1e-4)
    moved = json.loads(Path(away["run_dir"], "applied.json").read_text())["checkpoints_moved_gb"]
    one = 4 * 512 * 1024 * 2 / 2**30  # a layer's input: batch x length x width of Qwen3-0.6B in bfloat16
    assert moved == pytest.approx(28 * one, rel=0.01)  # in the first step, which is read afterwards
    saved = on["summary"]["memory_gb"]["allocated_peak"] - away["summary"]["memory_gb"]["allocated_peak"]
    assert saved > 0.5 * 28 * one


@pytest.mark.parametrize(
    ("there", "away"),
    [
        ("checkpointing", "weight-offload"),
        ("full-unclipped", "full-in-backward"),
        ("full-in-backward", "full-states-away"),
    ],
)
def test_what_waits_in_host_memory_or_steps_earlier_changes_nothing_and_needs_less(run, there, away):
    """The same kernels on the same numbers in another run: norms of the first three steps agree within bfloat16
    rounding. Later, sums in random order drift apart, the norm first: two equal runs had one step of 24 with norms
    1.2 % apart, and losses within 4e-5."""
    one, other = (run(*METHODS[name])[1] for name in (there, away))
    rows = [
        [(row.loss, row.grad_norm) for row in read_steps(Path(each["run_dir"], "steps.csv"))[0]]
        for each in (one, other)
    ]
    for step, ((loss, norm), (other_loss, other_norm)) in enumerate(zip(*rows, strict=True)):
        assert other_loss == pytest.approx(loss, rel=1e-4)
        assert step > 2 or other_norm == pytest.approx(norm, rel=2**-8)
    peaks = [each["summary"]["memory_gb"]["allocated_peak"] for each in (one, other)]
    assert peaks[1] < peaks[0]


def test_of_weights_in_host_memory_two_layers_are_on_the_gpu(run):
    away = run(*METHODS["weight-offload"])[1]
    applied = json.loads(Path(away["run_dir"], "applied.json").read_text())
    assert applied["weight_buffers_gb"] == pytest.approx(2 * 15.7e6 * 2 / 2**30, rel=0.02)  # of Qwen3-0.6B


def test_what_is_not_quantised_may_stay_in_16_bits_and_needs_less(run):
    peaks = [run(*METHODS[name])[1]["summary"]["memory_gb"]["allocated_peak"]
             for name in ("qlora-checkpointing", "qlora-16-bit", "recipe-small", "recipe-smallest")]  # fmt: skip
    assert peaks == sorted(peaks, reverse=True)


def test_out_of_memory_is_a_result(alone):
    code, document = alone("train.batch_size=4096", "dataset.samples=4096", "model=Qwen/Qwen3-0.6B")
    assert code == 1
    summary = document["summary"]
    assert summary["state"] == "oom"
    assert summary["oom"]["kind"] == "allocator"
    assert summary["oom"]["bytes_requested"] > 0
    assert summary["oom"]["step"] == 1
    assert Path(document["run_dir"], "state.json").is_file()

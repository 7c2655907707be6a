"""Compare the time estimate with committed runs: its counts, its errors and its explanations."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftbench.core import units
from ftbench.core.hardware import Gpu, capability_of, find_gpu, gpus, limited_gpu
from ftbench.errors import SpecError
from ftbench.estimate import api
from ftbench.estimate.memory.largest_batch import with_batch
from ftbench.estimate.time import rates
from ftbench.estimate.time.duration import (
    FLUSHES,
    FORMULA,
    MEASURED,
    SHEET,
    DurationEstimate,
    estimate_duration,
    host_slowdown,
)
from ftbench.estimate.time.history import RunHistory, TimedRun, step_key, timed_runs
from ftbench.estimate.time.rates import shipped_coefficients, step
from ftbench.estimate.time.work import StepWork, step_work
from ftbench.estimate.workload.batches import batches_of, epochs_samples, per_step
from ftbench.estimate.workload.lengths import lengths_of
from ftbench.estimate.workload.model import trainable_shape
from ftbench.facts import read_facts
from ftbench.spec.experiment import Experiment, resolve
from ftbench.spec.load import load
from ftbench.store import machine, rundir
from ftbench.store.steps import read_steps
from ftbench.sweep import dry_run
from made_runs import OOM, make_run, steps

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import time_estimates as study

MEASURED_ALIKE = r"measured \(same step, same GPU, \d+ runs\)"
RESULTS = Path(__file__).resolve().parents[2] / "results" / "h200"
STORES = study.STORES
H200 = find_gpu("NVIDIA H200")
assert H200 is not None


@cache
def committed() -> list[TimedRun]:
    return timed_runs(STORES)


def named(name: str) -> Gpu:
    return next(gpu for gpu in gpus() if gpu.name == name)


def spec_of(**parts: Any) -> Experiment:
    values = {"name": "x", "model": {"id": "Qwen/Qwen3-8B", "weights": "random"}, "method": {"name": "lora"},
              "dataset": {"name": "synthetic", "samples": 64, "length": 2048},
              "train": {"precision": "bf16"}}  # fmt: skip
    return Experiment.model_validate({**values, **parts})


def estimate(gpu: Gpu = H200, store: RunHistory | None = None, **parts: Any) -> DurationEstimate:
    return estimate_duration(spec_of(**parts), gpu, store)


@pytest.fixture(scope="module")
def store() -> RunHistory:
    return RunHistory(None, committed())


# --- counts compared with runs --------------------------------------------------------------------------------------


def test_products_from_a_config_equal_those_of_the_live_model():
    applied = {path.parent.name: path for store in STORES for path in store.rglob("applied.json")}
    for run in committed():
        if run.spec.launch.strategy == "pp":
            continue
        told = rundir.read_json(applied[run.run_id.split("/")[1]])["matmul_shape"]
        told = {key: tuple(value) if isinstance(value, list) else value for key, value in told.items()}
        counted = trainable_shape(run.spec).matmul
        norms = 0.0001 * counted.base  # the worker counts by dimensions, which does not work for 4-bit weights
        assert abs(counted.base - told.pop("base")) <= norms, run.run_id
        assert {key: getattr(counted, key) for key in told} == told, run.run_id


@pytest.mark.parametrize("name", ["qwen3-8b-lora-b4-505a964c-r1", "qwen3-8b-lora-b4-7f0e1e9b6606-r1",
                                  "qwen3-8b-lora-b4-db74a4093b1a-r1", "qwen3-8b-lora-b4-a4000c105967-r1"])  # fmt: skip
def test_batches_of_each_layout_hold_the_tokens_of_runs(name):
    path = next(RESULTS.rglob(name))
    rows, _ = read_steps(path / "steps.csv")
    spec = Experiment.model_validate({k: v for k, v in json.loads((path / "spec.json").read_text()).items()
                                      if k in Experiment.model_fields})  # fmt: skip
    batches = batches_of(spec, lengths_of(spec.dataset))
    size = spec.train.batch_size
    whole = (
        rows if spec.optimizations.packing is False else [r for r in rows if (r.padded_tokens or 0) > 2048 * (size - 1)]
    )
    for field, column in (("positions", "padded_tokens"), ("real", "real_tokens"), ("samples", "samples")):
        measured = sum(getattr(row, column) for row in whole) / len(whole)
        assert per_step(spec, batches, field) == pytest.approx(measured, rel=1e-6), field


def test_checkpointing_repeats_dequantization_and_forward_pass():
    def work(again: bool) -> Any:
        spec = spec_of(method={"name": "qlora"}, optimizations={"gradient_checkpointing": again})
        return step_work(spec, trainable_shape(spec), batches_of(spec, lengths_of(spec.dataset))).groups[0][1]

    plain, checkpointed = work(False), work(True)
    assert checkpointed["dequantise"] == 1.5 * plain["dequantise"]
    layers = plain["products"] - 6 * 2048 * 4 * trainable_shape(spec_of()).matmul.head
    again = checkpointed["products"] - plain["products"]
    assert again == pytest.approx(
        layers / 2, rel=0.01
    )  # a forward pass is a third of LoRA's 2 N + 2 N, and a half more


def _work(**parts: Any) -> Any:
    spec = resolve(spec_of(**parts), (9, 0))
    return step_work(spec, trainable_shape(spec), batches_of(spec, lengths_of(spec.dataset))).groups[0][1]


def test_chunked_loss_has_two_head_products_and_trl_three():
    ours, theirs = (_work(optimizations={"chunked_loss": on}) for on in (True, False))
    head = 2 * 2047 * 4 * trainable_shape(spec_of()).matmul.head
    assert theirs["products"] - ours["products"] == pytest.approx(head, rel=1e-3)


def test_fused_adapters_read_activations_less_often():
    """kernels/adapter_products.py counts 91.5 passes of peft, 35 of `augmented` and 70 of `separate`."""
    term = "elementwise.compiled"
    peft = _work(optimizations={"compile": True})[term]
    fused = _work(optimizations={"compile": True, "fused_lora": True})[term]
    beside = _work(optimizations={"compile": True, "fused_lora": True, "fp8": "tensorwise"})[term]
    assert (peft - fused) / (peft - beside) == pytest.approx((91.5 - 35) / (91.5 - 70))


def test_offloaded_checkpoints_cross_the_link_twice():
    moved = {name: amount for name, amount in _work(optimizations={"gradient_checkpointing": "offload"}).items()
             if name.startswith("offload")}  # fmt: skip
    assert moved == {"offload.checkpoints": 2 * 2 * 4096 * 36 * 4 * 2048}


def test_16_bit_activations_are_not_moved_in_float32():
    assert "elementwise.float32" in _work(method={"name": "qlora"})
    assert "elementwise.float32" not in _work(method={"name": "qlora", "upcast": False})


def test_mxfp4_experts_are_dequantized_for_each_product():
    published = {"name": "qlora", "quant_type": "mxfp4"}
    model = {"id": "openai/gpt-oss-20b", "weights": "random"}
    plain, again = (
        _work(model=model, method=published, optimizations={"gradient_checkpointing": on}) for on in (False, True)
    )
    assert plain["dequantise.mxfp4"] == 2 * 24 * 32 * 3 * 2880 * 2880 * (4.25 / 8 + 2)
    assert again["dequantise.mxfp4"] == 1.5 * plain["dequantise.mxfp4"]
    assert "dequantise" not in plain


@pytest.mark.parametrize("again", [False, True])
def test_gpt_oss_uses_eager_attention_by_default(again):
    """transformers does not support sdpa with sinks: `auto` is eager."""
    model = {"id": "openai/gpt-oss-20b", "weights": "random"}

    def work(length: int, attention: str) -> Any:
        on = {"attention": attention, "gradient_checkpointing": again}
        data = {"name": "synthetic", "samples": 64, "length": length}
        return _work(model=model, dataset=data, train={"batch_size": 8192 // length}, optimizations=on)

    assert work(2048, "auto") == work(2048, "eager")
    assert not [name for name in work(2048, "auto") if name.startswith("attention")]
    scores = 8192 * (2048 - 1024) * 64 * 24  # of as many positions in longer rows there are more
    more = work(2048, "auto")["elementwise.eager"] - work(1024, "auto")["elementwise.eager"]
    assert more == pytest.approx(40 * scores * (4 / 3 if again else 1))


def test_fused_adamw_is_faster_than_foreach_and_8_bit_states():
    """results/h200/grid, full training of Qwen3-0.6B: 3.1 ms against 7.0 and 28 (`optimizer_s`)."""

    def update(name: str) -> Any:
        return estimate(model={"id": "Qwen/Qwen3-0.6B"}, method={"name": "full"},
                        train={"precision": "bf16", "optimizer": name}).parts  # fmt: skip

    fused, plain = update("adamw_torch_fused")["optimizer.fused"], update("adamw_torch")["optimizer"]
    assert fused < plain < update("adamw_bnb_8bit")["optimizer.8bit"]


def test_delayed_scaling_reads_inputs_once():
    """Two bytes read and one written. With the maximum of the same step, torch's kernels move eight."""
    now, before = (_work(optimizations={"compile": True, "fp8": fp8}) for fp8 in ("tensorwise", "tensorwise-delayed"))
    assert before["casts"] == pytest.approx(3 / 8 * now["casts"])
    assert {**before, "casts": 0} == {**now, "casts": 0}


def test_full_training_computes_three_products_in_8_bits_and_casts_weights():
    exact, short = (_work(method={"name": "full"}, optimizations={"compile": True, "fp8": fp8})
                    for fp8 in ("off", "tensorwise"))  # fmt: skip
    assert short["products"] + short["products.fp8"] == pytest.approx(exact["products"])
    assert short["products"] < 0.3 * exact["products"]  # the head
    lora = _work(optimizations={"compile": True, "fp8": "tensorwise"})
    assert short["products.fp8"] == pytest.approx(1.5 * lora["products.fp8"])
    assert short["casts"] > 8 / 5 * lora["casts"]


def test_triton_kernels_have_their_own_rate():
    ours = _work(optimizations={"compile": True, "fused_lora": True, "triton_kernels": True})
    assert "elementwise.triton" in ours
    assert "elementwise.compiled" not in ours


# --- how wrong it is -------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_committed_steps_are_estimated_without_their_own_runs_within_bounds(store):
    rows = study.left_out(store, coefficients_of=study.fit)
    mean, worst = study.errors_of(rows)
    assert len(rows) >= 110
    assert mean <= 0.07
    assert worst <= 0.46  # unsloth with short samples, on the slowest host
    assert max(abs(row.error) for row in rows if row.bound == "GPU") <= 0.25
    assert sum(abs(row.error) <= 0.2 for row in rows) >= 0.95 * len(rows)
    assert sum(row.is_inside for row in rows) >= 0.9 * len(rows)


@pytest.mark.exhaustive
def test_unseen_methods_and_optimizations_stay_within_bounds(store):
    mean, worst = study.errors_of(study.left_out(store, study.same_settings, study.fit))
    assert mean <= 0.1
    assert worst <= 0.46
    unseen_models = study.left_out(store, study.same_model, study.fit)
    texts = study.text_study(shipped_coefficients())
    every = [*unseen_models, *(row for part in texts for row in part if row.bound != "GPU")]
    assert 0.85 <= study.coverage(every) <= 0.97
    spreads = study.spreads(every) | study.start_spreads([*unseen_models, *texts[0]])
    assert spreads == pytest.approx(read_facts("durations.yaml")["spread"], abs=1e-3)


def test_the_page_on_estimates_states_the_speed_of_the_hosts():
    """The fifth machine has 16 cores."""
    found = [(run, estimate_duration(run.spec, study.GPUS[run.gpu])) for run in timed_runs(study.TEXT_STUDY)]
    slow = [run.step_s / told.step_s.expected for run, told in found if told.bound == "host" and run.cpu[1] > 16]
    text = (study.ROOT / "docs/explanation/estimates.md").read_text("utf-8")
    assert f"launch-bound steps took {min(slow):.1f} to {max(slow):.1f} times the estimated time" in text


def test_the_shipped_coefficients_are_those_of_the_committed_runs(store):
    fitted = study.fitted(store)
    assert {name: term.value for name, term in fitted.items()} == pytest.approx(shipped_coefficients(), rel=1e-3)
    assert sorted(read_facts("durations.yaml")["runs"]) == sorted(each.run.run_id for each in study.observations(store))


def test_the_parts_of_a_step_add_up(store):
    seen = study.observations(store)
    assert len(seen) > 100
    for each in seen:
        found = step(each.ideal, shipped_coefficients())
        assert sum(found.parts.values()) == pytest.approx(found.seconds)


def test_gpu_and_host_overlap_only_in_part_and_images_are_processed_first():
    work = StepWork(((1.0, {"products": 3.0, "host": 3.0, "images": 1.0}),), 1, {"optimizer": 1.0})
    found = step(work, dict.fromkeys(("products", "host", "images", "optimizer"), 1.0))
    assert (found.device, found.host, found.seconds) == (4, 4, pytest.approx(3 * 2 ** (1 / 3) + 1 + 1))
    assert found.parts["images"] == found.parts["optimizer"] == 1
    fast = step(work, {"products": 1.0, "host": 0.1, "images": 1.0, "optimizer": 1.0})
    assert fast.seconds == pytest.approx(3 + 1 + 1, rel=1e-3)
    assert not step(work, {"products": 1.0, "host": 0.8, "images": 2.0, "optimizer": 1.0}).host_bound  # 4 s on the GPU


def test_operations_of_compiled_layers_with_varying_shapes_and_of_fp8():
    def host(**parts: Any) -> float:
        return _work(**parts)["host"]

    fixed = {"name": "synthetic", "samples": 64, "length": 512}
    varying = {"name": "synthetic", "samples": 64, "mean_length": 512}
    on, short = {"compile": True}, {"compile": True, "fp8": "tensorwise"}
    steady = host(dataset=fixed, optimizations=on)
    assert host(dataset=varying, optimizations=on) == pytest.approx(1.5 * steady, rel=0.1)
    assert host(dataset=fixed, optimizations=short) > 1.1 * steady
    pictures = [_work(model={"id": "Qwen/Qwen3-VL-8B-Instruct", "weights": "random"}, optimizations=on,
                      dataset={"name": "images", "samples": 64, "length": 40, "image_size": [500, 500],
                               "image_sizes": sizes})["host"] for sizes in ("fixed", "photographs")]  # fmt: skip
    assert pictures[1] > 1.2 * pictures[0]  # images have different numbers of tokens


# --- basis and range -------------------------------------------------------------------------------------------------


def test_a_measured_step_is_reported_as_measured(store):
    run = next(run for run in committed() if run.run_id.endswith("78939b22-r1"))
    found = estimate_duration(run.spec, H200, store)
    assert found.basis == MEASURED
    assert re.fullmatch(MEASURED_ALIKE, found.confidence)
    assert found.step_s.expected == pytest.approx(run.step_s, rel=0.01)
    longer = run.spec.model_copy(update={"dataset": run.spec.dataset.model_copy(update={"samples": 100_000})})
    assert estimate_duration(longer, H200, store).basis == MEASURED  # how long is trained does not change a step


def test_the_range_widens_as_less_is_known(store):
    known = {
        MEASURED: estimate_duration(committed()[0].spec, H200, store),
        FORMULA: estimate(store=store, train={"batch_size": 3, "precision": "bf16"}),
        SHEET: estimate(named("RTX 5090"), store),
    }
    assert [found.basis for found in known.values()] == list(known)
    widths = [round(found.step_s.high / found.step_s.low, 6) for found in known.values()]
    assert widths == sorted(widths)
    assert known[FORMULA].confidence.startswith("formulas fitted to ftbench's runs on this GPU")
    assert known[SHEET].confidence.endswith(", and formulas fitted to runs on H200 SXM")


def test_a_mixture_of_experts_has_a_wide_range(store):
    found = estimate(store=store, model={"id": "Qwen/Qwen3-30B-A3B"})
    assert found.basis == SHEET
    assert "no run measured this step of a mixture of experts" in found.confidence


def test_other_gpus_short_and_failed_runs_are_ignored(tmp_path):
    make_run(tmp_path, "other", machine={"gpu.name": "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"})
    make_run(tmp_path, "short", steps(5, noise=0.5))
    make_run(tmp_path, "few", steps(5), machine={"gpu.name": "NVIDIA L40S"})  # few steps that agree are enough
    make_run(tmp_path, "single", steps(2))
    make_run(tmp_path, "failed", state={"state": "error", "reason": "x"})
    make_run(tmp_path, "mock", spec={"launch.mock": "ok"})
    kept = RunHistory.read(tmp_path)
    assert [run.run_id for run in kept.runs] == ["qwen3-8b-lora/few", "qwen3-8b-lora/other"]
    assert kept.runs[0].step_s == pytest.approx(1.0, rel=0.01)
    assert estimate_duration(kept.runs[1].spec, H200, kept).basis == FORMULA
    assert estimate_duration(kept.runs[1].spec, named("RTX PRO 6000 Blackwell Max-Q"), kept).basis == MEASURED


def test_only_the_summary_of_a_failed_run_is_read(tmp_path, monkeypatch):
    make_run(tmp_path, "failed", state=OOM)
    opened, read = [], rundir.read_bytes
    monkeypatch.setattr(rundir, "read_bytes", lambda path: opened.append(path.name) or read(path))
    assert timed_runs([tmp_path]) == []
    assert opened == ["summary.json"]


def test_runs_apply_to_gpus_with_the_same_power_limit(tmp_path):
    make_run(tmp_path, "lowered", machine={"gpu.power_limit_w": 450.0})
    kept = RunHistory.read(tmp_path)
    lowered = limited_gpu({"name": "NVIDIA H200", "power_limit_w": 450.0})
    assert estimate_duration(kept.runs[0].spec, H200, kept).basis == FORMULA
    assert estimate_duration(kept.runs[0].spec, lowered, kept).basis == MEASURED


def test_damaged_runs_are_skipped(tmp_path):
    run = make_run(tmp_path, "real")
    for name in ("summary", "spec_json", "machine"):
        broken = make_run(tmp_path, name)
        getattr(broken, name).write_bytes(b"\xff{")
    for part, changes in (
        ("summary", {"steps": []}),
        ("summary", {"step_time_s": {"mean": "fast"}}),
        ("summary", {"phases_s": 3}),
        ("summary", {"gpu": 7}),
        ("spec_json", {"imported": "x.csv"}),
    ):
        odd = make_run(tmp_path, f"odd-{next(iter(changes))}")
        path = getattr(odd, part)
        path.write_text(json.dumps(rundir.read_json(path) | changes))
    (tmp_path / "probe").mkdir()
    for place, content in enumerate(
        ("[]", '{"machine": []}', '{"machine": {"gpu": {"name": "NVIDIA H200"}}, "products": 3}')
    ):
        (tmp_path / "probe" / f"{place}.json").write_text(content)
    assert estimate(store=RunHistory.read(tmp_path)).step_s.expected > 0
    assert [known.run_id.split("/")[1] for known in RunHistory.read(tmp_path).runs] == ["machine", run.run_id]


def test_a_probe_replaces_the_published_ceiling(tmp_path):
    document = {"device": {"kind": "cuda"}, "machine": {"gpu": {"name": "NVIDIA H200"}},
                "products": {"bf16": {"best_tflops": 395.0}, "fp32": {"best_tflops": 51.0}}}  # fmt: skip
    (tmp_path / "probe").mkdir()
    (tmp_path / "probe" / "h200.json").write_text(json.dumps(document))
    probed, published = estimate(store=RunHistory.read(tmp_path)), estimate()
    assert probed.parts["products"] == pytest.approx(2 * published.parts["products"], rel=0.02)
    assert "measured by `ftbench probe`" in probed.confidence
    slow = estimate(store=RunHistory.read(tmp_path), train={"precision": "fp32"})
    assert slow.parts["products"] > probed.parts["products"]
    with pytest.raises(SpecError, match=r"in fp32 is not known: run `ftbench probe`"):
        estimate(train={"precision": "fp32"})


@pytest.mark.usefixtures("few_ways")
def test_a_card_without_bf16_is_estimated_in_the_precision_that_the_error_names(ftbench):
    cards = ",".join(gpu.name for gpu in gpus() if gpu.bf16 is None)
    question = ("Qwen/Qwen3-0.6B", "--length", 100, "--gpu", cards)
    code, _, err = ftbench("recommend", *question)
    assert code != 0
    assert "in fp32 is not known: set train.precision to fp16, or run `ftbench probe`" in err
    for command in ("estimate", "recommend"):
        code, out, _ = ftbench(command, *question, "--set", "train.precision=fp16", "--json")
        assert code == 0
        assert all(name in out for name in cards.split(","))
        assert "is not known" not in out


def test_a_slow_host_makes_launch_bound_steps_longer(tmp_path):
    short = {"dataset": {"name": "synthetic", "samples": 64, "length": 64}, "train": {"batch_size": 1}}

    def on_host(launch_us: float) -> DurationEstimate:
        document = {"device": {"kind": "cuda"}, "machine": {"gpu": {"name": "NVIDIA H200"}}, "launch_us": launch_us}
        (folder := tmp_path / f"{launch_us}" / "probe").mkdir(parents=True)
        (folder / "h200.json").write_text(json.dumps(document))
        return estimate(store=RunHistory.read(folder.parent), **short)

    fast, slow = on_host(6.26), on_host(12.52)
    assert fast.bound == slow.bound == "host"
    assert slow.parts["host"] == pytest.approx(2 * fast.parts["host"], rel=1e-3)
    assert fast.step_s.expected == pytest.approx(estimate(**short).step_s.expected)


def test_lengths_come_from_runs_then_facts_then_the_upper_bound():
    alpaca = spec_of(dataset={"name": "alpaca", "max_length": 256}).dataset
    recorded = rundir.read_json(next(RESULTS.rglob("qwen3-8b-lora-b4-505a964c-r1")) / "summary.json")["dataset"]
    runs = [(spec_of(dataset={"name": "alpaca", "max_length": 2048}).dataset, recorded)]
    whole = lengths_of(runs[0][0], runs)
    assert whole.mean == pytest.approx(recorded["tokens"]["mean"], rel=0.01)
    assert max(whole.values) == pytest.approx(recorded["tokens"]["max"], rel=0.06)
    assert max(lengths_of(alpaca, runs).values) <= 256
    facts = lengths_of(spec_of(dataset={"name": "japanese-alpaca"}).dataset)
    assert facts.mean == pytest.approx(117, rel=0.02)
    unknown = lengths_of(alpaca)
    assert (unknown.mean, unknown.upper_bound) == (256, True)
    assert estimate(dataset={"name": "alpaca"}).upper_bound


# --- what must hold for any ------------------------------------------------------------------------------------------


_WITH_BF16 = [gpu.name for gpu in gpus() if gpu.bf16]  # older cards do not support it


@settings(max_examples=50)
@given(st.sampled_from(_WITH_BF16), st.sampled_from(["lora", "qlora", "full", "unsloth"]), st.integers(1, 65536),
       st.integers(2, 8192), st.booleans())  # fmt: skip
def test_step_time_grows_with_the_batch_and_is_finite(gpu, method, batch, length, again):
    def step(size: int) -> DurationEstimate:
        return estimate(
            named(gpu), method={"name": method}, train={"batch_size": size, "precision": "bf16"},
            dataset={"name": "synthetic", "samples": 10**12, "length": length, "max_length": 8192},
            optimizations={"gradient_checkpointing": again and method != "unsloth"},
        )  # fmt: skip

    small, large = step(max(1, batch // 2)), step(batch)
    assert 0 < small.step_s.expected <= large.step_s.expected < float("inf")
    assert large.step_s.low < large.step_s.expected < large.step_s.high
    assert 0 < large.watts.low <= large.watts.expected <= large.watts.high <= named(gpu).watts
    assert large.samples_in(large.seconds_for(5e6).expected).expected == pytest.approx(5e6)


def test_launch_bound_runs_give_the_speed_of_the_host():
    def short(batch: int) -> dict[str, Any]:
        return {"dataset": {"name": "synthetic", "samples": 64, "length": 32}, "train": {"batch_size": batch}}

    runs = []
    for batch in (2, 3, 4):
        spec = resolve(spec_of(**short(batch)), capability_of(H200))
        run = replace(
            committed()[0], run_id=str(batch), spec=spec, key=step_key(spec), gpu=H200.name, launch_bound=True
        )
        runs.append(replace(run, step_s=2 * estimate(**short(batch)).step_s.expected))
    three, two = RunHistory(None, runs), RunHistory(None, runs[:2])
    alone, slow = estimate(**short(1)), estimate(store=three, **short(1))
    assert alone.bound == slow.bound == "host"
    assert slow.step_s.expected == pytest.approx(2 * alone.step_s.expected, rel=0.02)
    assert slow.step_s.high / slow.step_s.expected < alone.step_s.high / alone.step_s.expected
    assert slow.confidence.endswith("; the speed of the CPU from 3 launch-bound runs")
    assert estimate(store=two, **short(1)) == alone
    faster = [replace(run, run_id=f"fast {run.run_id}", step_s=run.step_s / 2) for run in runs]
    both = estimate(store=RunHistory(None, [*runs, *faster]), **short(1))
    assert both.step_s.high / both.step_s.expected == pytest.approx(alone.step_s.high / alone.step_s.expected, rel=0.01)
    assert both.confidence.endswith("from 6 launch-bound runs, whose speeds differ")
    assert estimate(named("H100 SXM5"), three, **short(1)) == estimate(named("H100 SXM5"), **short(1))
    assert 1 < estimate(store=three).step_s.expected / estimate().step_s.expected < 1.1, "the GPU limits the speed"


def test_launch_bound_runs_of_other_models_give_the_speed_of_the_host():
    spec, gpu = spec_of(model={"id": "meta-llama/Llama-3.1-8B", "weights": "random"}), named("H100 SXM5")
    slowdown, runs, limit = host_slowdown(RunHistory.read(study.TEXT_STUDY[0], spec, [gpu.name]), gpu)
    assert slowdown == pytest.approx(2.3, abs=0.1)
    assert (runs >= 15, limit) == (True, "known host")
    assert host_slowdown(RunHistory.read(study.TEXT_STUDY[0], spec, [H200.name]), H200) == (1.0, 0, "host")


def test_runs_in_the_default_folder_give_the_speed_of_their_own_cpu_only(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").symlink_to(study.TEXT_STUDY[0])
    spec, gpu = spec_of(), named("H100 SXM5")
    other, same_folder = (host_slowdown(RunHistory.read(path, spec, [gpu.name]), gpu)
                          for path in (Path("results"), tmp_path / "results"))  # fmt: skip
    cpu = rundir.read_json(next(study.TEXT_STUDY[0].rglob("machine.json")))["cpu"]
    monkeypatch.setattr(machine, "cpu", lambda: cpu)
    own = host_slowdown(RunHistory.read(Path("results"), spec, [gpu.name]), gpu)
    assert (other, same_folder, own[0] > 2) == ((1.0, 0, "host"), (1.0, 0, "host"), True)


def test_the_range_includes_slow_and_fast_hosts():
    """A slow host may limit a step even if the GPU is expected to. A fast host does not make the GPU faster."""

    def short(length: int) -> DurationEstimate:
        data = {"name": "synthetic", "samples": 64, "length": length}
        return estimate(dataset=data, train={"batch_size": 4}, optimizations={"compile": True})

    bands = [short(length).step_s for length in range(64, 1024, 64)]
    assert [short(64).bound, short(1024).bound] == ["host", "GPU"]
    assert all(one.high <= more.high and one.low <= more.low for one, more in pairwise(bands))
    assert bands[0].high > 2.4 * bands[0].expected


@pytest.mark.parametrize(("gpu", "gbs"), [("RTX 4090", 25), ("RTX 5090", 50)])
def test_copies_have_the_same_rate_in_both_directions(gpu, gbs):
    """Without a probe, both rates are those of the card's PCIe generation."""
    limits = rates.limits_of(named(gpu), "bf16", False, None)
    assert limits.link == limits.from_host == gbs * 1e9


def test_start_and_steps_of_a_measured_run_add_up_to_its_time():
    """The warm-up steps are steps too, so their time does not count as part of the start."""
    folder, checked = study.ROOT / "results/h100/founding-images", 0
    for run in timed_runs([folder]):
        (path,) = (path for path in rundir.find_runs(folder) if path.path.name == run.run_id.split("/")[1])
        summary = rundir.read_json(path.summary)
        phases, count = summary["phases_s"], summary["steps"]
        others = sum(phases.get(name, 0.0) for name in ("wait_for_gpu", "make_weights", "evaluate", "finish"))
        checked += count["warmup"] > 1
        assert (run.start_s or 0.0) + count["total"] * run.step_s == pytest.approx(phases["total"] - others)
    assert checked > 10


def test_runs_that_compiled_in_steady_steps_do_not_give_the_speed_of_the_host():
    gpu, folder = named("H100 SXM5"), study.ROOT / "results/h100/founding-images"
    paused = {f"llava-next-{name}/" for name in ("fixed-b1", "fixed-fp8-b1", "compile-b2", "compile-fp8-b2")}
    found = {run.run_id: run.launch_bound for run in timed_runs([folder])}
    assert not any(bound for name, bound in found.items() if name.startswith(tuple(paused)))
    compiled = [run for run in timed_runs([folder]) if run.spec.optimizations.compile]
    assert host_slowdown(RunHistory(None, compiled), gpu)[0] == pytest.approx(2.1, abs=0.1)  # with all runs: 2.6


def test_the_speed_of_the_host_does_not_include_the_time_of_the_gpu(monkeypatch):
    specs = [resolve(spec_of(dataset={"name": "synthetic", "samples": 64, "length": 512}, train={"batch_size": batch}),
                     capability_of(H200)) for batch in (2, 3, 4)]  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(rates, "HOST_OPERATIONS_S", rates.HOST_OPERATIONS_S / 2)
        rates.limits_of.cache_clear()
        slow = [estimate_duration(spec, H200).step_s.expected for spec in specs]
    rates.limits_of.cache_clear()
    runs = [replace(committed()[0], run_id=str(step_s), spec=spec, key=step_key(spec), gpu=H200.name, launch_bound=True,
                    step_s=step_s) for spec, step_s in zip(specs, slow, strict=True)]  # fmt: skip
    assert host_slowdown(RunHistory(None, runs), H200)[0] == pytest.approx(2, rel=0.01)


def test_small_models_are_host_bound_and_long_batches_are_not():
    assert estimate(model={"id": "Qwen/Qwen3-0.6B"}, dataset={"name": "japanese-alpaca"}).bound == "host"
    assert estimate().bound == "GPU"


@pytest.mark.parametrize("slower", [
    {"optimizations": {"gradient_checkpointing": True}}, {"optimizations": {"activation_offload": True}},
    {"optimizations": {"attention": "eager"}}, {"method": {"name": "qlora"}},
    {"train": {"gradient_accumulation_steps": 2}},
], ids=str)  # fmt: skip
def test_more_work_takes_longer(slower):
    assert estimate(**slower).step_s.expected > estimate().step_s.expected


def changed(tmp_path, **files):
    """A copy of a committed run with keys of its files changed."""
    source = next(RESULTS.rglob("qwen3-8b-lora-b4-78939b22-r1"))
    copy = shutil.copytree(source, tmp_path / "runs" / source.name)
    for name, change in files.items():
        values = json.loads((copy / f"{name}.json").read_text("utf-8"))
        for section, keys in change.items():
            values[section] = {**values.get(section, {}), **keys}
        (copy / f"{name}.json").write_text(json.dumps(values), "utf-8")
    return timed_runs([tmp_path / "runs"])


def test_waiting_is_not_part_of_the_start(tmp_path):
    plain = next(run for run in committed() if run.run_id.endswith("78939b22-r1"))
    (found,) = changed(tmp_path, summary={"phases_s": {"wait_for_gpu": 1200.0, "make_weights": 60.0, "total": 1300.0}})
    assert found.start_s == plain.start_s


def test_runs_on_a_shared_gpu_are_ignored(tmp_path):
    assert changed(tmp_path, spec={"measure": {"share_gpu": True}}) == []


def test_runs_of_another_framework_apply_only_to_the_same_step():
    ours = next(run for run in committed() if run.run_id.endswith("78939b22-r1"))
    launch = ours.spec.launch.model_copy(update={"framework": "axolotl"})
    spec = ours.spec.model_copy(update={"launch": launch})
    store = RunHistory(None, (other := replace(ours, spec=spec, key=step_key(spec)),))
    assert store.same_step(spec, H200) == [other]
    assert store.same_step(ours.spec, H200) == []
    assert study.observations(store) == []


def test_samples_of_packed_rows_follow_from_their_lengths(store):
    data = {"name": "synthetic", "like": "japanese-alpaca", "samples": 4000, "max_length": 2048}
    train = {"batch_size": 4, "max_steps": 20, "precision": "bf16"}
    spec = spec_of(dataset=data, train=train, optimizations={"packing": True, "attention": "varlen"})
    a_step = estimate_duration(spec, H200, store).samples
    assert a_step > 10 * 4
    assert epochs_samples(spec, a_step) == 20 * a_step
    padded = spec_of(dataset=data, train=train)
    assert epochs_samples(padded, estimate_duration(padded, H200, store).samples) == 20 * 4
    told = api.expectation(spec, {"name": "NVIDIA H200", "memory_gb": 140.4}, RESULTS)
    seconds = estimate_duration(spec, H200, store).seconds_for(20 * a_step).expected
    assert told is not None
    assert f"about {units.seconds(seconds)} " in told


# --- predictions of run and sweep -----------------------------------------------------------------------------------


def test_a_run_starts_with_its_prediction(store):
    gpu = {"name": "NVIDIA H200", "memory_gb": 140.4}
    run = next(run for run in committed() if run.run_id.endswith("78939b22-r1"))
    told = api.expectation(run.spec, gpu, RESULTS)
    assert told is not None
    found = re.fullmatch(r"expected: ([\d.]+) GiB of 140.4, about ([\d.]+) s \(([\d.]+) s to .* s; (.*)\)", told)
    assert found is not None, told
    assert float(found[1]) == pytest.approx(78, rel=0.05)
    assert float(found[2]) == pytest.approx(16 * run.step_s + 10, abs=10)
    assert re.fullmatch(MEASURED_ALIKE, found[4])
    mock = run.spec.model_copy(update={"launch": run.spec.launch.model_copy(update={"mock": "ok"})})
    assert api.expectation(mock, gpu, RESULTS) is None
    assert api.expectation(run.spec, None, RESULTS) is None


def test_a_plan_marks_estimates():
    measured = dry_run.PlannedJob("batch 1", "pending", None, 60.0, None, 70.0, "fits")
    estimated = dry_run.PlannedJob("batch 2", "pending", None, 90.0, "data sheet", 70.0, "fits")
    assert dry_run.as_text([measured, estimated]).splitlines() == [
        "pending    batch 1: at most 60.0 s, 70.0 GiB",
        "pending    batch 2: about 90.0 s (data sheet), 70.0 GiB",
        "",
        "total: 2 runs, about 2 min 30 s",
    ]


def test_a_plan_counts_the_energy_of_all_gpus():
    def joules(gpus: int) -> float:
        launch = {"gpus": gpus, "strategy": "ddp"} if gpus > 1 else {}
        spec = Experiment.model_validate({
            "name": "plan", "model": {"id": "Qwen/Qwen3-8B"}, "train": {"max_steps": 100}, "launch": launch,
            "dataset": {"name": "synthetic", "samples": 64, "length": 512},
        })  # fmt: skip
        plan = SimpleNamespace(has_commands=False, wall_times=SimpleNamespace(at_most_s=lambda job: None))
        job, status = SimpleNamespace(spec=spec, what=""), SimpleNamespace(state="pending", reason="", done=False)
        predictor = api.Predictor({"name": "NVIDIA H200", "memory_gb": 140.4}, Path("none"))
        return dry_run._planned(SimpleNamespace(plan=plan), predictor, job, status).joules or 0.0

    assert joules(2) > 1.9 * joules(1)


@pytest.mark.parametrize("samples", [None, 100])
def test_a_plan_of_runs_on_a_file_has_durations(tmp_path, samples):
    row = json.dumps({"prompt": "Say it.", "completion": "word " * 160})
    (tmp_path / "data.jsonl").write_text(f"{row}\n" * 300)
    spec = spec_of(dataset={"name": "file", "path": str(tmp_path / "data.jsonl"), "samples": samples})
    board = {"name": "NVIDIA H200", "memory_gb": 140.4}
    _, time, wall_s = api.Predictor(board, tmp_path / "none").predict(spec)
    assert time is not None
    assert wall_s == pytest.approx(time.seconds_for(samples or 300).expected)
    assert f"about {units.seconds(wall_s)} (" in (api.expectation(spec, board, tmp_path / "none") or "")


# --- power -----------------------------------------------------------------------------------------------------------

_STEPS = st.fixed_dictionaries({
    "model": st.sampled_from([{"id": "Qwen/Qwen3-0.6B"}, {"id": "Qwen/Qwen3-8B"}, {"id": "Qwen/Qwen3-32B"}]),
    "method": st.sampled_from([{"name": "lora"}, {"name": "qlora"}, {"name": "full"}, {"name": "unsloth"}]),
    "train": st.sampled_from([{"precision": "bf16", "batch_size": 1}, {"precision": "bf16", "batch_size": 8}]),
    "dataset": st.sampled_from([{"name": "japanese-alpaca"}, {"name": "synthetic", "samples": 64, "length": 2048}]),
})  # fmt: skip


@settings(max_examples=20)
@given(_STEPS)
def test_a_board_with_less_power_is_not_faster(parts):
    def seconds(name: str) -> float:
        found = estimate(named(name), **parts)
        return found.step_s.expected - found.parts.get(FLUSHES, 0.0)  # a GPU with more memory does not flush

    h100 = [seconds(f"H100 {kind}") for kind in ("SXM5", "NVL", "PCIe")]
    assert h100 == sorted(h100)
    assert seconds("H200 NVL") >= seconds("H200 SXM")


def test_a_max_q_is_not_a_workstation():
    """The same chip with half the watts."""
    max_q, workstation = (named(f"RTX PRO 6000 Blackwell {name}") for name in ("Max-Q", "Workstation"))
    assert estimate(workstation).step_s.expected < 0.9 * estimate(max_q).step_s.expected


def test_a_power_limit_lowers_speed_and_power():
    whole, held = (limited_gpu({"name": "NVIDIA H200", "power_limit_w": watts}) for watts in (700.0, 400.0))
    assert whole == H200
    assert held is not None
    assert held.watts == 400
    fast, slow = estimate(), estimate(held)
    assert 1.1 < slow.step_s.expected / fast.step_s.expected < 700 / 400
    assert slow.watts.high <= 400
    assert limited_gpu({"name": "no such GPU", "power_limit_w": 100.0}) is None


def test_of_runs_with_equal_ids_the_latest_valid_one_counts(tmp_path):
    """Folders of two days have the same run ids. Their names are not in the order of their dates."""
    for folder, day, seconds, busy in (("c", 1, 1.0, 0.0), ("b", 2, 2.0, 0.0), ("a", 3, 3.0, 0.6)):
        make_run(tmp_path / folder, "same", steps(30, seconds=seconds, host_cpu_by_others=busy))
        for state in (tmp_path / folder).rglob("state.json"):
            rundir.write_json(state, rundir.read_json(state) | {"ended_at": f"2026-11-0{day}T12:00:00Z"})
    assert [run.step_s for run in RunHistory.read(tmp_path).runs] == [pytest.approx(2.0, rel=0.01)]


def test_contended_runs_are_ignored_and_counted(tmp_path):
    plain = make_run(tmp_path, "plain")
    make_run(tmp_path, "contended", steps(30, seconds=9.0, host_cpu_by_others=0.6))
    make_run(tmp_path, "diverged", steps(30, seconds=9.0, loss=float("nan")))
    store = RunHistory.read(tmp_path)
    assert [run.run_id.split("/")[1] for run in store.runs] == [plain.run_id]
    found = estimate_duration(store.runs[0].spec, H200, store)
    assert found.step_s.expected == pytest.approx(1.0, rel=0.01)
    assert found.confidence == ("measured (same step, same GPU, 1 run); without 1 contended run and 1 diverged run")
    other = store.runs[0].spec.model_copy(
        update={"train": store.runs[0].spec.train.model_copy(update={"batch_size": 64})}
    )
    assert "contended" not in estimate_duration(other, H200, store).confidence


def test_a_larger_batch_never_takes_less_time_with_streamed_weights_and_states():
    spec = load(Path("mistralai/Mistral-7B-v0.1"), [
        "recipe=smallest-full", 'dataset={"name": "synthetic", "samples": 512, "length": 64, "max_length": 64}',
    ])  # fmt: skip
    seconds = [estimate_duration(with_batch(spec, 2**at), find_gpu("NVIDIA H200")).step_s.expected for at in range(9)]
    assert seconds == pytest.approx(sorted(seconds), rel=1e-9)

import math

import numpy as np
import pandas as pd
import pytest

from ftbench.core.rows import StepRow
from ftbench.store.rundir import create, write_json
from ftbench.store.steps import StepsWriter
from ftbench.store.summary import as_dict, summarise
from ftbench.sweep.plan.base import is_batch_too_large

TIMES = [4.0, 1.5, *np.linspace(0.98, 1.02, 18).round(4).tolist()]  # two steps of warm-up, eighteen steady ones
WARM = 2

SPEC = {
    "name": "exp",
    "model": {"id": "Qwen/Qwen3-8B", "weights": "random"},
    "method": {"name": "lora"},
    "train": {"batch_size": 2, "gradient_accumulation_steps": 1},
    "optimizations": {"compile": True, "fp8": "off", "attention": "auto"},
    "measure": {"warmup": "auto"},
}
SHAPE = {
    "base": 6_946_000_000,
    "base_trained": 0,
    "head": 622_000_000,
    "head_trained": 0,
    "adapters": 22_000_000,
    "attention_width": [4096] * 36,
    "windows": [None] * 36,
}
APPLIED = {
    "parameters": {"total": 8_190_735_360, "trainable": 21_823_488},
    "matmul_shape": SHAPE,
    "product_precision": "bf16",
    "gradient_checkpointing": True,
    "loss": "chunked_nll",
    "dataset": {"tokens": {"weighted_mean": 300.0}},
    "warnings": ["something was noticed"],
}
GPU = {
    "name": "NVIDIA H200",
    "idle_power_w": 75.0,
    "memory_used_before_gb": 0.5,
    "foreign_processes": 0,
    "ecc_uncorrected": 0,
}
PHASES = [
    {"name": "import", "start_s": 0.0, "end_s": 3.0, "peak_memory_gb": 0.1},
    {"name": "load", "start_s": 3.0, "end_s": 10.0, "peak_memory_gb": 16.0, "peak_reserved_gb": 17.0},
    {"name": "train", "start_s": 10.0, "end_s": 36.0, "peak_memory_gb": 30.0},
    {"name": "save", "start_s": 36.0, "end_s": 37.0, "peak_memory_gb": 16.0},
]


def training(times=TIMES, **changed):
    """Rows of a run with these step times; `changed` gives a column's values, one a step."""
    ends = np.cumsum(times)
    rows = [
        StepRow(
            step=i + 1,
            elapsed_time_sec=float(ends[i]),
            phase="train",
            step_time_s=time,
            data_time_s=0.05 * time,
            real_tokens=500 + i,
            padded_tokens=600 + i,
            label_tokens=100 + i,
            samples=2,
            longest_sequence=300,
            loss=2.0 - i / 100,
            peak_memory_gb=20.0 + i / 10,
            peak_reserved_gb=25.0,
            device_memory_gb=26.0 + i,
            host_memory_gb=3.0,
            power_w=600.0 + i,
            energy_j=(600.0 + i) * time,
            throttle="none",
            allocator_retries=0,
        )
        for i, time in enumerate(times)
    ]
    for column, values in changed.items():
        for row, value in zip(rows, values, strict=True):
            setattr(row, column, value)
    return rows


@pytest.fixture
def run(tmp_path):
    """A run directory from hand-made files; a file given as None is left out."""

    def build(rows=None, **files):
        made = create(tmp_path, "exp", "slug")
        contents = {
            "spec_json": SPEC,
            "applied": APPLIED,
            "machine": {"gpu": GPU},
            "phases": {"phases": PHASES},
            "state": {"state": "ok", "wall_s": 40.0},
        } | files
        for name, content in contents.items():
            if content is not None:
                write_json(getattr(made, name), content)
            else:
                getattr(made, name).unlink(missing_ok=True)  # a claim has written a state
        writer = StepsWriter(made.steps)
        writer.append(training() if rows is None else rows)
        writer.close()
        return made

    return build


def steady(made):
    """The steady window by another route: pandas reads the file that anyone can read."""
    frame = pd.read_csv(made.steps)
    return frame[frame.phase == "train"].iloc[WARM:]


# --- figures ---------------------------------------------------------------------------------------------------------


def test_summary_describes_its_run(run):
    made = run()
    found = summarise(made)
    assert (found.name, found.run_id, found.state, found.reason) == ("exp", "slug-r1", "ok", None)
    assert (found.model, found.weights, found.method, found.gpu) == ("Qwen/Qwen3-8B", "random", "lora", "NVIDIA H200")
    assert (found.batch_size, found.gradient_accumulation_steps, found.optimizations) == (2, 1, ["compile"])
    assert found.parameters == APPLIED["parameters"]


def test_steady_window_starts_after_warmup(run):
    found = summarise(run())
    assert found.steps == {"total": 20, "warmup": WARM, "steady": 18}
    assert (found.first_step_s, found.time_to_steady_s) == (4.0, 5.5)


@pytest.mark.parametrize(("asked", "warmup"), [(0, 0), (5, 5), (100, 20)])
def test_warmup_of_the_spec_is_used(run, asked, warmup):
    found = summarise(run(spec_json=SPEC | {"measure": {"warmup": asked}}))
    assert found.steps == {"total": 20, "warmup": warmup, "steady": 20 - warmup}


def test_step_times_are_from_the_steady_window(run):
    made = run()
    found, times = summarise(made).step_time_s, steady(made).step_time_s
    assert found["median"] == pytest.approx(times.median())
    assert found["mean"] == pytest.approx(times.mean())
    assert found["p10"] == pytest.approx(times.quantile(0.1))
    assert found["p90"] == pytest.approx(times.quantile(0.9))
    assert found["cv"] == pytest.approx(times.std() / times.mean())
    low, high = found["ci95"]
    assert low < times.median() < high


def test_rates_are_counts_over_the_window(run):
    made = run()
    found, frame = summarise(made), steady(made)
    window = frame.step_time_s.sum()
    assert found.tokens_per_s == pytest.approx(
        {name: frame[f"{name}_tokens"].sum() / window for name in ("real", "padded", "label")}
    )
    assert found.samples_per_s == pytest.approx(2 * 18 / window)
    assert found.samples_per_hour == pytest.approx(2 * 18 / window * 3600)


def test_rate_of_an_unknown_count_is_unknown(run):
    rows = training(label_tokens=[None] * 20, samples=[2] * 19 + [None])
    found = summarise(run(rows))
    assert found.tokens_per_s["label"] is None
    assert found.tokens_per_s["real"] > 0
    assert (found.samples_per_s, found.samples_per_hour) == (None, None)


def per_token(length, passes=3):
    """FLOPs of the shape above by hand, without its head: 4 N + 6 A and the causal attention of 36 layers."""
    attention = passes * 36 * 2 * 2 * 4096 * length / 2
    return 4 * SHAPE["base"] + 6 * SHAPE["adapters"] + attention


def test_mfu_counts_real_tokens_and_the_dense_peak(run):
    made = run()
    found, frame = summarise(made), steady(made)
    needed = frame.real_tokens.sum() * per_token(300) + frame.label_tokens.sum() * 4 * SHAPE["head"]
    tflops = needed / frame.step_time_s.sum() / 1e12
    assert found.model_tflops == pytest.approx(tflops)
    assert found.mfu == pytest.approx(tflops / 989)


CHUNKED = ("label_tokens", 4 + 2)  # whose logits are computed, and FLOPs of each a weight of the head
WHOLE = ("padded_tokens", 4)


@pytest.mark.parametrize(
    ("loss", "logits", "checkpointing"),
    [("chunked_nll", CHUNKED, 1.0), ("chunked_nll", CHUNKED, 0.0), ("nll", WHOLE, 0.5), (None, WHOLE, 1.0)],
)
def test_hfu_counts_padding_and_recomputation(run, loss, logits, checkpointing):
    made = run(applied=APPLIED | {"loss": loss, "gradient_checkpointing": checkpointing})
    found, frame = summarise(made), steady(made)
    again = 2 * SHAPE["base"] + 2 * SHAPE["adapters"] + 36 * 4 * 4096 * 300 / 2
    computed = frame.padded_tokens.sum() * (per_token(300) + again * checkpointing)
    computed += frame[logits[0]].sum() * logits[1] * SHAPE["head"]
    assert found.hfu == pytest.approx(computed / frame.step_time_s.sum() / 1e12 / 989)
    assert found.hfu > found.mfu


def test_shared_gpu_is_a_warning(run):
    assert not [told for told in summarise(run()).warnings if "share_gpu" in told]
    shared = run(spec_json=SPEC | {"measure": SPEC.get("measure", {}) | {"share_gpu": True}})
    assert [told for told in summarise(shared).warnings if "share_gpu" in told]


def test_utilization_above_the_peak_becomes_a_warning(run):
    found = summarise(run(training(real_tokens=[10**6] * 20)))
    assert found.mfu is None
    assert found.hfu is not None
    (told,) = [warning for warning in found.warnings if "mfu" in warning]
    assert "which cannot be: it is left out" in told
    assert "989 TFLOP/s" in told


OLD_SHAPE = {key: value for key, value in SHAPE.items() if key != "head_trained"}


@pytest.mark.parametrize(
    "missing",
    [
        {"matmul_shape": None},
        {"dataset": {}},
        {"matmul_shape": OLD_SHAPE},
        {"matmul_shape": SHAPE | {"new": 1}},
        {"matmul_shape": SHAPE | {"windows": []}},
    ],
    ids=["none", "no lengths", "older", "newer", "layers of two counts"],
)
def test_no_flops_without_shape_or_lengths(run, missing):
    found = summarise(run(applied=APPLIED | missing))
    assert (found.model_tflops, found.mfu) == (None, None)


def test_energy_is_the_counter_over_the_window(run):
    made = run()
    found, frame = summarise(made).energy, steady(made)
    joules = frame.energy_j.sum()
    assert found["joules"] == pytest.approx(joules)
    assert found["joules_per_1k_samples"] == pytest.approx(joules / 36 * 1000)
    assert found["mean_watts"] == pytest.approx(np.average(frame.power_w, weights=frame.step_time_s))
    assert found["idle_watts"] == 75.0


def test_energy_of_samples_is_from_the_steps_with_energy(run):
    """The last step ends after the last reading of the counter."""
    rows = training(energy_j=[600.0] * 19 + [None], power_w=[500.0] * 19 + [None])
    found = summarise(run(rows)).energy
    assert found["joules"] == 600.0 * 17
    assert found["joules_per_1k_samples"] == pytest.approx(600.0 / 2 * 1000)
    assert found["mean_watts"] == pytest.approx(500.0)


def test_a_counter_that_did_not_change_is_not_an_energy_of_zero(run):
    """24 steps of a tiny model can end before the driver updates its counter."""
    found = summarise(run(training(energy_j=[0.0] * 20, power_w=[500.0] * 20))).energy
    assert (found["joules"], found["joules_per_1k_samples"], found["mean_watts"]) == (None, None, pytest.approx(500.0))


def test_energy_counter_against_sampled_power(run):
    times = [2.0] * 22
    rows = training(times, energy_j=[1500.0] * 22, power_w=[600.0] * 22)
    assert [w for w in summarise(run(rows)).warnings if w.startswith("energy: the counter's")]
    rows = training(times, energy_j=[1210.0] * 22, power_w=[600.0] * 22)
    assert not [w for w in summarise(run(rows)).warnings if w.startswith("energy: the counter's")]


# --- loss and memory -------------------------------------------------------------------------------------------------


def evaluation(after, seconds=5.0, **values):
    return StepRow(phase="evaluate", step_time_s=seconds, elapsed_time_sec=after + seconds, **values)


def test_losses_first_last_and_evaluated(run):
    rows = [*training(), evaluation(30.0, loss=1.9), evaluation(40.0, loss=1.8)]
    assert summarise(run(rows)).loss == {"first": 2.0, "last": pytest.approx(1.81), "eval": 1.8}


def test_nan_loss_is_named_and_can_be_written(run, tmp_path):
    losses = [2.0] * 10 + [math.nan] * 5 + [2.0] + [math.inf] * 2 + [math.nan] * 2
    found = summarise(run([*training(loss=losses), evaluation(30.0, loss=math.inf)]))
    assert found.loss == {"first": 2.0, "last": 2.0, "eval": None}
    assert "the loss is not a number in 9 steps, first in step 11" in found.warnings
    write_json(tmp_path / "summary.json", as_dict(found))


def test_rewards_of_a_diverged_run_are_finite_and_can_be_written(run, tmp_path):
    margins = [0.5] * 10 + [math.nan] * 10
    found = summarise(run(training(reward_accuracy=[1.0] * 10 + [0.0] * 10, reward_margin=margins)))
    assert (found.loss["reward_accuracy"], found.loss["reward_margin"]) == (1.0, 0.5)
    write_json(tmp_path / "summary.json", as_dict(found))


# --- learning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("column", "value"), [("loss", math.nan), ("loss", -math.inf), ("grad_norm", math.inf)])
def test_a_single_nan_is_a_failure(run, column, value):
    rows = training(grad_norm=[1.0] * 20)
    setattr(rows[6], column, value)
    found = summarise(run(rows))
    assert found.learning == {"state": "not finite", "first_step": 7, "count": 1}
    word = {"loss": "the loss", "grad_norm": "the gradient norm"}[column]
    assert f"{word} is not a number in 1 step, first in step 7" in found.warnings


@pytest.mark.parametrize(("last", "warned"), [(0.0, True), (1e-9, False), (None, False)])
def test_gradient_norms_of_zero_are_a_warning(run, last, warned):
    rows, text = training(grad_norm=[0.0] * 19 + [last]), "the gradient norm is 0 in all steps"
    assert any(text in each for each in summarise(run(rows)).warnings) == warned
    assert not any(text in each for each in summarise(run(rows, machine={"imported": True})).warnings)


def test_fp16_gradient_norms_may_overflow(run):
    rows = training(grad_norm=[math.inf] * 2 + [1.0] * 18)
    fp16 = run(rows, spec_json=SPEC | {"train": SPEC["train"] | {"precision": "fp16"}})
    assert summarise(fp16).learning["state"] == "ok"
    assert summarise(run(rows)).learning["state"] == "not finite"


# --- contention ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "gpu", "contended"),
    [(0.4, None, False), (0.6, None, True), (None, 0.3, True), (0.1, 0.01, False), (0.6, 0.3, True)],
)
def test_run_next_to_other_processes_is_contended(run, host, gpu, contended):
    columns = {"host_cpu_by_others": [host] * 20, "gpu_by_others": [gpu] * 20}
    found = summarise(run(training(**columns)))
    assert found.contention == pytest.approx({"contended": contended, "host_cpu_by_others": host, "gpu_by_others": gpu})
    assert any(warning.startswith("contended: ") for warning in found.warnings) is contended


def test_contention_is_weighted_by_time_in_the_steady_window(run):
    shares = [1.0] * WARM + [0.0] * (20 - WARM)
    assert summarise(run(training(host_cpu_by_others=shares))).contention["host_cpu_by_others"] == 0.0
    rows = training(host_cpu_by_others=[None] * WARM + [0.0, 0.8] * ((20 - WARM) // 2) + [0.0] * ((20 - WARM) % 2))
    busy = sum(row.step_time_s for row in rows[WARM:] if row.host_cpu_by_others)
    expected = 0.8 * busy / sum(row.step_time_s for row in rows[WARM:])
    assert summarise(run(rows)).contention["host_cpu_by_others"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("cache", "told"), [({"compile_cache": "warm"}, "warm"), ({"compile_cache": None}, "none"), ({}, None)]
)
def test_first_step_has_the_state_of_the_compile_cache(run, cache, told):
    applied = {key: value for key, value in APPLIED.items() if key != "compile_cache"} | cache
    assert summarise(run(applied=applied)).first_step_cache == told


def test_memory_peaks_are_from_the_complete_run(run):
    found = summarise(run([*training(), evaluation(30.0, device_memory_gb=99.0, peak_memory_gb=90.0)])).memory_gb
    assert (found["allocated_peak"], found["peak_phase"]) == (90.0, "evaluate")
    assert found["device_peak"] == 99.0
    assert found["reserved_peak"] == 25.0
    assert found["host_peak"] == 3.0


@pytest.mark.parametrize(
    ("peaks", "phase"),
    [
        ([40.0] + [20.0] * 19, "first_step"),
        ([20.0, 40.0] + [20.0] * 18, "warmup"),
        ([20.0] * 19 + [40.0], "steady"),
        ([10.0] * 20, "train"),
    ],
)
def test_phase_of_the_peak_is_named(run, peaks, phase):
    found = summarise(run(training(peak_memory_gb=peaks))).memory_gb
    assert (found["allocated_peak"], found["peak_phase"]) == (max(*peaks, 30.0), phase)


# --- phases ----------------------------------------------------------------------------------------------------------


def test_phases_add_up_to_the_wall_time(run):
    made = run()
    found = summarise(made).phases_s
    total = found.pop("total")
    assert total == 40.0
    assert sum(found.values()) == pytest.approx(total)
    assert found["first_step"] == 4.0
    assert found["warmup"] == 1.5
    assert found["steady"] == pytest.approx(steady(made).step_time_s.sum())
    assert found["train_other"] == pytest.approx(26.0 - sum(TIMES))
    assert found["start_and_exit"] == pytest.approx(3.0)


def test_phase_of_a_kill_lasts_until_the_end(run):
    phases = [PHASES[0], PHASES[1], {"name": "train", "start_s": 10.0}]
    found = summarise(run(phases={"phases": phases}, state={"state": "timeout", "wall_s": 50.0})).phases_s
    assert found["start_and_exit"] == 0
    assert found["steady"] + found["train_other"] + found["first_step"] + found["warmup"] == pytest.approx(40.0)
    assert sum(found.values()) - found["total"] == pytest.approx(50.0)


# --- what makes the figures weak -------------------------------------------------------------------------------------


def warned(made, word):
    return [warning for warning in summarise(made).warnings if word in warning]


def test_few_steady_steps_are_a_warning(run):
    (told,) = warned(run(training([3.0, 1.0, 1.0, 1.0, 1.0])), "steady steps")
    assert told == "only 4 steady steps: train at least 6 steps for reliable figures"
    assert not warned(run(training([3.0, 1.0, 1.0, 1.0, 1.0, 1.0])), "steady steps:")


def test_too_few_steps_for_the_requested_warmup(run):
    made = run(training([1.0] * 12), spec_json=SPEC | {"measure": {"warmup": 20}})
    assert warned(made, "only 0 steady steps: train at least 25 steps")
    summary = summarise(made)
    assert summary.steps == {"total": 12, "warmup": 12, "steady": 0}
    assert summary.time_to_steady_s is None


def test_drift_is_a_warning(run):
    (told,) = warned(run(training([3.0, *np.linspace(1.0, 1.2, 30).tolist()])), "during the steady window")
    assert "+1" in told
    assert not warned(run(training([3.0, *[1.0] * 30])), "during the steady window")


def test_noise_is_no_drift(run):
    """In one of four launch-bound runs of 24 steps, the medians of the thirds differ by more than 5 %."""
    chance = np.random.default_rng(1)
    noise = [[2.0, *chance.lognormal(0, 0.1, 23)] for _ in range(40)]
    assert sum(bool(warned(run(training(times)), "during the steady window")) for times in noise) <= 2
    slower = [[2.0, *chance.lognormal(0, 0.02, 23) * np.linspace(1.0, 1.3, 23)] for _ in range(8)]
    assert all(warned(run(training(times)), "during the steady window") for times in slower)


def test_outlier_is_named_with_its_signs(run):
    times, graphs = list(TIMES), [0] * 20
    times[14], graphs[14] = 2.5, 3
    made = run(training(times, recompiles=graphs))
    (told,) = warned(made, "far slower")
    assert told == "1 step was far slower than the others: step 15 (2.5 times the median, 3 graphs compiled)"
    (found,) = summarise(made).outliers
    assert (found["step"], found["step_time_s"]) == (15, 2.5)
    times[11], times[12] = 1.15, 4.0  # 15 % slower is not far slower
    assert [each["step"] for each in summarise(run(training(times))).outliers] == [13, 15]
    noise = np.random.default_rng(1).lognormal(0, 0.2, 40).tolist()
    assert summarise(run(training([2.0, *noise]))).outliers == []


def test_all_outliers_are_counted_and_ten_are_listed(run):
    made = run(training([2.0, *([1.0] * 9 + [3.0]) * 30]))
    (told,) = warned(made, "far slower")
    assert told.startswith("30 steps were far slower than the others: step 11 (3.0 times the median); ")
    assert len(summarise(made).outliers) == 10


def test_bottleneck_has_its_figures(run):
    busy = training(gpu_busy=[0.5] * 20, data_time_s=[0.0] * 20)
    made = run(busy, applied=APPLIED | {"gpu_busy_method": "GPM counters"})
    assert summarise(made).bound["verdict"] == "launch-bound"
    assert summarise(made).bound["gpu_busy_method"] == "GPM counters"
    assert warned(made, "launch-bound: the GPU worked 50 % of the time")


def test_measured_ceiling_gives_mfu_measured(run):
    made = run(machine={"gpu": GPU, "ceilings": {"tflops": {APPLIED["product_precision"]: 40.0}}})
    summary = summarise(made)
    assert summary.mfu_measured == pytest.approx(summary.model_tflops / 40.0)
    assert summary.bound["products"] == pytest.approx(summary.hfu * 989 / 40.0)
    assert summarise(run()).bound["products"] == pytest.approx(summary.hfu)
    assert summarise(run()).mfu_measured is None


def clock(gap):
    """Ends of the steps on a host clock that sees the steady steps take `gap` longer."""
    return np.cumsum([time * (1 + gap * (i >= WARM)) for i, time in enumerate(TIMES)]).tolist()


@pytest.mark.parametrize(("gap", "told"), [(0.0, False), (0.01, False), (0.03, True), (-0.2, True)])
def test_wall_clock_gap_is_a_warning(run, gap, told):
    assert bool(warned(run(training(elapsed_time_sec=clock(gap))), "wall clock")) is told


def test_check_after_the_first_step_is_no_gap(run):
    times = [0.5, *[0.1] * 19]
    ends = np.cumsum(times) + 0.1 * (np.arange(20) > 0)
    made = run(training(step_time_s=times, elapsed_time_sec=ends.tolist()))
    assert summarise(made).steps["warmup"] == 1
    assert not warned(made, "wall clock")


@pytest.mark.parametrize("after", [WARM, 18])
def test_evaluation_in_the_window_is_subtracted(run, after):
    ends = np.cumsum(TIMES)
    shifted = [float(end) + 5.0 * (i > after) for i, end in enumerate(ends)]
    rows = training(elapsed_time_sec=shifted)
    within = evaluation(float(ends[after]), loss=1.5)
    made = run([*rows[: after + 1], within, *rows[after + 1 :]])
    assert not warned(made, "wall clock")
    assert summarise(made).steps["total"] == 20
    assert warned(run(rows), "wall clock")


@pytest.mark.parametrize(
    ("reason", "told"), [("sw_thermal|idle", True), ("hw_slowdown", True), ("sw_power_cap", False)]
)
def test_thermal_throttling_is_a_warning(run, reason, told):
    assert bool(warned(run(training(throttle=["none"] * 15 + [reason] * 5)), "throttled")) is told


def test_allocator_retries_are_a_warning(run):
    (told,) = warned(run(training(allocator_retries=[9, 0] + [0] * 15 + [1] * 3)), "allocator")
    assert "3 times" in told


@pytest.mark.parametrize(
    ("change", "told"), [({}, False), ({"foreign_processes": 1}, True), ({"memory_used_before_gb": 8.0}, True)]
)
def test_busy_gpu_is_a_warning(run, change, told):
    assert bool(warned(run(machine={"gpu": GPU | change}), "was not free")) is told
    several = run(machine={"gpus": [GPU, GPU | change]})
    assert bool(warned(several, "was not free")) is told
    assert is_batch_too_large(several) is not told


@pytest.mark.parametrize(("share", "told"), [(0.0, False), (0.09, False), (0.11, True), (0.5, True)])
def test_data_bound_run_is_a_warning(run, share, told):
    found = warned(run(training(data_time_s=[share * time for time in TIMES])), "data-bound")
    assert found == [f"data-bound: {share * 100:.0f} % of the steady window was spent waiting for batches"] * told


@pytest.mark.parametrize(("errors", "told"), [(None, False), (0, False), (3, True)])
def test_ecc_errors_are_a_warning(run, errors, told):
    found = warned(run(machine={"gpu": GPU | {"ecc_uncorrected": errors}}), "uncorrected memory errors")
    assert found == ["the GPU has counted 3 uncorrected memory errors: do not trust it"] * told


# --- runs that ended early -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["spec_json", "applied", "machine", "phases", "state"])
def test_any_file_may_be_missing(run, tmp_path, missing):
    made = run(**{missing: None})
    assert not getattr(made, missing).exists()
    found = summarise(made)
    assert found.steps["steady"] == 18
    assert found.tokens_per_s["real"] > 0
    write_json(tmp_path / "summary.json", as_dict(found))


@pytest.mark.parametrize("count", range(4))
def test_short_run_keeps_its_valid_figures(run, tmp_path, count):
    out_of_memory = {"kind": "allocator", "bytes_requested": 5, "phase": "train", "step": count + 1}
    state = {"state": "oom", "reason": "out of memory", "oom": out_of_memory, "wall_s": 40.0}
    found = summarise(run(training()[:count], state=state))
    assert (found.state, found.reason, found.oom) == ("oom", "out of memory", out_of_memory)
    assert found.steps["total"] == count
    assert found.first_step_s == (4.0 if count else None)
    assert bool(found.step_time_s) is (count > 1)
    write_json(tmp_path / "summary.json", as_dict(found))


def test_cpu_run_has_times_without_utilization(run):
    found = summarise(run(training(power_w=[None] * 20, energy_j=[None] * 20), machine={"gpu": None}))
    assert (found.gpu, found.mfu, found.energy["idle_watts"]) == (None, None, None)
    assert found.step_time_s["median"] == pytest.approx(1.0, rel=0.05)

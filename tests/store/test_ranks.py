"""Steps of several ranks become those of the run: each figure against one worked out by hand."""

import math

import pytest

from ftbench.core.rows import COLUMNS, StepRow
from ftbench.store import rundir
from ftbench.store.ranks import merge, merged, rank_files, read_ranks, spread, stages, write_merged
from ftbench.store.rundir import RunDir
from ftbench.store.steps import StepsWriter, read_steps


def row(step=1, rank=0, **values):
    return StepRow(**{
        "step": step, "phase": "train", "rank": rank, "data_rank": rank, "step_time_s": 1.0 + rank / 10,
        "elapsed_time_sec": step * (1.0 + rank / 10), "real_tokens": 100 + rank, "padded_tokens": 128,
        "label_tokens": 50 + rank, "samples": 2, "longest_sequence": 60 + rank, "loss": 2.0 + rank, "grad_norm": 1.5,
        "learning_rate": 1e-3, "peak_memory_gb": 20.0 + rank, "device_memory_gb": 22.0 + rank, "host_memory_gb": 3.0,
        "energy_j": 500.0, "power_w": 400.0, "sm_clock_mhz": 1500.0 - rank, "temperature_c": 60.0 + rank,
        "throttle": "none", **values,
    })  # fmt: skip


def test_tokens_and_energy_add_up_and_time_and_memory_are_the_worst_rank_s():
    found = merged([row(rank=rank, gpu_busy=busy) for rank, busy in enumerate((0.9, 0.9, 0.9, 0.5))])
    assert (found.real_tokens, found.padded_tokens, found.label_tokens, found.samples) == (406, 512, 206, 8)
    assert found.gpu_busy == pytest.approx(0.8)
    assert (found.energy_j, found.power_w, found.host_memory_gb) == (2000.0, 1600.0, 12.0)
    assert (found.step_time_s, found.peak_memory_gb, found.device_memory_gb) == (1.3, 23.0, 25.0)
    assert (found.longest_sequence, found.sm_clock_mhz, found.temperature_c) == (63, 1497.0, 63.0)
    assert (found.loss, found.grad_norm, found.learning_rate) == (3.5, 1.5, 1e-3)
    assert (found.rank, found.data_rank, found.step, found.phase) == (None, None, 1, "train")


@pytest.mark.parametrize("worst", [0, 1])
def test_every_time_and_memory_peak_is_the_worst_rank_s(worst):
    ends = ("_s", "_sec", "_gb", "gpu_by_others")
    names = [name for name in COLUMNS if name.endswith(ends) and name != "host_memory_gb"]
    found = merged([row(rank=rank, **dict.fromkeys(names, 1.0 + (rank == worst))) for rank in range(2)])
    assert {name: getattr(found, name) for name in names} == dict.fromkeys(names, 2.0)


def test_ranks_that_share_a_batch_count_it_once():
    """Two groups of two GPUs that share a batch; where each has a part of its sequences, their losses differ."""
    seen = dict.fromkeys(("images", "image_tokens", "text_tokens", "tiles", "image_patches"), 3)
    found = merged([row(rank=rank, data_rank=rank // 2, **seen) for rank in range(4)])
    assert {getattr(found, name) for name in seen} == {6}
    assert (found.real_tokens, found.samples, found.energy_j) == (100 + 102, 4, 2000.0)
    assert found.loss == (2.5 + 4.5) / 2


def test_an_evaluation_s_loss_is_the_mean_over_all_label_tokens():
    """The last rank only pads the last batch."""
    rows = [row(rank=rank, phase="evaluate", loss=loss, label_tokens=count)
            for rank, (loss, count) in enumerate([(1.0, 30), (2.0, 10), (9.0, 0)])]  # fmt: skip
    assert merged(rows).loss == pytest.approx((30 * 1.0 + 10 * 2.0) / 40)


@pytest.mark.parametrize("column", ["loss", "step_time_s"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_number_that_is_none_hides_behind_no_other(column, rank):
    rows = [row(rank=0), row(rank=1)]
    setattr(rows[rank], column, math.nan)
    assert math.isnan(getattr(merged(rows), column))


def test_what_one_rank_does_not_know_is_not_known():
    found = merged([row(rank=0), row(rank=1, energy_j=None, real_tokens=None, gpu_busy=0.9)])
    assert (found.energy_j, found.real_tokens, found.gpu_busy) == (None, None, None)


def test_every_reason_for_throttling_is_named_once():
    rows = [row(throttle="none"), row(rank=1, throttle="sw_power_cap|hw_thermal"), row(rank=2, throttle="hw_thermal")]
    assert merged(rows).throttle == "sw_power_cap|hw_thermal"


def test_a_step_that_not_all_ranks_have_finished_is_no_step():
    found = merge([[row(1), row(2), row(3)], [row(1, rank=1), row(2, rank=1)]])
    assert [each.step for each in found] == [1, 2]


def test_the_spread_is_between_the_ranks_steady_steps_and_peaks():
    evaluation = {"phase": "evaluate", "step_time_s": 5.0}
    ranks = [[row(1, rank, step_time_s=9.0), row(2, rank), row(2, rank, **evaluation), row(3, rank),
              row(3, rank, **evaluation), row(4, rank, step_time_s=7.0)] for rank in range(2)]  # fmt: skip
    found = spread(ranks, warmup=1)
    assert found["count"] == 2
    assert found["spread"]["step_time_s"] == {"lowest": 1.0, "highest": 1.1}
    assert found["spread"]["peak_memory_gb"] == {"lowest": 20.0, "highest": 21.0}
    assert "peak_reserved_gb" not in found["spread"]
    assert spread(ranks[:1], warmup=1) == {}


@pytest.fixture
def run(tmp_path):
    found = RunDir(tmp_path)
    for rank in range(11):
        writer = StepsWriter(found.of_rank(rank).steps)
        writer.append([row(1, rank), row(2, rank)])
        writer.close()
    return found


def test_files_are_taken_in_the_order_of_their_ranks(run):
    assert [path.name for path in rank_files(run)] == [f"steps.rank{rank}.csv" for rank in range(11)]
    assert [rows[0].rank for rows in read_ranks(run)[0]] == list(range(11))


def test_warnings_of_all_ranks_are_read(run):
    for rank, texts in ((0, ["a"]), (1, ["a", "b"])):
        rundir.write_json(run.of_rank(rank).applied, {"warnings": texts})
    assert read_ranks(run)[1] == ["rank 1: b"]


def test_the_merged_file_is_written_once_and_read_as_any_other(run):
    write_merged(run)
    write_merged(run)
    found, warnings = read_steps(run.steps)
    assert (len(found), warnings) == (2, [])
    assert found[1].samples == 22


def test_the_mean_rank_waits_for_the_one_with_the_most_positions():
    """Three steps of three ranks: 900 positions are waited for, and each rank computes 600 on average."""
    counts = [(100, 300, 80), (200, 200, 200), (400, 100, 220)]
    ranks = [[row(step, rank, padded_tokens=each[rank]) for step, each in enumerate(counts, 1)] for rank in range(3)]
    assert spread(ranks, 0)["token_skew"] == pytest.approx(1 - 600 / 900)
    assert spread(ranks, 1)["token_skew"] == pytest.approx(1 - 440 / 600)
    ranks[1][2].padded_tokens = None
    assert spread(ranks, 0)["token_skew"] is None


def test_the_bubble_is_the_part_of_the_slowest_pass_that_the_mean_rank_waits(tmp_path):
    for rank, (seconds, busy) in enumerate([(4.0, 1.0), (5.0, 3.0)]):
        parallel = {"split": [2, 1], "pass_s": seconds, "busy_s": busy}
        rundir.write_json(RunDir(tmp_path).of_rank(rank).applied, {"parallel": parallel})
    assert stages(RunDir(tmp_path), 2) == {"layers": [2, 1], "bubble": pytest.approx(1 - 2 / 5)}


def test_each_rank_has_its_memory():
    memory = spread([[row(rank=0), row(2, 0, peak_memory_gb=31.0)], [row(rank=1)]], 0)["memory_gb"]
    assert [(of["allocated"], of["reserved"], of["device"]) for of in memory] == [
        (31.0, None, 22.0),
        (21.0, None, 23.0),
    ]


@pytest.mark.parametrize(("gone", "count"), [(0, 11), (5, 11), (None, 12)])
def test_without_the_file_of_one_rank_the_others_are_not_the_run(run, gone, count):
    rundir.write_json(run.spec_json, {"launch": {"gpus": count}})
    if gone is not None:
        run.of_rank(gone).steps.unlink()
    tables, (warning,) = read_ranks(run)
    assert tables == []
    assert f"steps.rank{11 if gone is None else gone}.csv of {count} ranks: missing" in warning


def test_files_of_more_ranks_than_the_spec_has_are_not_read(run):
    rundir.write_json(run.spec_json, {"launch": {"gpus": 2}})
    tables, warnings = read_ranks(run)
    assert ([rows[0].rank for rows in tables], warnings) == ([0, 1], [])

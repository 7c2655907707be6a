"""Runs on several GPUs, compared with figures computed by hand: one GPU trains 8,192 tokens per second."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ftbench.report.build import Request, report
from ftbench.report.data.axes import implied
from ftbench.report.show import shown
from ftbench.store import rundir, summary
from ftbench.store.rundir import RunDir
from ftbench.store.steps import StepsWriter
from made_runs import make_run, steps

PRICES = """
H200 SXM:
  rent: {per_hour: 4.0, currency: USD, date: 2026-11-01, source: a list}
"""


def on(out: Path, name: str, gpus: int, strategy: str, seconds: float, batch: int = 4, peaks=(40.0, 44.0)):
    """Make a run whose ranks each train a batch of samples of 2,048 tokens per step."""
    launch = {"launch.gpus": gpus, "launch.strategy": strategy, "train.batch_size": batch}
    share = {"samples": batch, "real_tokens": 2048 * batch, "padded_tokens": 2048 * batch, "label_tokens": 2047 * batch}
    total = {key: value * gpus for key, value in share.items()}
    run = make_run(out, name, steps(seconds=seconds, noise=0, **total), spec=launch)
    for rank in range(gpus if gpus > 1 else 0):
        writer = StepsWriter(run.of_rank(rank).steps)
        peak = peaks[rank % len(peaks)]
        rows = steps(seconds=seconds, noise=0, rank=rank, data_rank=rank, peak_memory_gb=peak, **share,
                     peak_reserved_gb=peak + 2, device_memory_gb=peak + 5)  # fmt: skip
        writer.append(rows)
        writer.close()
    rundir.write_json(run.summary, summary.as_dict(summary.summarise(run)))
    return run


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scaling")
    on(folder, "one", 1, "none", 1.0)
    on(folder, "two-ddp", 2, "ddp", 1.25)  # 8 samples in 1.25 s: 1.6 times one
    on(folder, "two-half", 2, "ddp", 0.625, batch=2)  # 4 samples in 0.625 s
    on(folder, "four-fsdp", 4, "fsdp", 2.0)
    (folder / "prices.yaml").write_text(PRICES)
    return folder


def told(out: Path, **request):
    return json.loads(report(Request([out / "made"], format="json", **request)).text)


def test_weak_and_strong_efficiency_are_relative_to_one_gpu(out):
    rows = {record["run_ids"]: record for record in told(out, answers=True)["scaling"]["records"]}
    assert {name: (row["gpus"], row["strategy"]) for name, row in rows.items()} == {
        "one": (1, "none"), "two-ddp": (2, "ddp"), "two-half": (2, "ddp"), "four-fsdp": (4, "fsdp"),
    }  # fmt: skip
    assert rows["two-ddp"]["tokens_per_s"] == pytest.approx(2 * 8192 / 1.25)
    assert rows["two-ddp"]["tokens_per_s_per_gpu"] == pytest.approx(8192 / 1.25)
    assert (rows["two-ddp"]["weak"], rows["two-ddp"]["strong"]) == (pytest.approx(0.8), None)
    assert (rows["two-half"]["weak"], rows["two-half"]["strong"]) == (None, pytest.approx(0.8))
    assert rows["four-fsdp"]["weak"] == pytest.approx(0.5)
    assert (rows["two-ddp"]["lowest_gb"], rows["two-ddp"]["highest_gb"]) == (40.0, 44.0)


def test_gpus_that_share_a_batch_do_not_enlarge_it(tmp_path):
    on(tmp_path, "one", 1, "none", 1.0)
    on(tmp_path, "two-tp", 2, "tp", 1.25)
    records = told(tmp_path, answers=True)["scaling"]["records"]
    assert {record["run_ids"]: record["strong"] for record in records} == {"one": None, "two-tp": pytest.approx(0.8)}


def test_strategy_comparison_accepts_a_single_gpu(out):
    compared = told(out, compare="strategy")
    rows = {record["run_ids"]: record for record in compared["comparison"]["records"]}
    assert rows["two-ddp"]["speed_ratio"] == pytest.approx(1.6, rel=1e-3)
    assert rows["two-ddp"]["differences"] == ""
    assert "batch" in rows["two-half"]["differences"]


def test_hourly_cost_counts_all_gpus(out):
    records = {record["run_ids"]: record for record in told(out, prices=out / "prices.yaml")["cost"]["records"]}
    assert records["four-fsdp"]["per_hour"] == 16.0
    assert records["one"]["per_hour"] == 4.0


def test_single_gpu_has_no_scaling_section(out, tmp_path):
    on(tmp_path, "alone", 1, "none", 1.0)
    assert "scaling" not in told(tmp_path, answers=True)


def test_card_shows_ranks(out):
    text = shown(RunDir(out / "made" / "two-ddp")).text()
    assert "2: 6,554 real tokens/s each, 40.0 to 44.0 GiB at the peak" in text


def test_contended_runs_are_not_used_for_scaling(out, tmp_path):
    on(tmp_path, "one", 1, "none", 1.0)
    run = on(tmp_path, "two", 2, "ddp", 1.0)
    written = rundir.read_json(run.summary)
    rundir.write_json(run.summary, written | {"contention": {"contended": True}})
    assert [record["gpus"] for record in told(tmp_path, answers=True)["scaling"]["records"]] == [1]


def test_malformed_ranks_keep_the_row(tmp_path):
    run = on(tmp_path, "two", 2, "ddp", 1.0)
    written = rundir.read_json(run.summary)
    rundir.write_json(run.summary, written | {"ranks": written["ranks"] | {"memory_gb": [1], "count": "two"}})
    assert report(Request([tmp_path / "made"], answers=True)).text


def test_mfu_is_relative_to_all_gpus(out):
    """Two GPUs at 1.6 times the speed have 0.8 times the MFU of one."""
    one, two = (rundir.read_json(RunDir(out / "made" / name).summary) for name in ("one", "two-ddp"))
    assert two["model_tflops"] == pytest.approx(1.6 * one["model_tflops"], rel=1e-3)
    assert two["mfu"] == pytest.approx(0.8 * one["mfu"], rel=1e-3)


def test_tp_size_is_part_of_the_strategy():
    fsdp, mesh, wider = ({"launch.strategy": "fsdp"}, {"launch.strategy": "tp+fsdp", "launch.tp": "2"},
                         {"launch.strategy": "tp+fsdp", "launch.tp": "4"})  # fmt: skip
    assert implied("launch.strategy", fsdp, mesh, "launch.tp")
    assert not implied("launch.gpus", mesh, wider, "launch.tp")


@pytest.mark.parametrize(
    ("file", "change"),
    [("machine", {"ftbench": {"commit": "0" * 40}}), ("spec_json", {"launch": {"framework": "axolotl"}})],
)
def test_scaling_is_relative_to_the_same_commit_and_framework(tmp_path, file, change):
    run = on(tmp_path, "one", 1, "none", 2.0)
    rundir.write_json(getattr(run, file), rundir.read_json(getattr(run, file)) | change)
    on(tmp_path, "two", 2, "ddp", 1.25)
    (row,) = told(tmp_path, answers=True)["scaling"]["records"]
    assert (row["gpus"], row["weak"]) == (2, None)

"""`ftbench report --estimates`: every run beside what the estimator says of it."""

import json
from pathlib import Path

import pytest

from ftbench.estimate.memory import measured
from ftbench.estimate.recorded import is_older, recorded
from ftbench.estimate.time.history import says_step_time
from ftbench.estimate.workload.model import is_rough
from ftbench.report.command import Request, report
from ftbench.store.rundir import RunDir, read_json
from made_runs import make_run


def test_every_run_of_the_frontier_has_its_estimate_beside_it():
    found = json.loads(report(Request([Path("results/h200/qwen3-8b-frontier")], "json", estimates=True)).text)
    section = found["sections"]["estimates"] if "sections" in found else found["estimates"]
    records = section["records"] if isinstance(section, dict) else section
    assert len(records) == 24
    ended = [record for record in records if record["state"] == "oom"]
    assert len(ended) == 7
    assert all(record["allocated"] is None and record["verdict"] != "fits" for record in ended)
    assert all(abs(record["allocated_error"]) < 0.01 for record in records if record["state"] == "ok")


def test_the_errors_of_the_store_are_told_in_words():
    text = report(Request([Path("results/h200/study")], "md", estimates=True)).text
    assert "Memory: estimated and measured" in text
    assert "allocated 0." in text
    assert "Said to fit and did not: none." in text
    assert "Memory: estimated" not in report(Request([Path("results/h200/study")], "md")).text


def is_estimated(spec):
    at_its_best = spec["launch"].get("settings") == "best"
    return not (at_its_best or spec["measure"].get("share_gpu"))


def test_every_step_has_its_estimate_from_the_other_runs_beside_it():
    found = json.loads(report(Request([Path("results/h200")], "json", estimates=True)).text)
    records = found["estimated_times"]["records"]
    paths = [path for path in Path("results/h200").rglob("summary.json") if not is_older(RunDir(path.parent))]
    paths = [path for path in paths if is_estimated(read_json(path.parent / "spec.json"))]
    summaries = [json.loads(path.read_text("utf-8")) for path in paths]
    timed = [each for each in summaries if each["step_time_s"] and says_step_time(each)]
    assert len(records) == len(timed)
    assert all(record["basis"] != "measured" for record in records)
    runs = (RunDir(path.parent) for path in paths)
    rough = {run.path.name for run in runs if (spec := recorded(run)) and is_rough(spec)}
    known = [record for record in records if not rough & {*record["run_ids"].split()}]
    assert sum(abs(record["step_s_error"]) < 0.2 for record in known) >= 0.95 * len(known)
    text = report(Request([Path("results/h200/study")], "md", estimates=True)).text
    assert "Time: estimated and measured" in text


def test_runs_without_a_gpu_are_told_to_have_no_row(tmp_path):
    make_run(tmp_path / "cpu", "one", machine={"gpu": None})
    said = "A run without a GPU has no row: memory and time are estimated for GPUs only."
    for form in ("table", "md", "json", "latex"):
        assert said in " ".join(report(Request([tmp_path], form, estimates=True)).text.split())
    make_run(tmp_path / "cpu", "two", machine={"gpu": None}, spec={"train.batch_size": 8})
    with_rows = Request([tmp_path, Path("results/h200/study")], "json", estimates=True)
    section = json.loads(report(with_rows).text)["estimates"]
    assert len(section["records"]) > 1
    assert section["text"][-1].startswith("2 runs without a GPU have no row")
    assert said not in report(Request([tmp_path], "md")).text
    assert "no row" not in report(Request([Path("results/h200/study")], "md", estimates=True)).text


@pytest.mark.parametrize(
    "spec",
    [
        {"optimizations.triton_kernels": True, "model.id": "openai/gpt-oss-20b"},
        {"launch.framework": "axolotl", "launch.python": "/nowhere"},
    ],
)
def test_a_run_of_which_no_formula_knows_leaves_the_others_their_estimates(tmp_path, spec):
    known = measured.measured(make_run(tmp_path, "a"))
    make_run(tmp_path, "b", spec=spec)
    assert known is not None
    assert measured.read([tmp_path]) == [known]
    found = json.loads(report(Request([tmp_path], "json", estimates=True)).text)
    assert len(found["estimates"]["records"]) == 1

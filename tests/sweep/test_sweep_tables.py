"""summary.md and sweep.json of a sweep."""

from __future__ import annotations

import json

import pytest

from ftbench.core.rows import StepRow
from ftbench.spec.experiment import Experiment, resolve
from ftbench.store import rundir
from ftbench.store.rundir import create_at, write_json
from ftbench.store.steps import StepsWriter
from ftbench.sweep.output.table import Tables
from ftbench.sweep.plan.base import Options, job
from ftbench.sweep.plan.grid import Grid


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Return summary.md of two batches. Other processes used a share of the CPUs during the first run."""
    monkeypatch.setattr(rundir.os, "fsync", lambda file: None)

    def write(share):
        options = Options(tmp_path / "exp", "a GPU")
        values = {"name": "exp", "model": {"id": "tiny/qwen3", "weights": "random"}}
        jobs = []
        for batch, others in ((1, share), (2, 0.0)):
            spec = resolve(Experiment.model_validate(values | {"train": {"batch_size": batch}}), None)
            jobs.append(job(spec, (), {"train.batch_size": batch}, 1, options.folder, options.gpu))
            run = create_at(jobs[-1].run.path)
            write_json(run.spec_json, spec.model_dump(mode="json"))
            write_json(run.machine, {"gpus": [{"name": "a GPU"}]})
            writer = StepsWriter(run.steps)
            writer.append([
                StepRow(step=i, phase="train", elapsed_time_sec=float(i), step_time_s=1.0, real_tokens=100,
                        label_tokens=100, samples=batch, loss=2.0, host_cpu_by_others=others)
                for i in range(1, 13)
            ])  # fmt: skip
            writer.close()
            write_json(run.state, {"schema": 1, "state": "ok", "wall_s": 12.0})
        plan = Grid(jobs, {}, options)
        Tables(plan, []).write()
        return (options.folder / "summary.md").read_text()

    return write


def test_contended_run_is_marked(table):
    text = table(0.9)
    states = [("ok, contended" in line) for line in text.splitlines() if "| lora |" in line]
    assert sorted(states) == [False, True]
    assert "contended: other processes used 90 % of the host's CPUs" in text


def test_uncontended_run_is_not_marked(table):
    assert "contended" not in table(0.05)


# --- sweep.json ------------------------------------------------------------------------------------------------------

BOARD = {"at": "now", "ends_at": None, "running": [], "jobs": [{"run": "a-r1", "what": "a", "state": "ok"}]}


@pytest.mark.parametrize("change", [{"jobs": [{}]}, {"running": [{}]}, {"ends_at": "soon"}], ids=repr)
def test_invalid_sweep_json_is_reported(ftbench, tmp_path, change):
    (tmp_path / "sweep.json").write_text(json.dumps(BOARD | change))
    for option in ([], ["--json"]):
        code, out, err = ftbench("sweep", "--status", tmp_path, *option)
        assert (code, out) == (2, "")
        assert err.startswith(f"ftbench: {tmp_path}: sweep.json: ")


def test_unknown_running_job_is_ignored(ftbench, tmp_path, monkeypatch):
    monkeypatch.setattr("ftbench.sweep.output.status.is_held", lambda folder: True)
    (tmp_path / "sweep.json").write_text(json.dumps(BOARD | {"running": ["../../elsewhere"]}))
    code, out, _ = ftbench("sweep", "--status", tmp_path, "--json")
    assert (code, json.loads(out)["running"]) == (0, {})


@pytest.mark.parametrize(("seconds_ago", "left"), [(0, "about 10 min 00 s"), (540, "about 60 s"), (900, None)])
def test_status_subtracts_the_time_since_sweep_json_was_written(ftbench, tmp_path, monkeypatch, seconds_ago, left):
    monkeypatch.setattr("ftbench.sweep.output.status.is_held", lambda folder: True)
    monkeypatch.setattr("ftbench.sweep.output.status.time.time", lambda: 1_800_000_000.0 + seconds_ago)
    jobs = [{"run": "a-r1", "what": "a", "state": "running"}]
    (tmp_path / "sweep.json").write_text(
        json.dumps(BOARD | {"at": "2027-01-15T08:00:00Z", "ends_at": 1_800_000_600.0, "jobs": jobs})
    )
    first = ftbench("sweep", "--status", tmp_path)[1].splitlines()[0]
    assert first.endswith(left) if left else "about" not in first

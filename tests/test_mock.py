import dataclasses
import math
import os

import pytest

from ftbench.launch import checks, mock, process, runner
from ftbench.report.data.collect import collect
from ftbench.spec import identity
from ftbench.spec.experiment import Experiment, resolve
from ftbench.store import rundir
from ftbench.store.rundir import RunDir, first_gpu, read_json
from ftbench.store.steps import read_steps
from ftbench.store.summary import read_documents
from ftbench.sweep.plan.base import on_resume, read_status

LATER = {"timeout_s": 240}  # no test waits for longer


@pytest.fixture
def pretend(tmp_path):
    """Return a function that executes a mock run. A second run with the same name replaces the first."""
    reader, writer = os.pipe()

    def run(behaviour, batch=2, method="lora", train=None, measure=None, **launch):
        spec = Experiment.model_validate(
            {
                "name": "exp",
                "model": {"id": "tiny/qwen3", "weights": "random"},
                "method": {"name": method},
                "dataset": {"name": "sample", "samples": 64},
                "train": {"batch_size": batch} | (train or {}),
                "launch": {"mock": behaviour} | LATER | launch,
                "measure": measure or {},
            }
        )
        described = runner.describe(spec)
        path = tmp_path / runner.experiment(spec) / f"{identity.slug(spec, runner.gpu_name(described))}-r1"
        if path.exists():
            rundir.archive(RunDir(path))
        order = runner.RunRequest(resolve(spec, checks.capability(described)), b"model: tiny/qwen3\n", ())
        return runner.execute(rundir.create_at(path), order, described, reader)

    yield run
    os.close(reader)
    os.close(writer)


def test_ok_writes_all_files_and_is_marked_as_mock(pretend):
    result = pretend("ok")
    run, summary = result.run, result.summary
    assert (result.exit_code, summary.state, summary.gpu) == (0, "ok", "mock (no GPU)")
    assert run.path.parent.name == "exp-mock"
    assert summary.warnings[0] == "mock: nothing was trained, the figures are invented"
    assert {path.name for path in run.path.iterdir()} == {
        "spec.yaml", "spec.json", "machine.json", "applied.json", "steps.csv", "phases.json", "summary.json",
        "state.json", "log.txt",
    }  # fmt: skip
    assert read_documents(run)[1] is None
    rows, warnings = read_steps(run.steps)
    assert ([row.step for row in rows], warnings) == (list(range(1, 11)), [])
    state = read_json(run.state)
    assert (state["state"], state["child_exit"]) == ("ok", 0)
    assert "owner" not in state
    assert summary.dataset["samples"] == 64


@pytest.fixture
def in_process(monkeypatch):
    """Train in this process, without waiting."""

    def run_child(command, *_):
        return process.Exit(mock.main(command[-1]), None, False, 1.0)

    monkeypatch.setattr(mock, "PAUSE_S", 0.0)
    monkeypatch.setattr(runner.process, "run_child", run_child)


@pytest.mark.parametrize(("batch", "state"), [(4, "ok"), (5, "oom")])
def test_oom_contains_phase_and_size(pretend, in_process, batch, state):
    result = pretend("oom", batch=batch, mock_fits=4)
    summary = result.summary
    assert (summary.state, result.exit_code) == (state, int(state == "oom"))
    peak = (summary.memory_gb["reserved_peak"] or 0.0) if state == "ok" else batch + 2.0
    assert (peak <= first_gpu(read_json(result.run.machine))["memory_gb"]) == (state == "ok")
    if state == "ok":
        return
    assert summary.oom == {"kind": "allocator", "bytes_requested": 5 * 2**28, "phase": "forward", "step": 1}
    assert summary.reason == "out of memory (allocator) in forward of step 1, 1.25 GiB requested"
    assert (summary.steps["total"], summary.step_time_s) == (0, {})


def test_crash_is_an_error_with_the_last_line_of_the_log(pretend):
    result = pretend("crash")
    assert (result.summary.state, result.exit_code) == ("error", 1)
    assert result.summary.reason == "exit code 1 without a result: RuntimeError: mock: crash"
    assert "Traceback" in result.run.log.read_text()


def test_a_mock_is_ended_after_the_timeout(pretend):
    result = pretend("slow", timeout_s=0.6)
    assert (result.summary.state, result.exit_code) == ("timeout", 1)
    assert result.summary.reason == "not finished after launch.timeout_s = 0.6 seconds"


@pytest.mark.parametrize(
    ("column", "first", "said"),
    [
        (
            "loss",
            1,
            "the loss is not a number in 10 steps, first in step 1: check the model's weights for NaN",
        ),
        ("loss", 4, "the loss is not a number in 7 steps, first in step 4: lower train.learning_rate"),
        ("grad_norm", 9, "the gradient norm is not a number in 2 steps, first in step 9: lower train.learning_rate"),
    ],
)
def test_a_run_with_nan_losses_or_gradients_has_failed(pretend, in_process, monkeypatch, column, first, said):
    """The command's exit code, the run's own files, a sweep and a report agree."""
    row = mock._row

    def broken(spec, step, steps):
        return dataclasses.replace(row(spec, step, steps), **({column: math.nan} if step >= first else {}))

    monkeypatch.setattr(mock, "_row", broken)
    result = pretend("ok")
    assert (result.exit_code, result.summary.state) == (1, "not finite")
    assert result.summary.reason.startswith(said)
    state, (record,) = read_json(result.run.state), collect([result.run.path])
    assert (
        (state["state"], state["reason"])
        == (record["state"], record["reason"])
        == ("not finite", result.summary.reason)
    )
    status = read_status(result.run)
    assert status.done
    assert not on_resume(status, True).done
    spoiled = pretend("ok", measure={"control": "reversed_gradient"})
    assert (spoiled.exit_code, spoiled.summary.state) == (0, "ok")

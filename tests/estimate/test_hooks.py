"""Predictions of `run` and `sweep` before training."""

from __future__ import annotations

import dataclasses
import io
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ftbench.estimate import api
from ftbench.estimate.memory import largest_batch
from ftbench.estimate.memory.estimate import MemoryEstimate, estimate_memory
from ftbench.launch import checks, runner
from ftbench.spec.experiment import Experiment
from ftbench.sweep import sweep as command
from ftbench.sweep.dry_run import PlannedJob, as_text, dry_run

H200 = {"name": "NVIDIA H200", "memory_gb": 140.4, "compute_capability": [9, 0]}
SMALL = {"name": "NVIDIA L4", "memory_gb": 22.5, "compute_capability": [8, 9]}


class Claimed(Exception):
    pass


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump({
        "model": {"id": "Qwen/Qwen3-8B", "weights": "random"},
        "dataset": {"name": "synthetic", "samples": 64, "length": 2048},
    }))  # fmt: skip
    return path


@pytest.mark.parametrize(("gpu", "told"), [(SMALL, 1), (H200, 0)])
def test_a_run_warns_once_and_goes_on(
    spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: dict[str, object], told: int
) -> None:
    def create(*_: object) -> None:
        raise Claimed

    monkeypatch.setattr(runner.machine, "gpus", lambda visible, count: [gpu])
    monkeypatch.setattr(runner.rundir, "create", create)
    monkeypatch.setattr(checks, "check", lambda *_: None)
    heard: list[str] = []
    with pytest.raises(Claimed):
        runner.run(
            spec, [], tmp_path,
            on_checked=lambda spec, described: heard.extend(filter(None, [api.problem(spec, described, tmp_path)])),
        )  # fmt: skip
    assert len(heard) == told
    assert all("out of memory" in text and "22.5" in text for text in heard)


@pytest.mark.torch
def test_a_dry_run_lists_estimated_memory_and_what_does_not_fit(spec: Path, tmp_path: Path) -> None:
    half = ["model.dtype=bfloat16", "train.precision=bf16"]
    asked = command.SweepRequest(spec, half, tmp_path, axes=["train.batch_size=1,4,16"])
    ready = command.prepare(asked)
    lines = dry_run(dataclasses.replace(ready, device=H200))
    assert [line.verdict for line in lines] == ["fits", "fits", "does not fit"]
    assert [round(line.peak_gb or 0) for line in lines] == [32, 78, 263]
    assert "does not fit" in as_text(lines)
    assert [line.peak_gb for line in dry_run(ready)] == [None] * 3  # no GPU here, nothing to estimate for


@pytest.mark.torch
def test_cells_that_differ_only_in_learning_settings_share_an_estimate(
    spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = ["model.dtype=bfloat16", "train.precision=bf16"]
    axes = ["train.batch_size=1,4", "train.learning_rate=1e-4,2e-4", "train.seed=1,2", "train.weight_decay=0,0.1"]
    estimated = list[Experiment]()

    def counted(spec: Experiment, *given: Any, **options: Any) -> MemoryEstimate:
        estimated.append(spec)
        return estimate_memory(spec, *given, **options)

    monkeypatch.setattr(largest_batch, "estimate_memory", counted)
    ready = command.prepare(command.SweepRequest(spec, sets, tmp_path, axes=axes))
    lines = dry_run(dataclasses.replace(ready, device=H200))
    assert len(estimated) == 2
    each = [api.memory_on_machine(job.spec, H200, tmp_path) for job in ready.plan.statuses]
    assert [line.peak_gb for line in lines] == [memory.reserved.expected for memory in each if memory]
    assert len(lines) == 16


# --- what will not end well ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("n\n", 3), ("", 130), (None, 3)])
def test_only_a_terminal_is_asked(
    ftbench: Any, spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str | None, code: int
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(api, "problem", lambda *_: "this will not end well")
    if answer is not None:
        monkeypatch.setattr(sys, "stdin", Terminal(answer))
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    ended, _, err = ftbench("run", spec, "--set", "launch.mock=ok", "--out", tmp_path / "out")
    assert ended == code
    assert "ftbench: this will not end well" in err
    assert ("nothing was started" in err) == (code == 3)
    assert ("use --yes to start it anyway" in err) == (answer is None)
    assert (tmp_path / "out").exists() == (code == 0)


def test_with_yes_it_runs(ftbench: Any, spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "problem", lambda *_: "this will not end well")
    assert ftbench("run", spec, "--set", "launch.mock=ok", "--out", tmp_path / "out", "--yes")[0] == 0


# --- the totals of a dry run -----------------------------------------------------------------------------------------


def test_a_dry_run_ends_with_runs_time_and_energy(spec: Path, tmp_path: Path) -> None:
    lines = [PlannedJob("a", "pending", None, seconds=3600.0, joules=1.8e6), PlannedJob("b", "ok", None, seconds=99.0),
             PlannedJob("c", "pending", None, seconds=1800.0, joules=0.9e6),
             PlannedJob("d", "pending", None)]  # fmt: skip
    asked = command.SweepRequest(spec, ["launch.mock=ok"], tmp_path)
    ready = dataclasses.replace(command.prepare(asked), device=H200)
    total = as_text(lines, ready).splitlines()[-1]
    assert total == "total: 3 runs, about 1 h 30 min, 0.75 kWh of the GPU, times known for 2 of 3 runs"
    shared = dataclasses.replace(ready, slots=[*ready.slots] * 2)  # two runs on one GPU, as parity with share_gpu
    assert "3 runs, about 1 h 00 min, 2 at a time, 0.75 kWh" in as_text(lines, shared)
    unknown = as_text([PlannedJob("d", "pending", None)], ready).splitlines()[-1]
    assert unknown == "total: 1 run; time unknown until the first run ends: no formula or run covers these cells"

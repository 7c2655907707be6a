"""What `run` and `sweep` say of memory before anything is trained."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from ftbench.estimate import preflight
from ftbench.estimate.memory.estimate import MemoryEstimate
from ftbench.launch import runner
from ftbench.spec.experiment import Experiment
from ftbench.store.rundir import first_gpu
from ftbench.sweep import command
from ftbench.sweep.dry_run import as_text, dry_run

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
    def claim(*_: object) -> None:
        raise Claimed

    monkeypatch.setattr(runner.machine, "gpus", lambda visible, count: [gpu])
    monkeypatch.setattr(runner.rundir, "claim", claim)
    monkeypatch.setattr(runner, "check", lambda spec, described: None)
    heard: list[str] = []
    with pytest.raises(Claimed):
        runner.run(
            spec, [], tmp_path,
            on_checked=lambda spec, described: preflight.announce(
                spec, first_gpu(described), tmp_path, heard.append, lambda text: None
            ),
        )  # fmt: skip
    assert len(heard) == told
    assert all("out of memory" in text and "22.5" in text for text in heard)


@pytest.mark.torch
def test_a_dry_run_lists_estimated_memory_and_what_does_not_fit(spec: Path, tmp_path: Path) -> None:
    half = ["model.dtype=bfloat16", "train.precision=bf16"]
    asked = command.SweepRequest(spec, half, tmp_path, axes=["train.batch_size=1,4,16"])
    with ExitStack() as stack:
        ready = command.prepare(asked, stack)
        lines = dry_run(dataclasses.replace(ready, device=H200))
        assert [line.verdict for line in lines] == ["fits", "fits", "does not fit"]
        assert [round(line.peak_gb or 0) for line in lines] == [32, 78, 263]
        assert "does not fit" in as_text(lines)
        assert [line.peak_gb for line in dry_run(ready)] == [None] * 3  # no GPU here, nothing to estimate for


@pytest.mark.torch
def test_cells_that_differ_in_how_they_learn_share_an_estimate(
    spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = ["model.dtype=bfloat16", "train.precision=bf16"]
    axes = ["train.batch_size=1,4", "train.learning_rate=1e-4,2e-4", "train.seed=1,2", "train.weight_decay=0,0.1"]
    estimate, estimated = preflight.on_machine, list[Experiment]()

    def counted(spec: Experiment, gpu: dict[str, Any] | None, store: Path | None) -> MemoryEstimate | None:
        estimated.append(spec)
        return estimate(spec, gpu, store)

    monkeypatch.setattr(preflight, "on_machine", counted)
    with ExitStack() as stack:
        ready = command.prepare(command.SweepRequest(spec, sets, tmp_path, axes=axes), stack)
    lines = dry_run(dataclasses.replace(ready, device=H200))
    assert len(estimated) == 2
    each = [estimate(job.spec, H200, tmp_path) for job in ready.plan.standings]
    assert [line.peak_gb for line in lines] == [memory.reserved.expected for memory in each if memory]
    assert len(lines) == 16

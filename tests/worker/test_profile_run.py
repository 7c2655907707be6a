"""`ftbench profile` as a user calls it: real training of a tiny model in a separate process, recorded and read."""

from __future__ import annotations

import json
import os
import re
import subprocess
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="training libraries are not installed")

import warm
from commands import TINY, Command, Left, write_spec
from ftbench.errors import SpecError
from ftbench.profile.trace import read
from ftbench.report import build as report
from ftbench.report.show import shown
from ftbench.spec.experiment import Experiment
from ftbench.spec.identity import fingerprint
from ftbench.store import rundir
from ftbench.store.summary import PROFILED

DATA = {"name": "synthetic", "samples": 44, "length": 24, "max_length": 32}
TRAIN = {"batch_size": 2, "gradient_accumulation_steps": 2}


def profile(spec: Path, out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    words = ("profile", spec, "--out", out, "--json", *arguments)
    return warm.run(words, os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "COLUMNS": "200"})


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, cache):
    """A run of two profiled steps, each of two micro-batches, and the document that the command printed."""
    folder = tmp_path_factory.mktemp("profile")
    ended = profile(write_spec(folder, dataset=DATA, train=TRAIN), folder / "out", "--steps", "2")
    assert ended.returncode == 0, ended.stderr
    found = Left(folder / "out")
    found.stdout = ended.stdout
    return found


def test_it_trains_no_more_than_it_needs(recorded):
    assert [row.step for row in recorded.steps()] == list(range(1, 11))
    assert rundir.read_json(recorded.run.profile / "window.json")["profiled"] == [8, 9]
    assert recorded.state()["state"] == "ok"


def test_the_command_prints_what_the_run_keeps(recorded):
    document = recorded.document()
    assert document["profile"] == rundir.read_json(recorded.run.profile / "kernels.json")
    assert document["run_dir"] == str(recorded.run.path)


def test_most_of_the_time_has_a_group(recorded):
    found = recorded.document()["profile"]
    assert (found["device"], found["steps"]) == ("cpu", 2)
    assert found["covered_share"] >= 0.95
    assert {"matmul", "attention", "norm/elementwise", "optimizer", "loss"} <= {g["group"] for g in found["groups"]}
    assert 0 < found["busy_share"] <= 1
    assert found["step_ms"]["before"] > 0


def test_a_step_is_its_phases_and_each_micro_batch_has_its_own(recorded):
    trace = read(recorded.run.profile / "trace.json.gz")
    names = [name for _, _, name in trace.phases]
    assert names[: len(names) // 2] == [
        "data", "forward", "loss", "forward", "metrics", "backward", "data", "forward", "loss", "forward", "metrics",
        "backward", "data", "clip", "data", "optimizer",
    ]  # fmt: skip
    (first, last), phases = trace.window, trace.phases
    assert all(end <= begin for (_, end, _), (begin, _, _) in pairwise(phases))
    operators = [span.begin for spans in trace.threads.values() for span in spans if span.kind == "op"]
    in_steps = [begin for begin in operators if first <= begin < last]
    assert in_steps
    assert not [begin for begin in in_steps if not any(start <= begin < end for start, end, _ in phases)]


def test_the_profile_has_its_files_and_the_trace_is_packed(recorded):
    files = {path.name for path in recorded.run.profile.iterdir()}
    assert files == {"kernels.json", "trace.json.gz", "window.json"}  # memory.pickle only on a GPU


def test_no_speed_is_taken_from_it(recorded):
    summary = recorded.summary()
    assert summary["warnings"][0] == PROFILED
    assert summary["steps"]["total"] == 10
    assert not summary["step_time_s"]
    assert not summary["tokens_per_s"]
    assert summary["first_step_s"] is None
    assert summary["memory_gb"]["allocated_peak"] > 0


def test_it_is_another_experiment_than_the_run_that_is_measured():
    def of(**measure):
        return fingerprint(Experiment.model_validate({"name": "a", "model": TINY, "measure": measure}))

    assert of(profile="on") != of() == of(profile="off")
    assert of(profile=True, profile_steps=5) == of(profile="on")


def test_a_report_has_no_rate_and_show_has_the_profile_and_a_verdict(recorded):
    found = json.loads(report.report(report.Request([recorded.run.path], "json")).text)
    assert found["runs"][0].get("samples_per_hour") is None
    assert found["answer"]["left_out"] == {"profiled": 1}
    text = shown(recorded.run).text()
    assert re.search(r"^matmul .* %", text, re.MULTILINE)
    *_, said, _, tried = text.splitlines()
    assert re.match(r"verdict: \S+ takes \d+ % of the time of all operators", said)
    assert tried.split()[:2] == ["ftbench", "estimate"]


def test_profiles_have_no_speed_to_compare(recorded):
    with pytest.raises(SpecError, match="their speeds are not valid"):
        report.report(report.Request([recorded.run.path], compare="method"))


# --- ends ------------------------------------------------------------------------------------------------------------


def test_too_few_steps_are_a_sentence_before_anything_is_loaded(tmp_path):
    ended = profile(write_spec(tmp_path, dataset=DATA), tmp_path / "out", "--set", "train.max_steps=5")
    assert ended.returncode == 2
    assert "needs 11 steps to profile 3 of them, and train.max_steps is 5" in ended.stderr
    assert not (tmp_path / "out").exists()


def test_too_few_samples_are_a_sentence(train_here):
    needs = "needs 11 steps to profile 3 of them and this run has 2: set train.max_steps=11"
    with pytest.raises(SpecError, match=needs):
        train_here(dataset=DATA | {"samples": 8, "mean_length": None}, train=TRAIN, measure={"profile": "on"})


def test_interrupted_it_is_interrupted(tmp_path, cache):
    spec = write_spec(tmp_path, dataset=DATA, train=TRAIN, measure={"profile": "on"})
    with Command(spec, tmp_path / "out") as command:
        command.wait_for_phase("train")
        command.send(2)
        command.finish()
    assert command.code == 130
    assert command.state()["state"] == "interrupted"
    assert not (command.run.profile / "kernels.json").exists()


@pytest.fixture
def profiler(tmp_path, monkeypatch):
    """A profiler on a machine with a GPU, of a model that is still on the CPU."""
    import torch

    from ftbench.worker import profile as worker

    monkeypatch.setattr(worker, "device", lambda: torch.device("cuda"))
    monkeypatch.setattr(worker, "mark", lambda loop, ranges: None)
    values = {"name": "x", "model": {"id": "tiny/qwen3"}, "method": {"name": "lora"}, "dataset": DATA}
    loop = SimpleNamespace(model=torch.nn.Linear(1, 1))
    return worker.Profiler(Experiment.model_validate(values), rundir.RunDir(tmp_path), loop, None)


def test_a_model_that_fsdp_moves_to_the_gpu_later_is_profiled_there(profiler):
    assert profiler._on_gpu


@pytest.mark.parametrize("ready", [0, 1])
def test_ranks_decide_together_when_to_profile(profiler, monkeypatch, ready):
    import torch

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda value, operation: value.mul_(ready))  # of another rank
    assert profiler._is_steady(20, 40) is bool(ready)

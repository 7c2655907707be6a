"""`ftbench profile` as a user calls it: real training of a tiny model in a separate process, recorded and read."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterable
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="training libraries are not installed")

import torch

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
from ftbench.worker import parallel
from ftbench.worker.profile import callback

DATA = {"name": "synthetic", "samples": 44, "length": 24, "max_length": 32}
TRAIN = {"batch_size": 2, "gradient_accumulation_steps": 2}


def profile(spec: Path, out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    words = ("profile", spec, "--out", out, "--json", *arguments)
    return warm.run(words, os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})


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


def test_memory_is_told_by_what_it_is_for(recorded):
    found = rundir.read_json(recorded.run.profile / "memory.json")
    parameters = rundir.read_json(recorded.run.applied)["parameters"]
    frozen, adapters = parameters["total"] - parameters["trainable"], parameters["trainable"]
    assert found["peak"]["weights"] * 2**30 == pytest.approx(frozen * 4, rel=0.02)  # and a few buffers
    assert found["peak"]["adapters"] * 2**30 == pytest.approx(adapters * 4, rel=0.01)
    assert found["peak"]["optimizer"] * 2**30 == pytest.approx(adapters * 8, rel=0.01)  # two moments
    update = [point for point in found["timeline"] if point["phase"] == "optimizer"]
    assert max(point["gradients"] for point in update) * 2**30 == pytest.approx(adapters * 4, rel=0.01)
    assert found["peak"]["activations"] > 0
    assert any((each["made_by"] or "").startswith("transformers/models/qwen3") for each in found["alive"])


def test_the_profile_has_its_files_and_the_trace_is_packed(recorded):
    files = {path.name for path in recorded.run.profile.iterdir()}
    assert files == {"kernels.json", "memory.json", "trace.json.gz", "window.json"}


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


# --- a profiler that loses GPU events --------------------------------------------------------------------------------


def event(name: str, kind: str = "CPU") -> SimpleNamespace:
    return SimpleNamespace(name=lambda: name, device_type=lambda: getattr(torch.profiler.DeviceType, kind))


def test_launches_without_what_they_launched_are_lost():
    launches = [event("cudaLaunchKernel"), event("cuLaunchKernelEx"), event("cudaGraphLaunch")]
    assert callback.is_lost([event("aten::mm"), *launches])
    assert callback.is_lost([*launches, event("gemm", "CUDA")])
    assert not callback.is_lost([*launches, *[event("gemm", "CUDA")] * 3])
    assert not callback.is_lost([event("aten::mm")])  # on a CPU


def losing(place: Path) -> None:
    """Let rank 1, or the one process, take its first profile for lost."""

    def is_lost(events: Iterable[object]) -> bool:
        assert next(iter(events))
        of_rank = place.with_suffix(f".{parallel.rank() or 0}")
        tries = len(of_rank.read_text()) if of_rank.exists() else 0
        of_rank.write_text("x" * (tries + 1))
        return parallel.rank() in (None, 1) and tries == 0

    callback.is_lost = is_lost


@pytest.mark.parametrize("gpus", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_a_profile_that_one_rank_lost_is_made_once_more_by_all(tmp_path, cache, gpus):
    spec = write_spec(tmp_path, dataset=DATA, train=TRAIN | {"epochs": 2}, launch={"gpus": gpus},
                      measure={"profile": "on", "profile_steps": 2})  # fmt: skip
    with Command(spec, tmp_path / "out", before=partial(losing, tmp_path / "tries")) as command:
        assert command.finish().code == 0, command.stderr
    for rank in range(gpus):
        folder = command.run.of_rank(rank).profile
        window = rundir.read_json(folder / "window.json")
        assert (window["timed"], window["lost"], window["profiled"]) == ([4, 6], [8, 9], [11, 11])
        assert rundir.read_json(folder / "kernels.json")["steps"] == 1
        assert (folder / "memory.json").exists()
    assert [row.step for row in command.steps() if row.phase == "train"] == list(range(1, 13))


@pytest.mark.exhaustive
def test_where_no_steps_are_left_what_was_lost_is_said(tmp_path, cache):
    """The parent reads the trace and reports missing events; here nothing is missing."""
    measure = {"profile": "on", "profile_steps": 2}
    spec = write_spec(tmp_path, dataset=DATA, train=TRAIN | {"max_steps": 11}, measure=measure)
    with Command(spec, tmp_path / "out", before=partial(losing, tmp_path / "tries")) as command:
        assert command.finish().code == 0, command.stderr
    assert "lost" not in rundir.read_json(command.run.profile / "window.json")


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

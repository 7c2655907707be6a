import json
import shutil

import pytest
from gpu_traces import training

from ftbench.core.allocations import CATEGORIES
from ftbench.core.rows import StepRow
from ftbench.errors import MissingError
from ftbench.launch import runner
from ftbench.profile import files
from ftbench.profile.table import as_text
from ftbench.profile.trace import TraceError
from ftbench.store import rundir
from ftbench.store.rundir import RunDir
from ftbench.store.steps import StepsWriter
from ftbench.store.summary import summarise


@pytest.fixture
def run(tmp_path):
    """What a worker leaves: steps of 0.9 s but for those before the profiler, of 0.5 ms, and a trace."""
    found = RunDir(tmp_path / "exp" / "a-r1")
    found.profile.mkdir(parents=True)
    writer = StepsWriter(found.steps)
    writer.append([StepRow(step=n, phase="train", step_time_s=0.5e-3 if n in (4, 5, 6) else 0.9) for n in range(1, 10)])
    writer.close()
    rundir.write_json(found.profile / "window.json", {"schema": 1, "timed": [4, 6], "profiled": [8, 9]})
    training().write(found.profile / "trace.json")
    return found


def test_what_the_worker_left_becomes_what_reports_read(run):
    files.finish(run)
    assert {path.name for path in run.profile.iterdir()} == {
        "kernels.json", "trace.json.gz", "window.json"
    }  # fmt: skip
    found = files.load(run.profile)
    assert found["step_ms"]["before"] == pytest.approx(0.5)
    assert found["busy_share_unprofiled"] == pytest.approx(0.88, abs=0.01)
    assert found["trace"]["complete"]


def test_a_run_without_a_trace_is_left_as_it_is(run):
    (run.profile / "trace.json").unlink()
    files.finish(run)
    assert {path.name for path in run.profile.iterdir()} == {"window.json"}


@pytest.mark.parametrize("text", ["", "[", '{"traceEvents": []}'])
def test_a_trace_that_cannot_be_read_is_the_runs_end(run, text):
    (run.profile / "trace.json").write_text(text)
    with pytest.raises(TraceError):
        files.finish(run)
    state = runner._profile(run)
    assert state["state"] == "error"
    assert state["reason"].endswith("profile again")


def test_what_one_rank_lost_leaves_the_others_their_profile(run):
    other = run.of_rank(1)
    other.profile.mkdir(parents=True)
    shutil.copy(run.profile / "trace.json", other.profile / "trace.json")
    (run.profile / "trace.json").write_text("")
    with pytest.raises(TraceError, match="cannot be read as a trace"):
        files.finish(run)
    assert not (run.profile / "kernels.json").exists()
    assert (other.profile / "kernels.json").exists()


@pytest.mark.parametrize("lossy", [(0,), (1,), (0, 1)])
def test_a_profile_that_lost_some_kernels_of_a_rank_says_so_and_so_does_its_run(run, lossy):
    ranks = [run, run.of_rank(1)]
    ranks[1].profile.mkdir(parents=True)
    for number, rank in enumerate(ranks):
        training(steps=20).without_kernels(0.05 * (number in lossy)).write(rank.profile / "trace.json")
    rundir.write_json(run.spec_json, {"measure": {"profile": "on"}})
    files.finish(run)
    warnings = files.load(run.profile)["warnings"]
    assert [text.partition(": the profiler lost")[0] for text in warnings] == [f"rank {number}" for number in lossy]
    assert all(text in summarise(run, {"state": "ok"}).warnings for text in warnings)
    text = " ".join(as_text(files.load(run.profile), run.profile).split())
    assert all(f"warning {sentence}" in text for sentence in warnings)


@pytest.mark.parametrize("window", ["", "{}"])
def test_where_the_steps_before_are_not_known_their_time_is_not(run, window):
    (run.profile / "window.json").write_text(window)
    assert files.step_before(run) is None


def test_a_full_disk_is_told(run, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.gzip, "open", full)
    with pytest.raises(MissingError, match="no space left"):
        files.finish(run)
    assert (run.profile / "trace.json").exists()


def test_memory_that_would_read_as_zero_is_no_line(run):
    files.finish(run)
    memory = {"categories": ["weights", "adapters"], "timeline": [],
              "peak": dict.fromkeys(CATEGORIES, 0.0) | {"total_gb": 2.0, "weights": 2.0, "adapters": 1e-4,
                                                        "phase": "forward"},
              "alive": [{"category": "weights", "gb": 2.0, "tensors": 3, "made_by": "a.py:1 f"},
                        {"category": "adapters", "gb": 1e-4, "tensors": 1, "made_by": "a.py:2 f"}]}  # fmt: skip
    (run.profile / "memory.json").write_text(json.dumps(memory))
    text = as_text(files.load(run.profile), run.profile)
    assert ["weights, 3 tensors" in text, "adapters" in text] == [True, False]


def test_no_line_is_wider_than_the_terminal(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    files.finish(run)
    parts = ("weights", "adapters", "gradients", "optimizer", "activations", "temporary")
    memory = {"categories": parts, "timeline": [],
              "peak": dict.fromkeys(parts, 12.25) | {"total_gb": 73.5, "phase": "backward"},
              "alive": [{"category": part, "gb": 12.25, "tensors": 144, "made_by": "unsloth/models/llama.py:1228 "
                         "LlamaDecoderLayer_fast_forward"} for part in parts]}  # fmt: skip
    (run.profile / "memory.json").write_text(json.dumps(memory))
    lines = as_text(files.load(run.profile), run.profile).splitlines()
    assert max(map(len, lines)) <= 80


def test_the_table_tells_all_of_it(run):
    files.finish(run)
    memory = {"categories": ["weights"], "timeline": [],
              "peak": dict.fromkeys(CATEGORIES, 0.0) | {"total_gb": 2.0, "weights": 2.0, "phase": "forward"},
              "alive": [{"category": "weights", "gb": 2.0, "tensors": 3, "made_by": "a.py:1 f"}]}  # fmt: skip
    (run.profile / "memory.json").write_text(json.dumps(memory))
    text = as_text(files.load(run.profile), run.profile)
    for said in (
        "2 steps on NVIDIA H200", "1 ms profiled, 0.5 ms just before", "88.0 % of the steps just before",
        "matmul", "nvjet_sm90_tst_192x192", "aten::mm", "cudaStreamSynchronize 0.250 ms",
        "2.00 GiB at its highest, in forward: weights 2.00", "2.00 GiB  weights, 3 tensors, a.py:1 f", "trace.json.gz",
    ):  # fmt: skip
        assert said in text

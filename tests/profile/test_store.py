import gzip
import shutil

import pytest
from gpu_traces import training

from ftbench.core.rows import StepRow
from ftbench.errors import MissingError
from ftbench.launch import outcome
from ftbench.profile import analyse
from ftbench.profile.profile_table import run_text
from ftbench.profile.trace import TraceError
from ftbench.store import rundir
from ftbench.store.rundir import RunDir
from ftbench.store.steps import StepsWriter


@pytest.fixture
def run(tmp_path):
    """Make the files of a worker: steps of 0.9 s, those before the profiler of 0.5 ms, and a trace."""
    found = RunDir(tmp_path / "exp" / "a-r1")
    found.profile.mkdir(parents=True)
    writer = StepsWriter(found.steps)
    writer.append([StepRow(step=n, phase="train", step_time_s=0.5e-3 if n in (4, 5, 6) else 0.9) for n in range(1, 10)])
    writer.close()
    rundir.write_json(found.profile / "window.json", {"schema": 1, "timed": [4, 6], "profiled": [8, 9]})
    training().write(found.profile / "trace.json.gz")
    return found


def test_finish_writes_the_profile(run):
    analyse.finish(run)
    assert {path.name for path in run.profile.iterdir()} == {"kernels.json", "trace.json.gz", "window.json"}
    found = rundir.read_json(run.profile / rundir.KERNELS)
    assert found["step_ms"]["before"] == pytest.approx(0.5)
    assert found["busy_share_unprofiled"] == pytest.approx(0.88, abs=0.01)


def test_run_without_a_trace_is_unchanged(run):
    (run.profile / "trace.json.gz").unlink()
    analyse.finish(run)
    assert {path.name for path in run.profile.iterdir()} == {"window.json"}


def test_unreadable_trace_fails_the_run(run):
    (run.profile / "trace.json.gz").write_bytes(gzip.compress(b"["))
    with pytest.raises(TraceError):
        analyse.finish(run)
    state = outcome._finish_profile(run)
    assert state["state"] == "error"
    assert state["reason"].endswith("profile again")


def test_other_ranks_keep_their_profile(run):
    other = run.of_rank(1)
    other.profile.mkdir(parents=True)
    shutil.copy(run.profile / "trace.json.gz", other.profile / "trace.json.gz")
    (run.profile / "trace.json.gz").write_text("")
    with pytest.raises(TraceError, match="cannot be read as a trace"):
        analyse.finish(run)
    assert not (run.profile / "kernels.json").exists()
    assert (other.profile / "kernels.json").exists()


def test_ranks_are_shown_in_their_order(run):
    analyse.finish(run)
    document = rundir.read_json(run.profile / "kernels.json")
    for rank in range(12):
        sent = {"total_ms": float(rank), "exposed_ms": 0.0, "overlap_share": 1.0}
        folder = run.of_rank(rank).profile
        folder.mkdir(exist_ok=True)
        rundir.write_json(folder / "kernels.json", document | {"communication": sent, "steps": 1})
    lines = run_text(run).split("waited for")[1].splitlines()[1:13]
    assert [line.split()[:2] for line in lines] == [[str(rank), f"{rank}.000"] for rank in range(12)]


def test_unknown_steps_before_have_no_time(run):
    (run.profile / "window.json").write_text("")
    assert analyse.step_before(run) is None


def test_full_disk_is_an_error(run, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(analyse.rundir, "write_json", full)
    with pytest.raises(MissingError, match="no space left"):
        analyse.finish(run)


def test_text_contains_all_parts_and_fits_the_terminal(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    analyse.finish(run)
    text = run_text(run)
    for said in (
        "2 steps on NVIDIA H200", "1 ms profiled, 0.5 ms just before", "88.0 % of the steps just before",
        "matmul", "nvjet_sm90_tst_192x192", "ui.perfetto.dev",
    ):  # fmt: skip
        assert said in text
    assert "memory_viz" not in text
    (run.profile / rundir.SNAPSHOT).write_bytes(b"")
    assert "pytorch.org/memory_viz" in run_text(run)

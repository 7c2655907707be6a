"""`sweep --on slurm`: with stand-ins for Slurm's commands, and on a real Slurm if it is installed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import slurms
from ftbench.cluster import SlurmSettings, remote, slurm
from ftbench.errors import MissingError, SpecError
from ftbench.launch import runner
from ftbench.spec.load import load
from ftbench.store import rundir
from ftbench.store.steps import read_steps
from ftbench.sweep.output.status import status
from slurms import Cluster
from sweeps import ENVIRONMENT, Folder, Night, sweep, write_sweep
from waiting import eventually

AXES = {"train.batch_size": [1, 2]}
# The job runs within `sbatch --wait`.
STAND_INS = {
    "sbatch": """
for last; do :; done
for each; do case $each in --output=*) log=${each#*=};; esac; done
echo 7; echo "$@" >>$QUEUE
bash "$last" >>"$log" 2>&1""",
    "scancel": 'echo "$@" >>$QUEUE.cancelled',
    "scontrol": "echo JobId=7 JobState=CANCELLED Reason=None",
}


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> Path:
    """Put scripts of these names first on the PATH; return the file with a line per submitted job."""
    queue = folder / "queue"
    for name, text in (STAND_INS | scripts).items():
        path = folder / "bin" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\nQUEUE={queue}\n{text}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(slurm, "_POLL_S", 0.05)
    monkeypatch.setattr(slurm, "_RETRY_S", 0.01)
    monkeypatch.setattr(slurm, "SHARED_S", 0.2)
    return queue


def written(folder: Path, settings: str = "partition: debug\n", cluster: Cluster | None = None) -> Path:
    spec = write_sweep(folder, AXES)
    (folder / "slurm.yaml").write_text(settings)
    if cluster:
        cluster.settings(folder, settings)
    return spec


# --- settings and errors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "message"), [
    ("partitoin: debug", ":1: partitoin: no such key; did you mean partition?"),
    ("time: []", ":1: time: [] must be a text"),
    ("tasks: 0", ":1: tasks: 0 must be greater than or equal to 1"),
    ("partition: {", "slurm.yaml"),
], ids=str)  # fmt: skip
def test_invalid_settings_are_reported_with_line_and_key(ftbench, tmp_path, settings, message):
    code, _, err = ftbench("sweep", written(tmp_path, settings), "--out", tmp_path / "out", "--on", "slurm")
    assert (code, message in err) == (2, True), err
    assert not (tmp_path / "out").exists()


def test_missing_settings_file_is_named(ftbench, tmp_path):
    spec = write_sweep(tmp_path, AXES)
    code, _, err = ftbench("sweep", spec, "--out", tmp_path / "out", "--on", "slurm:elsewhere.yaml")
    assert (code, "elsewhere.yaml not found" in err) == (2, True)


@pytest.mark.parametrize(("sbatch", "code", "message"), [
    ("echo 'sbatch: error: Unable to contact slurm controller' >&2; exit 1", 3, "Unable to contact"),
    ("echo 'sbatch: error: invalid partition specified: debug' >&2; exit 1", 2,
     "sbatch refuses the job: invalid partition specified: debug"),
    ("echo 7", 3, "--out must be on a disk that this machine and the nodes share"),
], ids=["away", "refused", "not shared"])  # fmt: skip
def test_problem_of_the_cluster_is_one_clear_error(ftbench, tmp_path, monkeypatch, sbatch, code, message):
    install(tmp_path / "slurm", monkeypatch, sbatch=sbatch)
    monkeypatch.setenv("COLUMNS", "2000")
    ended, _, err = ftbench("sweep", written(tmp_path), "--out", tmp_path / "out", "--on", "slurm")
    assert (ended, message in err) == (code, True), err


def test_missing_sbatch_is_reported(ftbench, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, err = ftbench("sweep", written(tmp_path), "--out", tmp_path / "out", "--on", "slurm")
    assert (code, "start the sweep where `sbatch` works" in err) == (3, True), err


# --- jobs ------------------------------------------------------------------------------------------------------------


def test_sweep_on_slurm_gives_the_same_results(ftbench, tmp_path, monkeypatch):
    queue = install(tmp_path / "slurm", monkeypatch)
    spec = written(tmp_path, "options: [--exclusive]\n")
    code, out, err = ftbench("sweep", spec, "--out", tmp_path / "out", "--on", "slurm")
    assert code == 0, err
    assert ftbench("sweep", spec, "--out", tmp_path / "here")[1] == out
    assert Folder(tmp_path / "out").told() == ["ok", "ok"]
    assert ftbench("sweep", spec, "--out", tmp_path / "out", "--on", "slurm")[0] == 0
    jobs = queue.read_text().splitlines()
    assert len(jobs) == 3  # the node and two cells
    assert all("--wait --parsable --requeue --dependency=singleton" in job for job in jobs)
    more = ("--set", "launch.gpus=2", "--out", tmp_path / "out", "--on", "slurm")
    assert ftbench("sweep", spec, *more)[0] == 0
    assert Folder(tmp_path / "out").told() == ["ok"] * 4
    assert len(queue.read_text().splitlines()) == 6  # the node is described again for two GPUs


class Control:
    deadline = None

    def show(self, text: str) -> None: ...

    def stops_within(self, wait_s: float) -> bool:
        return False


def slot(tmp_path: Path, gpu: str | None = "mock (no GPU)") -> tuple[slurm.SlurmSlot, SimpleNamespace]:
    run = rundir.RunDir(tmp_path / "out/night-mock/run-r1")
    job = SimpleNamespace(run=run, spec=load(write_sweep(tmp_path)), sets=())
    return slurm.SlurmSlot("job 1", SlurmSettings(), gpu), job


@pytest.mark.parametrize(("state", "outcome", "reason"), [
    ("TIMEOUT", "timeout", "time limit reached; raise `time` in slurm.yaml"),
    ("OUT_OF_MEMORY", "oom", "out of host memory"),
    ("CANCELLED", "error", "ended without a result (CANCELLED)"),
])  # fmt: skip
def test_job_without_a_result_has_the_state_of_slurm(tmp_path, monkeypatch, state, outcome, reason):
    install(tmp_path / "slurm", monkeypatch, sbatch="echo 7", scontrol=f"echo JobId=7 JobState={state} Reason=None")
    made, job = slot(tmp_path)
    result = made.run(job, b"", Control())
    assert result.summary.state == outcome
    assert reason in result.summary.reason
    assert rundir.first_gpu(rundir.read_json(job.run.machine)) == {"name": "mock (no GPU)"}
    assert (result.summary.method, result.summary.batch_size) == (job.spec.method.name, job.spec.train.batch_size)
    killed = rundir.read_json(job.run.state).get("signal") == signal.SIGTERM
    assert killed == (state == "CANCELLED")  # only this one is retried


@pytest.mark.parametrize("code", [0, 1])
def test_job_that_cannot_be_cancelled_is_reported(tmp_path, monkeypatch, code):
    install(tmp_path / "slurm", monkeypatch, sbatch="exec sleep 60", scancel=f"exit {code}")
    monkeypatch.setattr(Control, "stops_within", lambda control, wait_s: True)
    made, job = slot(tmp_path)
    summary = made.run(job, b"", Control()).summary
    assert summary.state == "interrupted"
    assert ("may still run: scancel --me --name=ftbench-" in summary.reason) == bool(code)


def test_job_is_submitted_again_while_the_controller_is_away(tmp_path, monkeypatch):
    away = "[ -e $QUEUE ] || { touch $QUEUE; echo 'Unable to contact slurm controller' >&2; exit 1; }"
    install(tmp_path / "slurm", monkeypatch, sbatch=away + STAND_INS["sbatch"])
    made, job = slot(tmp_path)
    assert made.run(job, b"{}", Control()).summary.state == "ok"


def test_node_with_another_gpu_is_an_error(tmp_path, monkeypatch):
    install(tmp_path / "slurm", monkeypatch)
    made, job = slot(tmp_path, "NVIDIA H200")
    with pytest.raises((MissingError, SpecError), match="but the sweep uses NVIDIA H200: request one kind of GPU"):
        made.run(job, b"{}", Control())


@pytest.fixture
def order(tmp_path, monkeypatch) -> Path:
    """The folder of a submitted job, on its node."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    spec = load(write_sweep(tmp_path))
    folder = tmp_path / "out/night-mock/.slurm/run-r1"
    folder.mkdir(parents=True)
    values = {"run": "run-r1", "spec": spec.model_dump(mode="json"), "sets": [], "shared": False, "source": "{}"}
    rundir.write_json(folder / slurm.ORDER, values | {"gpu": runner.gpu_name(runner.describe(spec))})
    return folder


def test_requeued_job_starts_the_run_again(order):
    interrupted = rundir.create_at(order / "run-r1")
    assert slurm.main(order) == 0
    folder = Folder(order.parents[2])
    assert folder.told() == ["ok"]
    assert [run.path.name for run in folder.superseded()] == ["run-r1.1"]
    content = folder.content()
    assert slurm.main(order) == 0
    assert folder.content() == content
    assert not interrupted.path.exists()


def test_job_that_ends_after_ctrl_c_keeps_its_run(order, monkeypatch):
    folder, train = Folder(order.parents[2]), remote.train

    def interrupted(*arguments):
        spec = load(write_sweep(order.parents[3]))
        remote.record(rundir.RunDir(folder.path / "run-r1"), spec, "interrupted", "interrupted by a signal")
        return train(*arguments)

    monkeypatch.setattr(remote, "train", interrupted)
    assert slurm.main(order) == 0
    assert folder.told() == ["ok"]


# --- on a real Slurm -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as found:
        yield found


@pytest.fixture
def held(cluster) -> Iterator[Cluster]:
    """The cluster. Its runs wait until they are released."""
    cluster.settle()
    cluster.hold()
    yield cluster
    cluster.release()


@pytest.mark.slurm
@slurms.SKIP
def test_killed_sweep_continues_with_its_jobs(held, tmp_path):
    spec = written(tmp_path, "partition: debug\ntime: 5\n", held)
    with Night(spec, tmp_path / "out", "--on", "slurm", env=held.environment) as night:
        eventually(lambda: len(held.runs()) == 2)
        running = {process.pid for process in held.runs()}
        night.process.kill()
        night.process.communicate()
        assert {process.pid for process in held.runs()} == running
        with Night(spec, tmp_path / "out", "--on", "slurm", env=held.environment) as again:
            begun = (night.path / ".lock").stat().st_mtime_ns
            again.until(lambda: (night.path / ".lock").stat().st_mtime_ns > begun)
            assert {process.pid for process in held.runs()} == running
            held.release()
            assert again.finish().code == 0, again.stderr
    assert night.told() == ["ok"] * 2
    assert not night.superseded()


@pytest.mark.slurm
@slurms.SKIP
def test_cancelled_and_preempted_jobs_run_again(held, tmp_path):
    spec = written(tmp_path, "partition: debug\noptions: [--exclusive]\n", held)
    with Night(spec, tmp_path / "out", "--on", "slurm", env=held.environment) as night:
        eventually(lambda: len(held.runs()) == 2)
        running, board = {process.pid for process in held.runs()}, status(night.path)
        assert len(board["running"]) == 2
        jobs = held.said("squeue", "--me", "-h", "-t", "RUNNING", "-o", "%A").split()
        held.said("scancel", jobs[0])
        held.said("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 2")
        eventually(lambda: running.isdisjoint(process.pid for process in held.runs()))
        held.release()
        assert night.finish().code == 0, night.stderr
    assert night.told() == ["ok", "ok"]


@pytest.mark.slurm
@slurms.SKIP
def test_sweep_waits_for_a_controller_that_is_restarted(held, tmp_path):
    spec = written(tmp_path, "partition: debug\ntime: 5\n", held)
    with Night(spec, tmp_path / "out", "--on", "slurm", env=held.environment) as night:
        eventually(lambda: len(held.runs()) == 2)
        held.kill("slurmctld")
        held.release()
        held.start("slurmctld")
        assert night.finish().code == 0, night.stderr
    assert night.told() == ["ok", "ok"]


@pytest.mark.slurm
@slurms.SKIP
def test_ctrl_c_ends_the_jobs_and_the_sweep_resumes(held, tmp_path):
    spec = written(tmp_path, "partition: debug\noptions: [--exclusive]\n", held)
    with Night(spec, tmp_path / "out", "--on", "slurm", env=held.environment) as night:
        eventually(lambda: len(held.runs()) == 2)
        night.send(signal.SIGINT)
        assert night.finish().code == 130
    assert night.told() == ["interrupted", "interrupted"]
    eventually(lambda: not held.runs(), "a job has outlived its sweep")
    held.release()
    done = sweep(spec, tmp_path / "out", "--on", "slurm", env=held.environment)
    assert night.told() == ["ok", "ok"]
    assert sweep(spec, tmp_path / "here").stdout == done.stdout
    for run in night.runs():
        assert read_steps(run.steps)[0]
        assert not run.reserve.exists()


@pytest.mark.slurm
@slurms.SKIP
def test_cell_of_a_lost_node_runs_on_another_one(held, tmp_path):
    """This is the last test, because the cluster loses a node."""
    spec = written(tmp_path, "partition: debug\noptions: [--exclusive]\n", held)
    with Night(spec, tmp_path / "out", "--on", "slurm", env=held.environment) as night:
        eventually(lambda: len(held.runs()) == 2)
        held.lose(1)
        held.release()
        assert night.finish().code == 0, night.stderr
        assert night.told() == ["ok", "ok"]

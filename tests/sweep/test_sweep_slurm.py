"""What of `ftbench sweep --on slurm` is Slurm's alone, on a real one; and what needs none: bad settings, a cluster that
is not there, a task on its node."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import slurms
from ftbench.launch import runner
from ftbench.spec.experiment import Experiment
from ftbench.spec.load import load
from ftbench.spec.slurm import SlurmSettings
from ftbench.spec.sweep import cells
from ftbench.store import process_identity, rundir
from ftbench.sweep.execute import journal, slurm_queue, slurm_slots, slurm_task
from ftbench.sweep.execute.loop import Sitting
from ftbench.sweep.jobs import Standing
from ftbench.sweep.output.status import status
from ftbench.sweep.plan.base import Options
from ftbench.sweep.plan.grid import Grid, first_jobs
from slurms import Cluster
from sweeps import ENVIRONMENT, Folder, Night, sweep, write_sweep
from waiting import eventually

AXES, SETTINGS = {"train.batch_size": [1, 2]}, "partition: debug\ntime: 5\n"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as found:
        yield found


@pytest.fixture
def held(cluster) -> Iterator[Cluster]:
    """The cluster, whose runs wait until they are released."""
    cluster.hold()
    yield cluster
    cluster.release()


@pytest.fixture
def idle(cluster) -> Cluster:
    """The cluster, whatever the test before has left of it."""
    cluster.settle()
    return cluster


def written(folder: Path, axes: dict[str, object], settings: str = SETTINGS, cluster: Cluster | None = None) -> Path:
    spec = write_sweep(folder, axes)
    (folder / "slurm.yaml").write_text(settings)
    if cluster:
        cluster.settings(folder, settings)
    return spec


def test_a_run_that_is_moved_to_its_place_while_it_is_looked_for_is_no_error(tmp_path, monkeypatch):
    there = tmp_path / "there/run"
    there.mkdir(parents=True)
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([there, tmp_path / "moved/run"]))
    assert slurm_queue.running(tmp_path, "run").path == there


# --- on a real one ----------------------------------------------------------------------------------------------------


@pytest.mark.slurm
@slurms.SKIP
def test_a_sweep_that_was_killed_finds_its_tasks_in_the_queue(held, tmp_path):
    spec = written(tmp_path, {"train.batch_size": [1, 2, 4, 8]}, cluster=held)
    with Night(spec, tmp_path / "out", "--on", "slurm", env=held.environment) as night:
        eventually(lambda: len(held.runs()) == 4)
        running, submitted = {process.pid for process in held.runs()}, held.submitted()
        night.process.kill()  # of whose runs none is on this side
        night.process.communicate()
        assert {process.pid for process in held.runs()} == running
        made = {run.parent.name: run.parent.stat().st_ino for run in night.path.glob(".slurm/*/*/*/state.json")}
        with Night(spec, tmp_path / "out", "--on", "slurm", env=held.environment) as again:
            again.until(lambda: len(night.events("begin")) == 2)
            held.release()
            assert again.finish().code == 0, again.stderr
    assert night.told() == ["ok"] * 4
    assert {run.run_id: run.path.stat().st_ino for run in night.runs()} == made
    assert held.submitted() == submitted
    assert not night.superseded()
    assert not [*night.path.glob(".slurm/*/")]


@pytest.mark.slurm
@slurms.SKIP
def test_a_cancelled_task_and_a_preempted_one_run_again(held, tmp_path):
    spec = written(tmp_path, AXES, "partition: debug\noptions: [--exclusive]\n", cluster=held)
    with Night(spec, tmp_path / "out", "--on", "slurm", env=held.environment) as night:
        eventually(lambda: len(held.runs()) == 2)
        running, board = {process.pid for process in held.runs()}, status(night.path)
        assert board["alive"]
        assert len(board["running"]) == 2
        tasks = held.said("squeue", "--me", "-h", "-r", "-t", "RUNNING", "-o", "%F_%K").split()
        held.said("scancel", tasks[0])
        held.said("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 2")
        eventually(lambda: running.isdisjoint(process.pid for process in held.runs()))
        held.release()
        assert night.finish().code == 0, night.stderr
    assert night.told() == ["ok", "ok"]
    assert {rundir.read_json(run.state)["state"] for run in night.superseded()} <= {"error", "interrupted"}


@pytest.mark.slurm
@slurms.SKIP
def test_a_controller_that_is_away_is_waited_for(held, tmp_path):
    spec = written(tmp_path, AXES, cluster=held)
    with Night(spec, tmp_path / "out", "--on", "slurm", env=held.environment) as night:
        eventually(lambda: len(held.runs()) == 2)
        held.kill("slurmctld")
        eventually(lambda: night.events("note"))
        held.release()
        held.start("slurmctld")
        assert night.finish().code == 0, night.stderr
    assert night.told() == ["ok", "ok"]


@pytest.mark.slurm
@slurms.SKIP
@pytest.mark.parametrize(("settings", "code", "said"), [
    ("partition: nowhere", 2, "(partitions here: debug, urgent)"),
    ("gres: gpu:1", 2, "sbatch refuses: Invalid generic resource (gres) specification"),
    ("python: /nowhere/python", 3, "a node cannot run ftbench: "),
    ("preamble: exit 3", 3, "must be on a disk that this machine and the nodes share"),
], ids=str)  # fmt: skip
def test_what_the_cluster_does_not_have_is_a_sentence(idle, tmp_path, settings, code, said):
    done = sweep(written(tmp_path, AXES, settings), tmp_path / "out", "--on", "slurm", env=idle.environment)
    assert (done.code, "Traceback" in done.stderr) == (code, False)
    assert said in done.stderr


@pytest.mark.slurm
@slurms.SKIP
def test_nodes_that_take_no_task_are_named_and_the_task_that_waits_for_them_is_cancelled(idle, tmp_path):
    idle.said("scontrol", "update", "NodeName=n1,n2", "State=DRAIN", "Reason=repair")
    done = sweep(written(tmp_path, AXES), tmp_path / "out", "--on", "slurm", env=idle.environment)
    assert done.code == 3, done.stderr
    assert "no node can take a task: n1 drained (repair), n2 drained (repair): `scontrol update" in done.stderr
    assert not idle.said("squeue", "--me", "-h")
    idle.settle()


# --- without one ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "said"), [
    ("partitoin: debug", ":1: partitoin: no such key; did you mean partition?"),
    ("time: soon", ":1: time: 'soon' is not a time limit"),
    ("partition: [a, b]", ":1: partition: "),
    ("tasks: 0", ":1: tasks: 0: must be greater than or equal to 1"),
    ("options: [-p debug]", "'-p debug' is not a long option of sbatch"),
    ("options: [--array=1-3]", "--array is set by ftbench: use `tasks`"),
    ("options: [--arra=1-3]", "--array is set by ftbench: use `tasks`"),
    ("options: [--wra=date]", "--wrap is set by ftbench"),
    ("options: [--partition=debug]", "--partition is set by ftbench: use `partition`"),
    ("- debug", "slurm.yaml"), ("partition: {", "slurm.yaml"),
], ids=str)  # fmt: skip
def test_settings_that_are_wrong_are_told_by_file_line_and_key(ftbench, tmp_path, settings, said):
    spec = written(tmp_path, AXES, settings)
    code, _, err = ftbench("sweep", spec, "--out", tmp_path / "out", "--on", "slurm")
    assert code == 2
    assert said in err
    assert not (tmp_path / "out").exists()


def test_without_settings_it_says_where_they_belong(ftbench, tmp_path):
    spec = write_sweep(tmp_path, AXES)
    code, _, err = ftbench("sweep", spec, "--out", tmp_path / "out", "--on", "slurm")
    assert (code, f"there is no {tmp_path}/slurm.yaml" in err) == (2, True)
    code, _, err = ftbench("sweep", spec, "--out", tmp_path / "out", "--on", "slurm:elsewhere.yaml")
    assert (code, "there is no elsewhere.yaml" in err) == (2, True)


def commands(folder: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> None:
    """Put scripts of these names, and nothing else of Slurm's, on the PATH."""
    folder.mkdir()
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    (folder / "sh").symlink_to("/bin/sh")
    monkeypatch.setenv("PATH", str(folder))


def test_without_slurm_or_its_controller_it_says_so(ftbench, tmp_path, monkeypatch):
    spec = written(tmp_path, AXES)
    commands(tmp_path / "none", monkeypatch)
    code, _, err = ftbench("sweep", spec, "--out", tmp_path / "out", "--on", "slurm")
    assert (code, "no sbatch, squeue, scancel, scontrol on this machine" in err) == (3, True)
    away = "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
    commands(tmp_path / "away", monkeypatch, **dict.fromkeys(slurm_queue.COMMANDS, away))
    code, _, err = ftbench("sweep", spec, "--out", tmp_path / "out", "--on", "slurm")
    assert (code, "the controller of Slurm does not answer" in err) == (3, True)


@pytest.mark.parametrize("name", ["squeue", "sbatch"])
def test_commands_that_print_for_ever_are_a_sentence(ftbench, tmp_path, monkeypatch, name):
    others = {"sbatch": "echo 7", "squeue": "true", "scancel": "true", "scontrol": "true"}
    commands(tmp_path / "bin", monkeypatch, **others | {name: f"exec {shutil.which('yes')}"})
    code, _, err = ftbench("sweep", written(tmp_path, AXES), "--out", tmp_path / "out", "--on", "slurm")
    said = "sbatch refuses: prints without end" if name == "sbatch" else "the controller of Slurm does not answer"
    assert (code in {2, 3}, said in err, "Traceback" in err) == (True, True, False)


def test_lines_of_a_queue_that_are_none_of_slurms_are_passed_over(tmp_path, monkeypatch):
    lines = "ftbench-0a|7|0|RUNNING|None|n1\nftbench-0b\nftbench-0c|7|x|RUNNING|None|n1"
    told = {"sbatch": "echo 7", "squeue": f"echo '{lines}'", "scancel": "true", "scontrol": "true"}
    commands(tmp_path / "bin", monkeypatch, **told)
    queue = slurm_queue.Queue(SlurmSettings(), tmp_path)
    assert queue.entry(slurm_queue.Task(tmp_path / "0a", 0, "7")).text == "on n1"


def test_a_disk_that_is_not_shared_is_told_before_anything_runs(ftbench, tmp_path, monkeypatch):
    taken = {"sbatch": "echo 7", "squeue": "true", "scancel": "true", "scontrol": "true"}
    commands(tmp_path / "bin", monkeypatch, **taken)  # the job is over, and of what it wrote nothing came here
    code, _, err = ftbench("sweep", written(tmp_path, AXES), "--out", tmp_path / "out", "--on", "slurm")
    assert code == 3
    assert "--out must be on a disk that this machine and the nodes share" in err


def standing(folder: Path, monkeypatch: pytest.MonkeyPatch, entry: str) -> None:
    """Put commands of Slurm on the PATH in whose queue each task of `folder` stands for ever, as `entry` says."""
    queue = f'for each in {folder}/.slurm/*; do echo "ftbench-${{each##*/}}|7|0|{entry}"; done'
    told = {"sbatch": "echo 7", "scancel": "true", "scontrol": f'echo "$@" >>{folder}.said'}
    commands(folder.parent / "bin", monkeypatch, squeue=queue, **told)
    monkeypatch.setattr(slurm_queue.Queue.look, "__defaults__", (0.01,))
    monkeypatch.setattr(slurm_slots, "_POLL_S", 0.02)


@pytest.mark.parametrize(("entry", "said"), [
    ("PENDING|launch failed requeued held|", "no node starts a task"),
    ("COMPLETING|None|n1", "must be on a disk that this machine and the nodes share"),
])  # fmt: skip
def test_a_task_that_never_starts_or_never_leaves_the_queue_is_waited_for_with_an_end(
    ftbench, tmp_path, monkeypatch, entry, said
):
    spec, folder = written(tmp_path, AXES), tmp_path / "night-mock"
    standing(folder, monkeypatch, entry)
    code, _, err = ftbench("sweep", spec, "--out", tmp_path, "--on", "slurm")
    assert (code, said in err) == (3, True)
    if "held" in entry:
        assert Path(f"{folder}.said").read_text().splitlines() == ["release 7_0"] * 6
        assert err.count("a node is to describe itself, and its task waits in Slurm's queue (launch failed") == 1


@pytest.mark.parametrize(("entry", "said"), [
    ("PENDING|PartitionTimeLimit|", "no task can begin in this queue (PartitionTimeLimit): ask for what"),
    ("PENDING|ReqNodeNotAvail, UnavailableNodes:n1|", "no node can take a task: n1 drained (Duplicate jobid): "),
])  # fmt: skip
def test_a_task_that_cannot_begin_whatever_is_waited_is_a_sentence(ftbench, tmp_path, monkeypatch, entry, said):
    standing(tmp_path / "night-mock", monkeypatch, entry)
    queue = (tmp_path / "bin/squeue").read_text().replace("for", '[ "$5" = %P ] && echo debug && exit; for', 1)
    (tmp_path / "bin/squeue").write_text(queue)
    (tmp_path / "bin/sinfo").write_text("#!/bin/sh\necho 'n1|drained|Duplicate jobid'\n")
    (tmp_path / "bin/sinfo").chmod(0o755)
    code, _, err = ftbench("sweep", written(tmp_path, AXES), "--out", tmp_path, "--on", "slurm")
    assert (code, said in err) == (3, True), err


def test_a_cell_that_no_node_starts_is_an_error_and_the_sweep_goes_on(tmp_path, monkeypatch):
    standing(tmp_path, monkeypatch, "PENDING|launch failed requeued held|")
    job = SimpleNamespace(run=rundir.RunDir(tmp_path / "run-r1"), spec=load(write_sweep(tmp_path)), sets=())
    queue = slurm_queue.Queue(SlurmSettings(), tmp_path)
    result = slurm_slots.SlurmSlot("task 1", queue, None, {}).run(job, b"", control := Control())
    assert (result.summary.state, result.summary.reason) == (
        "error", "no node of Slurm's starts task 7_0 (launch failed requeued held)"
    )  # fmt: skip
    assert len(control.said) == 5


@pytest.fixture
def submission(tmp_path, monkeypatch) -> Path:
    """A submission of one task, as its node finds it."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    spec = load(write_sweep(tmp_path, launch={"mock": "slow"}, train={"max_steps": 3}))
    folder = tmp_path / "out/night-mock/.slurm/0a1b"
    folder.mkdir(parents=True)
    (folder / "spec.yaml").write_bytes(b"")
    order = {"run": "run-r1", "spec": spec.model_dump(mode="json"), "sets": [], "shared": False,
             "gpu": runner.gpu_name(runner.describe(Experiment.model_validate(spec)))}  # fmt: skip
    rundir.write_json(folder / slurm_queue.ORDERS, {"tasks": [order]})
    monkeypatch.setattr(slurm_task, "_left_s", lambda: None)
    return folder


def test_a_run_ends_before_slurms_time_limit_and_once_more_elsewhere(submission, monkeypatch, capsys):
    requeued = []
    monkeypatch.setattr(slurm_task, "_left_s", lambda: slurm_task.BEFORE_S + 1.0)
    monkeypatch.setattr(slurm_task, "_requeue", lambda: requeued.append(1) or 0)
    folder = Folder(submission.parents[2])
    assert slurm_task.main(submission, 0) == 0
    assert (len(requeued), folder.told()) == (1, [])
    (first,) = folder.superseded()
    assert rundir.read_json(first.state)["state"] == "interrupted"
    assert slurm_task.main(submission, 0) == 1
    assert (len(requeued), folder.told()) == (1, ["timeout"])
    assert "ask for more (`time` in slurm.yaml)" in rundir.read_json(folder.runs()[0].summary)["reason"]


def test_of_two_nodes_with_one_run_the_first_has_it(submission, capsys):
    folder = Folder(submission.parents[2])
    assert slurm_task.main(submission, 0) == 0
    (run,) = folder.runs()
    content = folder.content()
    late = rundir.create_at(submission / "0-late" / "run-r1")
    late.steps.write_bytes(run.steps.read_bytes())
    rundir.write_json(late.state, {"state": "ok"})
    assert slurm_task._put(slurm_task.remote.finished(late), run) == 1
    assert folder.content() == content
    assert [made.path.name for made in folder.superseded()] == ["run-r1.1"]
    assert slurm_task.main(submission, 0) == 0
    assert folder.content() == content


def test_a_node_with_another_gpu_refuses(submission):
    orders = json.loads((submission / slurm_queue.ORDERS).read_text())
    orders["tasks"][0]["gpu"] = "NVIDIA H200"
    rundir.write_json(submission / slurm_queue.ORDERS, orders)
    assert slurm_task.main(submission, 0) == 3
    task = slurm_queue.Task(submission, 0, "7")
    assert "where this sweep is on NVIDIA H200: ask for one kind, with gres" in task.outcome["error"]


@pytest.mark.parametrize(("told", "seconds"), [("3:07", 187), ("1:02:03", 3723), ("2-00:00:10", 172_810),
                                               ("UNLIMITED", None), ("", None)])  # fmt: skip
def test_the_time_that_is_left_is_slurms(tmp_path, monkeypatch, told, seconds):
    commands(tmp_path / "bin", monkeypatch, squeue=f"echo {told}")
    assert slurm_task._left_s() == seconds


def test_a_node_whose_commands_print_for_ever_or_are_not_there_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    commands(tmp_path / "bin", monkeypatch, squeue=f"exec {shutil.which('yes')}")
    assert slurm_task._left_s() is None
    assert slurm_task._requeue() == 1
    assert "scontrol requeue 7_0: " in capsys.readouterr().out


class Control:
    """What a sweep tells a slot, and hears of it."""

    deadline = None

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def show(self, text: str) -> None:
        pass

    def stops_within(self, wait_s: float) -> bool:
        time.sleep(wait_s)
        return False


def test_a_sweep_on_another_machine_holds_its_folder_while_it_shows_life(tmp_path, monkeypatch):
    monkeypatch.setattr(journal.fcntl, "flock", lambda *_: None)  # a disk whose locks other machines do not see
    elsewhere = process_identity.this_process() | {"host": "login2", "pid": 7}
    (tmp_path / journal.LOCK).write_text(json.dumps(elsewhere))
    assert journal.is_held(tmp_path)
    with pytest.raises(journal.FtbenchError, match="process 7 on login2"), journal.locked(tmp_path):
        pass
    os.utime(tmp_path / journal.LOCK, (1.0, 1.0))
    assert not journal.is_held(tmp_path)
    monkeypatch.setattr(journal, "BEAT_S", 0.01)
    with journal.locked(tmp_path):
        os.utime(tmp_path / journal.LOCK, (1.0, 1.0))
        eventually(lambda: (tmp_path / journal.LOCK).stat().st_mtime > 1.0)
    assert not journal.holder_of(tmp_path)


def test_what_is_left_is_shared_by_those_that_train_and_not_by_those_that_queue(tmp_path):
    grid = cells(write_sweep(tmp_path, {"train.batch_size": [1, 2, 4, 8]}), [])
    plan = Grid(first_jobs(grid, Options(tmp_path, None)), {}, Options(tmp_path, None))
    first, *others = plan.standings
    plan.record(first, Standing("ok", wall_s=100.0))
    slots = [SimpleNamespace(name="task", trains=trains) for trains in (True, True, False, False)]
    sitting = Sitting(b"", plan, slots, None, None, None)
    left = [sitting.left_s()]
    slots[1].trains = False
    left.append(sitting.left_s())
    assert left[1] == pytest.approx(2 * left[0])
    assert len(others) == 3

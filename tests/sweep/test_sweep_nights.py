"""One bad thing at a time: the sweep tells it in a sentence, keeps what is finished, and goes on where it can.

Real processes and real signals; the runs are mocks, but for one sweep that trains.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

import warm
from ftbench.launch import follow, process
from ftbench.store import rundir
from ftbench.store.rundir import RunDir
from ftbench.store.steps import read_steps
from sweeps import ENVIRONMENT, MOCK, Folder, Night, held, released, sweep, write_sweep
from waiting import eventually, processes_about

BATCHES = {"train.batch_size": [1, 2, 4]}
RATES = {"train.learning_rate": [1e-4, 2e-4, 3e-4, 4e-4, 5e-4]}
ENDLESS = {"launch": {"mock": "slow"}, "train": {"max_steps": 1000}}


def ftbench(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Another command of the user's, from another shell."""
    return warm.run(arguments, os.environ | ENVIRONMENT)


def ignores(pid: int, number: int) -> bool:
    """Return whether a process ignores a signal, as the kernel says."""
    (mask,) = re.findall(r"SigIgn:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(mask, 16) >> (number - 1) & 1)


def most_at_once(folder: Folder) -> int:
    """How many runs were on at the same time, as the journal tells."""
    on, most = 0, 0
    for event in folder.events("start", "ended"):
        on += 1 if event["event"] == "start" else -1
        most = max(most, on)
    return most


# --- Ctrl-C, TERM, HUP -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_run_that_is_on_and_the_same_command_goes_on(tmp_path, number):
    spec, out = write_sweep(tmp_path, {"train.batch_size": [1, 2]}), tmp_path / "out"
    with Night(spec, out, before=partial(held, tmp_path, "-b2-")) as night:
        night.until(lambda: "ok" in night.states().values())
        night.until_training()
        before = night.content()
        night.send(number)
        night.finish()
    assert night.code == 130, night.stderr
    assert "Traceback" not in night.stderr
    assert night.told() == ["interrupted", "ok"]
    assert night.children() == []
    assert "1 run still to come" in night.table()
    assert "the same command goes on" in night.stderr
    interrupted = next(run for run in night.runs() if rundir.read_json(run.state)["state"] == "interrupted")
    assert rundir.read_json(interrupted.summary)["state"] == "interrupted"
    again = sweep(spec, out)
    assert again.code == 0
    assert again.told() == ["ok", "ok"]
    assert before.items() <= again.content().items()
    assert "still to come" not in again.table()


def patient(asked: Path) -> None:
    """Wait ten minutes for a run that was asked to end, and tell that it was."""
    process.GRACE_S, killpg = 600.0, os.killpg

    def ask(group: int, number: int) -> None:
        killpg(group, number)
        if number == signal.SIGTERM:  # a program that is asked what GPU there is is killed with its group too
            asked.touch()

    os.killpg = ask


def test_a_second_ctrl_c_does_not_wait_for_a_run_that_does_not_listen(tmp_path):
    spec = write_sweep(tmp_path, BATCHES, launch={"mock": "hang"}, train={"max_steps": 5})
    with Night(spec, tmp_path / "out", before=partial(patient, tmp_path / "asked")) as night:
        night.until_training(3)
        (child,) = night.workers()
        night.until(lambda: ignores(child.pid, signal.SIGTERM))
        night.send(signal.SIGINT)
        night.until((tmp_path / "asked").exists)
        night.send(signal.SIGINT)
        night.finish()
    assert night.code == 130, night.stderr
    assert "Traceback" not in night.stderr
    assert night.told() == ["interrupted"]
    assert night.children() == []


def test_a_run_that_others_ask_to_end_leaves_the_sweep_going_and_is_still_to_come(tmp_path):
    """A TERM to the training process alone is nothing that the run did."""
    spec, out = write_sweep(tmp_path, {"train.batch_size": [1, 2]}), tmp_path / "out"
    with Night(spec, out, before=partial(held, tmp_path, "-b1-")) as night:
        run = night.until_training()
        (child,) = night.workers()
        child.terminate()
        released(tmp_path, run)  # where it is tried again
        night.finish()
    assert "Traceback" not in night.stderr
    assert len(night.runs()) == 2
    again = sweep(spec, out)
    assert again.code == 0
    assert again.states()[run.run_id] == "ok"
    assert again.told() == ["ok", "ok"]


# --- runs that hang, crash and take too long -------------------------------------------------------------------------


def impatient() -> None:
    """Take a run for hung a second after its third step, and kill it a second after it was asked to end."""
    follow.STEP_S, follow.PATIENCE, process.GRACE_S = 1.0, 0, 1.0


def test_a_run_that_hangs_is_ended_with_its_family_only_and_the_sweep_goes_on(tmp_path):
    axes = {"launch.mock": ["hang", "ok"], "train.max_steps": [5, 2]}  # of two steps nothing is learned
    section = {"axes": axes, "exclude": [{"launch.mock": "hang", "train.max_steps": 2},
                                         {"launch.mock": "ok", "train.max_steps": 5}]}  # fmt: skip
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as bystander:
        night = sweep(write_sweep(tmp_path, sweep=section), tmp_path / "out", before=impatient)
        assert bystander.poll() is None
        bystander.kill()
    assert night.code == 1, night.stderr
    assert night.told() == ["ok", "timeout"]
    assert night.children() == []
    hung = next(run for run in night.runs() if rundir.read_json(run.state)["state"] == "timeout")
    state = rundir.read_json(hung.state)
    assert state["child_exit"] == -signal.SIGKILL  # it ignores TERM
    assert "after step 3" in state["reason"]
    assert "launch.no_step_s" in state["reason"]
    assert "timeout: nothing moved" in night.table()
    assert [row.step for row in read_steps(hung.steps)[0]] == [1, 2, 3]


def test_a_run_that_takes_too_long_is_a_timeout_and_the_sweep_goes_on(tmp_path):
    axes = {"launch.mock": ["slow", "ok"], "launch.timeout_s": [1.2, 600]}
    section = {"axes": axes, "exclude": [{"launch.mock": "slow", "launch.timeout_s": 600},
                                         {"launch.mock": "ok", "launch.timeout_s": 1.2}]}  # fmt: skip
    night = sweep(write_sweep(tmp_path, sweep=section, train={"max_steps": 50}), tmp_path / "out")
    assert night.code == 1
    assert night.told() == ["ok", "timeout"]
    assert "launch.timeout_s = 1.2 seconds" in night.stderr


def test_what_failed_is_run_again_only_when_asked(tmp_path):
    spec, out = write_sweep(tmp_path, {"launch.mock": ["ok", "crash", "flaky"]}), tmp_path / "out"
    first = sweep(spec, out)
    assert (first.code, first.told()) == (1, ["error", "error", "ok"])
    kept = first.content()
    assert "RuntimeError: mock: crash" in first.table()
    again = sweep(spec, out)
    assert (again.code, len(again.started())) == (1, 3)
    retried = sweep(spec, out, "--retry-failed")
    assert (retried.code, retried.told()) == (1, ["error", "ok", "ok"])
    assert len(retried.started()) == 5
    assert len(retried.superseded()) == 2
    assert kept.items() <= retried.content().items()


def test_force_runs_everything_again_and_keeps_the_earlier_runs(tmp_path):
    spec, out = write_sweep(tmp_path, BATCHES), tmp_path / "out"
    before = sweep(spec, out).content()
    night = sweep(spec, out, "--force")
    assert (night.code, night.told()) == (0, ["ok"] * 3)
    kept = {run.run_id.rpartition(".")[0]: run.path.stat().st_ino for run in night.superseded()}
    assert kept == {name: inode for name, (inode, _, _) in before.items()}
    assert not set(kept.values()) & {inode for inode, _, _ in night.content().values()}
    sweep(spec, out, "--force")
    assert len(night.superseded()) == 6
    assert len(ftbench("report", str(out), "--format", "csv").stdout.splitlines()) == 4


# --- one sweep a folder ----------------------------------------------------------------------------------------------


def test_a_second_sweep_is_refused_and_goes_on_once_the_first_is_killed(tmp_path):
    spec, out = write_sweep(tmp_path, {"train.batch_size": [1, 2]}), tmp_path / "out"
    with Night(spec, out, before=partial(held, tmp_path, "-b1-")) as night:
        night.until_training()
        second = sweep(spec, out)
        assert (second.code, second.stdout) == (1, "")
        assert f"process {night.process.pid} " in second.stderr
        assert "--status" in second.stderr
        assert night.process.poll() is None
        assert night.told() == ["running"]
        night.kill()
    third = sweep(spec, out)
    assert (third.code, third.told()) == (0, ["ok", "ok"])
    assert len(third.superseded()) == 1


def test_two_sweeps_at_once_in_two_folders_do_not_meet(tmp_path):
    spec, wait = write_sweep(tmp_path, {"train.batch_size": [1]}), partial(held, tmp_path, "-b1-")
    with Night(spec, tmp_path / "a", before=wait) as one, Night(spec, tmp_path / "b", before=wait) as other:
        one.until_training()
        released(tmp_path, other.until_training())
        assert (one.finish().code, other.finish().code) == (0, 0)


# --- --status --------------------------------------------------------------------------------------------------------


def test_the_status_is_told_in_every_state_of_a_sweep(tmp_path):
    spec, out = write_sweep(tmp_path, {"train.batch_size": [1, 2]}, train={"max_steps": 5}), tmp_path / "out"
    with Night(spec, out, before=partial(held, tmp_path, "-b2-")) as night:
        night.until(lambda: "ok" in night.states().values())
        night.until_training()
        folder = str(night.path)
        text = ftbench("sweep", "--status", folder)
        assert text.returncode == 0, text.stderr
        assert "1 ok · 1 run left" in text.stdout
        assert "running  train.batch_size=2: step 1 of 5 · 20 %" in text.stdout
        found = json.loads(ftbench("sweep", "--status", folder, "--json").stdout)
        assert found["alive"] is True
        assert {job["state"] for job in found["jobs"]} <= {"ok", "running", "pending"}
        assert list(found["running"]) == [found["jobs"][1]["run"]]
        night.kill()
    killed = ftbench("sweep", "--status", folder).stdout
    assert "1 ok · 1 run left" in killed
    assert "the same command goes on" in killed
    found = json.loads(ftbench("sweep", "--status", folder, "--json").stdout)
    assert (found["alive"], found["running"]) == (False, {})
    assert sweep(spec, out).code == 0
    over = ftbench("sweep", "--status", folder).stdout
    assert "2 ok" in over
    assert "left" not in over
    assert str(Path(folder) / "summary.md") in over


def test_the_status_of_a_folder_without_a_sweep_is_a_sentence(tmp_path):
    none = ftbench("sweep", "--status", str(tmp_path))
    assert (none.returncode, none.stdout, none.stderr) == (2, "", f"ftbench: {tmp_path}: holds no sweep\n")
    out = tmp_path / "out"
    sweep(write_sweep(tmp_path, BATCHES), out)
    near = ftbench("sweep", "--status", str(out))
    assert (near.returncode, near.stdout) == (2, "")
    assert f"did you mean {out / 'night-mock'}?" in near.stderr
    assert ftbench("sweep", "--status", str(tmp_path / "nowhere")).returncode == 2


# --- --time-budget ---------------------------------------------------------------------------------------------------


def hurried(folder: Path) -> None:
    """Let a hundred seconds pass on a sweep's clock with each run that ends well, and a day once there is a file
    `late`."""
    monotonic = time.monotonic

    def warped() -> float:
        ended = sum('"ok"' in path.read_text() for path in folder.glob("out/*/*/state.json"))
        return monotonic() + 100 * ended + 86_400 * (folder / "late").exists()

    time.monotonic = warped


def test_a_time_budget_starts_nothing_that_cannot_end_in_time_and_the_most_telling_first(tmp_path):
    spec, out = write_sweep(tmp_path, RATES), tmp_path / "out"
    night = sweep(spec, out, "--time-budget", "390s", before=partial(hurried, tmp_path))
    assert night.code == 0, night.stderr
    assert night.told() == ["ok"] * 3  # 90 s are left, and a fourth takes more
    rates = [json.loads((night.path / name / "spec.json").read_text())["train"]["learning_rate"]
             for name in night.started()]  # fmt: skip
    assert rates == [1e-4, 5e-4, 3e-4]
    assert "2 runs still to come" in night.table()
    again = sweep(spec, out)
    assert (again.code, again.told()) == (0, ["ok"] * 5)
    assert sorted(again.started()) == sorted(again.states())


def test_a_run_that_overruns_the_time_budget_is_interrupted_and_still_to_come(tmp_path):
    spec, out = write_sweep(tmp_path, BATCHES, **ENDLESS), tmp_path / "out"
    with Night(spec, out, "--time-budget", "1h", before=partial(hurried, tmp_path)) as night:
        night.until_training()
        (tmp_path / "late").touch()
        night.finish()
    assert night.code == 0, night.stderr
    assert night.told() == ["interrupted"]
    assert "the sweep's time budget ran out" in rundir.read_json(night.runs()[0].state)["reason"]
    assert "3 runs still to come" in night.table()
    assert "3 runs left" in ftbench("sweep", "--status", str(night.path)).stdout


# --- several GPUs ----------------------------------------------------------------------------------------------------


def test_two_gpus_run_two_at_a_time_and_every_run_says_so(tmp_path):
    spec = write_sweep(tmp_path, {"train.batch_size": [1, 2, 3, 4]})
    with Night(spec, tmp_path / "out", "--gpus", "0,1", before=partial(held, tmp_path, "-b1-", "-b2-")) as night:
        night.until(lambda: night.told() == ["running"] * 2)
        for run in night.runs():
            released(tmp_path, run)
        night.finish()
    assert (night.code, night.told()) == (0, ["ok"] * 4)
    assert most_at_once(night) == 2
    assert {event["slot"] for event in night.events("start")} == {"GPU 0", "GPU 1"}
    for run in night.runs():
        assert any(text.startswith("shared host") for text in rundir.read_json(run.summary)["warnings"])
    assert "shared host" in night.table()


def test_ctrl_c_ends_the_runs_on_all_gpus(tmp_path):
    with Night(write_sweep(tmp_path, BATCHES, **ENDLESS), tmp_path / "out", "--gpus", "0,1") as night:
        night.until(lambda: len(night.workers()) == 2 and night.told() == ["running"] * 2)
        night.until_training()
        night.send(signal.SIGINT)
        night.finish()
    assert (night.code, night.told()) == (130, ["interrupted"] * 2)
    assert night.children() == []


# --- --until-oom -----------------------------------------------------------------------------------------------------


def frontier(night: Night) -> dict[str, tuple[int | None, int | None]]:
    """For each method the largest batch that fits and the first that does not."""
    board = json.loads((night.path / "sweep.json").read_text())["frontier"]
    return {
        edge["method"]: tuple((edge[name] or {}).get("batch") for name in ("largest", "first_failing"))
        for edge in board
    }  # fmt: skip


@pytest.mark.parametrize("fits", [0, 1, 11, 64])
def test_the_search_finds_the_exact_edge(tmp_path, fits):
    spec = write_sweep(tmp_path, {"method": ["lora", "qlora"]}, launch={"mock": "oom", "mock_fits": fits})
    night = sweep(spec, tmp_path / "out", "--until-oom")
    assert night.code == 0, night.stderr
    assert frontier(night) == dict.fromkeys(["lora", "qlora"], (fits or None, fits + 1))
    assert len(night.started()) == len(set(night.started()))
    assert f"| lora | {fits or 'none'} |" in night.table()


def test_a_search_that_is_killed_goes_on_without_any_trial_twice(tmp_path):
    spec = write_sweep(tmp_path, {"method": ["lora", "qlora"]}, launch={"mock": "oom", "mock_fits": 21})
    out, cut_short = tmp_path / "out", set()
    for count in (2, 5, 9):
        with Night(spec, out, "--until-oom") as night:
            night.until(lambda count=count: len(night.content()) >= count)
            night.kill()
        cut_short |= {name for name, state in night.states().items() if state == "running"}
        known = night.content()
    night = sweep(spec, out, "--until-oom")
    assert night.code == 0
    assert frontier(night) == dict.fromkeys(["lora", "qlora"], (21, 22))
    assert {name: (inode, steps) for name, (inode, _, steps) in known.items()}.items() <= {
        name: (inode, steps) for name, (inode, _, steps) in night.content().items()
    }.items()
    twice = {name for name in night.started() if night.started().count(name) > 1}
    assert twice <= cut_short
    assert [run for run in night.superseded() if rundir.read_json(run.state).get("state") in ("ok", "oom")] == []


def test_the_effective_batch_is_held_by_accumulation(tmp_path):
    spec = write_sweep(tmp_path, {"method": ["lora"]}, launch={"mock": "oom", "mock_fits": 11})
    night = sweep(spec, tmp_path / "out", "--until-oom", "--effective-batch", "24")
    assert night.code == 0, night.stderr
    assert frontier(night) == {"lora": (8, 12)}
    for run in night.runs():
        train = rundir.read_json(run.spec_json)["train"]
        assert train["batch_size"] * train["gradient_accumulation_steps"] == 24


# --- --dry-run -------------------------------------------------------------------------------------------------------


def typed(command: list[str], out: Path) -> subprocess.CompletedProcess[str]:
    assert command[0] == "ftbench"
    return ftbench(*command[1:])


def test_the_commands_of_a_dry_run_work_when_typed_and_make_the_runs_of_the_sweep(tmp_path):
    axes = {"method": ["lora", {"name": "qlora", "rank": 4}], "train.batch_size": [1, 8]}
    spec = write_sweep(tmp_path, axes, launch={"mock": "oom", "mock_fits": 4})
    out = tmp_path / "my out"
    arguments = ("sweep", str(spec), "--out", str(out), "--set", "train.max_steps=4")
    text = ftbench(*arguments, "--dry-run")
    assert text.returncode == 0, text.stderr
    assert text.stdout.count("pending") == 4
    assert not out.exists()
    commands = [shlex.split(line) for line in text.stdout.splitlines() if line.strip().startswith("ftbench run")]
    planned = json.loads(ftbench(*arguments, "--dry-run", "--json").stdout)
    assert [line["command"] for line in planned] == commands
    assert {line["state"] for line in planned} == {"pending"}
    assert [typed(command, out).returncode for command in commands] == [0, 1, 0, 1]
    night = sweep(spec, out, "--set", "train.max_steps=4")
    assert (night.code, night.started()) == (0, [])
    assert night.told() == ["ok", "ok", "oom", "oom"]
    after = json.loads(ftbench(*arguments, "--dry-run", "--json").stdout)
    assert [line["state"] for line in after] == ["ok", "oom"] * 2


def test_a_dry_run_estimates_from_what_has_ended(tmp_path):
    spec, out = write_sweep(tmp_path, BATCHES), tmp_path / "out"
    sweep(spec, out)
    lines = json.loads(
        ftbench("sweep", str(spec), "--out", str(out), "--batch-size", "1,2,4,6", "--dry-run", "--json").stdout
    )
    assert [line["state"] for line in lines] == ["ok", "ok", "ok", "pending"]
    assert lines[3]["seconds"] > 0
    assert lines[3]["peak_gb"] == pytest.approx(8.0)  # 2 GiB and one for each sample


def test_the_first_trial_of_a_search_can_be_typed(tmp_path):
    spec = write_sweep(tmp_path, {"method": ["lora"]}, launch={"mock": "oom", "mock_fits": 3})
    out = tmp_path / "out"
    (line,) = json.loads(ftbench("sweep", str(spec), "--out", str(out), "--until-oom", "--dry-run", "--json").stdout)
    assert typed(line["command"], out).returncode == 0
    night = sweep(spec, out, "--until-oom")
    assert len(night.runs()) == len(night.started()) + 1
    assert frontier(night) == {"lora": (3, 4)}


# --- a full disk -----------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=40m", "ftbench-test", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"needs to mount a small disk: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Writes to the last byte."""
    path = folder / "filler"
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    for size in (2**20, 2**12, 1):
        with suppress(OSError):
            while os.write(file, b"\0" * size):
                pass
    os.close(file)
    return path


@pytest.mark.parametrize("steps", [2, 300], ids=["at its end", "in the middle of a run"])
def test_a_disk_that_fills_up_loses_nothing_and_the_sweep_goes_on_once_there_is_room(tmp_path, small_disk, steps):
    spec, out = write_sweep(tmp_path, BATCHES, train={"max_steps": steps}), small_disk / "out"
    with Night(spec, out, before=partial(held, tmp_path, "-b2-")) as night:
        night.until(lambda: "ok" in night.states().values())
        run = night.until_training()
        before = night.content()
        filler = fill(small_disk)
        released(tmp_path, run)
        night.finish()
    assert night.code == 3, night.stderr
    assert "free some, or write elsewhere" in night.stderr
    assert "Traceback" not in night.stderr
    assert before.items() <= night.content().items()
    assert night.children() == []
    assert ftbench("sweep", "--status", str(night.path)).returncode == 0
    refused = sweep(spec, out)
    assert refused.code == 3
    assert "free some, or write elsewhere" in refused.stderr
    filler.unlink()
    again = sweep(spec, out)
    assert again.code == 0, again.stderr
    assert again.told() == ["ok"] * 3
    assert before.items() <= again.content().items()
    assert "still to come" not in again.table()


def test_a_disk_without_room_for_another_run_stops_the_sweep_before_it_is_claimed(tmp_path, small_disk):
    spec, out = write_sweep(tmp_path, BATCHES), small_disk / "out"
    with Night(spec, out, before=partial(held, tmp_path, "-b1-")) as night:
        run = night.until_training()
        (small_disk / "filler").write_bytes(b"\0" * 20 * 2**20)
        released(tmp_path, run)
        night.finish()
    assert night.code == 3, night.stderr
    assert "MiB free" in night.stderr
    assert night.told() == ["ok"]
    assert "2 runs still to come" in night.table()


# --- a clock that is set back ----------------------------------------------------------------------------------------


def warped(folder: Path) -> None:
    """Set the clock of a sweep and its runs by as many seconds as the file `offset` says, and hold its runs."""
    real = {name: getattr(time, name) for name in ("time", "time_ns", "gmtime", "localtime")}

    def offset() -> float:
        return float((folder / "offset").read_text() or 0)

    time.time = lambda: real["time"]() + offset()
    time.time_ns = lambda: real["time_ns"]() + int(offset() * 1e9)
    time.gmtime = lambda seconds=None: real["gmtime"](time.time() if seconds is None else seconds)
    time.localtime = lambda seconds=None: real["localtime"](time.time() if seconds is None else seconds)
    held(folder, "-b2-", "-b3-")


def test_a_clock_that_is_set_back_in_the_night_loses_nothing(tmp_path):
    spec, out = write_sweep(tmp_path, {"train.batch_size": [1, 2, 3, 4]}), tmp_path / "out"
    (tmp_path / "offset").write_text("86400")
    with Night(spec, out, before=partial(warped, tmp_path)) as night:
        night.until(lambda: "ok" in night.states().values())
        run = night.until_training()
        first = night.events("begin")[0]["at"]
        for path in night.path.rglob("*"):
            os.utime(path, (time.time() + 86400, time.time() + 86400))
        (tmp_path / "offset").write_text("-86400")
        released(tmp_path, run)
        night.until(lambda: night.told().count("ok") == 2)
        run = night.until_training()
        before = night.content()
        night.kill()
    released(tmp_path, run)
    assert night.events()[-1]["at"] < first, "the clock was not set back"
    (tmp_path / "offset").write_text("-172800")
    again = sweep(spec, out, before=partial(warped, tmp_path))
    assert (again.code, again.told()) == (0, ["ok"] * 4)
    assert before.items() <= again.content().items()
    for run in again.runs():
        assert 0 < rundir.read_json(run.state)["wall_s"] < 3600
    assert len(again.started()) == 5


# --- files that are torn, edited, gone -------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [1, 2, 40, 10**6])
def test_a_torn_journal_spoils_nothing(tmp_path, cut):
    """`cut` bytes of its end are missing; what is left is read, and what follows."""
    spec, out = write_sweep(tmp_path, {"train.batch_size": [1, 2]}), tmp_path / "out"
    before = sweep(spec, out)
    path = before.path / "journal.jsonl"
    text = path.read_bytes()
    path.write_bytes(text[: max(0, len(text) - cut)])
    whole = path.read_bytes().count(b"\n") + (cut == 1)  # without its newline alone a line can be read still
    again = sweep(spec, out, "--batch-size", "1,2,4")
    assert (again.code, again.told()) == (0, ["ok"] * 3)
    assert before.content().items() <= again.content().items()
    new = [event["event"] for event in again.events()[whole:]]
    assert new == ["begin", "start", "ended", "end"]


@pytest.mark.parametrize("name", ["journal.jsonl", "sweep.json", "summary.md", "summary.csv", ".lock"])
def test_no_file_of_the_sweep_is_needed_to_go_on(tmp_path, name):
    spec, out = write_sweep(tmp_path, {"train.batch_size": [1, 2]}), tmp_path / "out"
    before = sweep(spec, out)
    (before.path / name).write_bytes(b'\xff\x00{"at": "2026')
    again = sweep(spec, out)
    assert (again.code, again.told(), again.table()) == (0, ["ok"] * 2, before.table())
    assert before.content() == again.content()
    assert ftbench("sweep", "--status", str(again.path)).returncode == 0


@pytest.mark.parametrize("torn", [b"", b"{", b'{"state": "ok"', b"\xff\xff", None])
def test_a_run_whose_state_cannot_be_read_is_run_again_and_kept(tmp_path, torn):
    spec, out = write_sweep(tmp_path, {"train.batch_size": [1, 2]}), tmp_path / "out"
    run = sweep(spec, out).runs()[0]
    if torn is None:
        run.state.unlink()
    else:
        run.state.write_bytes(torn)
    again = sweep(spec, out)
    assert (again.code, again.told()) == (0, ["ok"] * 2)
    assert again.started()[2:] == [run.run_id]
    assert [RunDir(found.path).steps.exists() for found in again.superseded()] == [True]


@pytest.mark.parametrize("deleted", ["the run", "the sweep"])
def test_a_folder_that_is_deleted_in_the_night_ends_the_sweep_with_a_sentence(tmp_path, deleted):
    spec, out = write_sweep(tmp_path, {"train.batch_size": [1, 2]}), tmp_path / "out"
    with Night(spec, out, before=partial(held, tmp_path, "-b1-")) as night:
        run = night.until_training()
        folder = run.path if deleted == "the run" else night.path
        while folder.exists():  # the sweep may be writing there
            shutil.rmtree(folder, ignore_errors=True)
        released(tmp_path, run)
        night.finish()
    assert "Traceback" not in night.stderr
    assert night.code == 3
    assert "was deleted meanwhile; the same command makes it anew" in night.stderr
    again = sweep(spec, out)
    assert (again.code, again.told()) == (0, ["ok", "ok"])


@pytest.mark.parametrize("change", ["edited", "deleted"])
def test_the_spec_file_is_read_once(tmp_path, change):
    spec, out = write_sweep(tmp_path, BATCHES), tmp_path / "out"
    text = spec.read_bytes()
    with Night(spec, out, before=partial(held, tmp_path, "-b1-")) as night:
        run = night.until_training()
        if change == "edited":
            spec.write_text("model: [")
        else:
            spec.unlink()
        released(tmp_path, run)
        night.finish()
    assert (night.code, night.told()) == (0, ["ok"] * 3)
    assert {run.spec_yaml.read_bytes() for run in night.runs()} == {text}
    refused = sweep(spec, out)
    assert refused.code == 2
    assert str(spec) in refused.stderr
    assert len(night.started()) == 3


# --- mistakes --------------------------------------------------------------------------------------------------------

REAL = {"launch": {"mock": "off"}}
WRONG = [
    ({}, [], ["--axis", "train.batch_sise=1,2"], 2, "did you mean"),
    ({}, [], ["--axis", "trian.batch_size=1,2"], 2, "train"),
    ({}, [], ["--axis", "train.batch_size"], 2, "key=value,value"),
    ({}, [], ["--axis", "train.batch_size="], 2, "key=value,value"),
    ({}, [], ["--batch-size", "1,two"], 2, "two"),
    ({}, [], ["--batch-size", "0,1"], 2, "batch_size"),
    ({}, [], ["--method", "lora,lara"], 2, "lara"),
    ({}, [], ["--repeats", "0"], 2, "repeats"),
    ({}, [], ["--time-budget", "soon"], 2, "write it as 8h, 90m or 1h30m"),
    ({}, [], ["--time-budget", "0h"], 2, "write it as 8h, 90m or 1h30m"),
    ({}, [], ["--effective-batch", "8"], 2, "--until-oom"),
    ({}, [], ["--until-oom", "--effective-batch", "0"], 2, "effective-batch"),
    ({}, [], ["--until-oom", "--trial-steps", "2"], 2, "trial-steps"),
    ({}, [], ["--set", "launch.mock=maybe"], 2, "launch.mock"),
    ({}, [], ["--axis", "train.seed=" + ",".join(map(str, range(400))), "--batch-size",
              ",".join(map(str, range(1, 400)))], 2, "split it"),
    ({}, [], ["--gpus", "0,0"], 2, "--gpus"),
    ({}, [], ["--gpus", ","], 2, "--gpus"),
    ({"axes": {"train.batch_size": 4}}, [], [], 2, "list of values"),
    ({"axis": {"train.batch_size": [4]}}, [], [], 2, "did you mean axes"),
    ({"axes": {"train.batch_size": [1, 2]}, "zip": [["train.batch_size", "method"]]}, [], [], 2, "not an axis"),
    ({"axes": {"train.batch_size": [1]}, "exclude": [{"train.batch_size": 1}]}, [], [], 2, "leaves no cell"),
    ({"axes": {"launch.mock": ["ok", "off"]}}, [], [], 2, "a mock as a whole or not at all"),
    ({"axes": {"train.batch_size": [1, 2]}}, REAL, ["--until-oom"], 3, "needs a GPU"),
    ({"axes": {"train.batch_size": [1, 2]}}, REAL, ["--gpus", "0,1"], 3, "no such GPU"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("section", "parts", "arguments", "code", "said"),
    [pytest.param(*w, marks=[pytest.mark.torch] if w[4] == "needs a GPU" else []) for w in WRONG],
    ids=[f"{w[2][:2]}{list(w[0])}" for w in WRONG],
)
def test_a_mistake_is_told_in_a_sentence_before_anything_is_made(
    ftbench, monkeypatch, tmp_path, section, parts, arguments, code, said
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    spec = write_sweep(tmp_path, sweep=section, **dict(parts))
    ended, out, err = ftbench("sweep", spec, "--out", tmp_path / "out", *arguments)
    assert ended == code, err
    assert said in err
    assert "Traceback" not in err
    assert out == ""
    assert not (tmp_path / "out").exists()


NOTES = [
    ({"axes": {"launch.timeout_s": [60, 90], "method": ["lora", "qlora"]}},
     "cells that are the run of another but for launch.timeout_s run once: 2 of 4"),
]  # fmt: skip


@pytest.mark.parametrize(("section", "said"), NOTES, ids=["same"])
@pytest.mark.parametrize("more", [[], ["--until-oom"]], ids=["grid", "search"])
def test_what_does_nothing_in_a_sweep_is_told(ftbench, tmp_path, section, said, more):
    spec = write_sweep(tmp_path, sweep=section)
    code, out, err = ftbench("sweep", spec, "--out", tmp_path / "out", "--dry-run", "--json", *more)
    assert code == 0
    assert err.startswith("ftbench: note: ")
    assert err.endswith(f"{said}\n")
    assert json.loads(out)


def test_nothing_is_told_of_repeats_that_differ_and_of_lines_that_leave_out_the_same(ftbench, tmp_path):
    section = {"axes": {"method": ["lora", "qlora"], "measure.repeats": [1, 2]},
               "exclude": [{"method": "qlora"}, {"method": "qlora", "measure.repeats": 1}]}  # fmt: skip
    code, _, err = ftbench("sweep", write_sweep(tmp_path, sweep=section), "--out", tmp_path / "out", "--dry-run")
    assert (code, err) == (0, "")


def test_a_sweep_needs_a_file_that_is_one(tmp_path):
    out = tmp_path / "out"
    assert "name a spec file" in sweep(None, out).stderr
    assert sweep(None, out).code == sweep(tmp_path / "none.yaml", out).code == sweep(tmp_path, out).code == 2
    (tmp_path / "bad.yaml").write_text("model: [")
    assert sweep(tmp_path / "bad.yaml", out).code == 2
    spec = write_sweep(tmp_path, BATCHES)
    out.write_text("a file")
    assert sweep(spec, out).code == 3


@pytest.mark.parametrize(("precision", "working"), [("bf16", 3), ("auto", 2)])
def test_cells_that_cannot_work_are_told_and_the_others_run(tmp_path, precision, working):
    """Without a GPU `auto` becomes fp32, with which no fp8 goes; the cells without fp8 work all the same."""
    axes = {"method": ["lora", "qlora"], "optimizations.fp8": ["off", "rowwise"]}
    night = sweep(write_sweep(tmp_path, axes, train={"precision": precision}), tmp_path / "out")
    assert (night.code, night.told()) == (0, ["ok"] * working), night.stderr
    assert "method=qlora optimizations.fp8=rowwise" in night.table().partition("## Cannot work")[2]


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_a_cluster_without_ray_is_a_sentence(tmp_path):
    night = sweep(write_sweep(tmp_path, BATCHES), tmp_path / "out", "--on", "ray")
    assert night.code == 3, night.stderr
    assert "pip install" in night.stderr


# --- real training ---------------------------------------------------------------------------------------------------


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_a_sweep_that_trains_is_done_once_and_can_be_reported(tmp_path):
    pytest.importorskip("torch", reason="training libraries are not installed")
    spec = tmp_path / "tiny.yaml"
    spec.write_text(json.dumps(MOCK | {"name": "tiny", "sweep": {"axes": {"method": ["lora", "full"]}}}))
    first = sweep(spec, tmp_path / "out", experiment="tiny")
    assert first.code == 0, first.stderr
    assert first.told() == ["ok"] * 2
    before = first.content()
    again = sweep(spec, tmp_path / "out", experiment="tiny")
    assert (again.code, again.content(), len(again.started())) == (0, before, 2)
    assert again.table() == first.table()
    found = json.loads(ftbench("report", str(tmp_path / "out" / "tiny"), "--format", "json").stdout)
    assert sorted(run["method"] for run in found["runs"]) == ["full", "lora"]
    assert {run["steps"]["total"] if isinstance(run.get("steps"), dict) else run["steps.total"]
            for run in found["runs"]} == {3}  # fmt: skip
    eventually(lambda: not processes_about(tmp_path / "out"))

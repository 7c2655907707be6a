import errno
import os
import signal
import subprocess
import sys

import pytest

from ftbench.core import processes
from ftbench.errors import FtbenchError, MissingError
from ftbench.sweep import journal
from ftbench.sweep.journal import LOCK, Journal, holder_of, is_held, locked
from sweeps import read_journal


def events(path):
    return [{key: value for key, value in event.items() if key != "at"} for event in read_journal(path)]


def write(path, *names, **more):
    written = Journal(path)
    for name in names:
        written.write(name, **more)
    written.close()


# --- the journal -----------------------------------------------------------------------------------------------------


def test_events_are_written_with_their_time(tmp_path):
    write(tmp_path / "j", "start", what="日本語 \n two lines", wall_s=1.5, reason=None)
    (event,) = read_journal(tmp_path / "j")
    assert event.pop("at").endswith("Z")
    assert event == {"event": "start", "what": "日本語 \n two lines", "wall_s": 1.5, "reason": None}
    assert (tmp_path / "j").read_text("utf-8").count("\n") == 1


def test_links_are_not_followed(tmp_path):
    (tmp_path / "mine").write_text("valuable")
    for name in ("j", LOCK):
        (tmp_path / name).symlink_to(tmp_path / "mine")
    assert not is_held(tmp_path)
    with pytest.raises(MissingError), locked(tmp_path):
        pass
    with pytest.raises(MissingError):
        Journal(tmp_path / "j")
    assert (tmp_path / "mine").read_text() == "valuable"


def test_line_torn_at_any_byte_loses_only_itself(tmp_path):
    path = tmp_path / "j"
    write(path, "begin", "first", "second", what="名前 é")
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    kept_before = events(path)
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        write(path, "later", "last")
        ends = [len(b"".join(lines[: n + 1])) - 1 for n in range(3)]  # a line without its newline is complete
        complete = sum(size >= end for end in ends)
        assert events(path) == [*kept_before[:complete], {"event": "later"}, {"event": "last"}], f"torn at byte {size}"


def test_file_name_that_is_not_utf8_can_be_written(tmp_path):
    name = os.fsdecode("データ".encode("shift-jis"))
    write(tmp_path / "j", "note", text=name)
    assert events(tmp_path / "j") == [{"event": "note", "text": name}]


def test_folder_that_cannot_be_written_is_reported(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(MissingError, match="write elsewhere"):
        Journal(tmp_path / "file" / "j")
    with pytest.raises(MissingError, match="the folder was deleted"):
        Journal(tmp_path / "nowhere" / "j")


def test_line_torn_by_a_full_disk_does_not_damage_later_lines(tmp_path, monkeypatch):
    written, room, real = Journal(tmp_path / "j"), [10], os.write

    def write_what_fits(file, data):
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = real(file, data[: room[0]])
        room[0] -= taken
        return taken

    written.write("begin")
    with monkeypatch.context() as patch:
        patch.setattr(journal.os, "write", write_what_fits)
        with pytest.raises(MissingError, match="no space left on the disk"):
            written.write("lost")
    written.write("end")
    written.close()
    assert [event["event"] for event in read_journal(tmp_path / "j")] == ["begin", "end"]


# --- the lock --------------------------------------------------------------------------------------------------------


HOLDER = """
import subprocess, sys, time
from pathlib import Path
from ftbench.sweep.journal import locked
with locked(Path(sys.argv[1])):
    child = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL)
    print(child.pid, flush=True)
    sys.stdin.read()
child.kill()
child.wait()
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds the folder and has a child."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    child = int(process.stdout.readline())
    yield process
    process.kill()
    process.communicate()
    if processes.process_start(child) is not None:
        os.kill(child, signal.SIGKILL)


def test_folder_is_locked_within_the_block(tmp_path):
    folder = tmp_path / "new" / "folder"
    assert not is_held(folder)
    with locked(folder):
        assert is_held(folder)
        assert holder_of(folder) == processes.this_process()
    assert not is_held(folder)
    with locked(folder):
        assert is_held(folder)


def test_second_sweep_names_the_pid_of_the_first(tmp_path, holder):
    with pytest.raises(FtbenchError) as caught, locked(tmp_path):
        pytest.fail("two at once")
    assert caught.value.exit_code == 1
    assert str(caught.value) == (
        f"{tmp_path}: a sweep is already running (process {holder.pid} on {processes.this_process()['host']}); "
        f"watch it with `ftbench sweep --status {tmp_path}`, or choose another --out"
    )
    assert is_held(tmp_path)
    assert holder_of(tmp_path)["pid"] == holder.pid


def test_killed_owner_releases_the_lock_although_its_child_runs(tmp_path, holder):
    assert is_held(tmp_path)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert not is_held(tmp_path)
    assert holder_of(tmp_path)["pid"] == holder.pid
    with locked(tmp_path):
        assert holder_of(tmp_path)["pid"] == os.getpid()

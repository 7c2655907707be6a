import errno
import json
import os
import signal
import subprocess
import sys

import pytest

from ftbench.errors import FtbenchError, MissingError
from ftbench.store import process_identity
from ftbench.sweep.execute import journal
from ftbench.sweep.execute.journal import LOCK, Journal, holder_of, is_held, locked
from sweeps import read_journal


def events(path):
    return [{key: value for key, value in event.items() if key != "at"} for event in read_journal(path)]


def write(path, *names, **more):
    written = Journal(path)
    for name in names:
        written.write(name, **more)
    written.close()


# --- the journal -----------------------------------------------------------------------------------------------------


def test_events_read_back_as_they_were_written_with_their_time(tmp_path):
    write(tmp_path / "j", "start", what="日本語 \n two lines", wall_s=1.5, reason=None)
    (event,) = read_journal(tmp_path / "j")
    assert event.pop("at").endswith("Z")
    assert event == {"event": "start", "what": "日本語 \n two lines", "wall_s": 1.5, "reason": None}
    assert (tmp_path / "j").read_text("utf-8").count("\n") == 1


def test_a_second_sitting_adds_to_the_first(tmp_path):
    write(tmp_path / "j", "begin", "end")
    write(tmp_path / "j", "begin")
    assert [event["event"] for event in read_journal(tmp_path / "j")] == ["begin", "end", "begin"]


def test_an_event_is_on_its_way_to_the_disk_before_the_journal_is_closed(tmp_path):
    written = Journal(tmp_path / "j")
    written.write("begin")
    assert [event["event"] for event in read_journal(tmp_path / "j")] == ["begin"]
    written.close()


@pytest.mark.parametrize("kind", ["pipe", "link", "device"])
def test_what_is_no_plain_file_is_neither_waited_for_nor_written_into(tmp_path, kind):
    mine, path = tmp_path / "mine", tmp_path / LOCK
    mine.write_text("of great worth")
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(mine if kind == "link" else "/dev/zero")
    (tmp_path / "j").symlink_to(mine)
    assert not is_held(tmp_path)
    with pytest.raises(MissingError, match="cannot be written"), locked(tmp_path):
        pass
    with pytest.raises(MissingError, match="cannot be written"):
        Journal(tmp_path / "j")
    assert mine.read_text() == "of great worth"


def test_a_line_torn_at_any_byte_loses_only_itself(tmp_path):
    path = tmp_path / "j"
    write(path, "begin", "first", "second", what="名前 é")
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    kept_before = events(path)
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        write(path, "later", "last")
        ends = [len(b"".join(lines[: n + 1])) - 1 for n in range(3)]  # without its newline a line is whole, too
        complete = sum(size >= end for end in ends)
        assert events(path) == [*kept_before[:complete], {"event": "later"}, {"event": "last"}], f"torn at byte {size}"


@pytest.mark.parametrize("garbage", [b"\xff\xfe\x00", b"[1]", b"5", b"null", b'{"at": 1}', b"", b"{", b'"x"'])
def test_a_line_that_is_no_event_is_left_out(tmp_path, garbage):
    write(tmp_path / "j", "begin")
    with (tmp_path / "j").open("ab") as file:
        file.write(garbage + b"\n")
    write(tmp_path / "j", "end")
    assert [event["event"] for event in read_journal(tmp_path / "j")] == ["begin", "end"]


def test_a_journal_that_is_not_there_has_no_events(tmp_path):
    assert read_journal(tmp_path / "nowhere") == []


def test_a_file_name_that_is_not_utf8_can_be_told(tmp_path):
    name = os.fsdecode("データ".encode("shift-jis"))
    write(tmp_path / "j", "note", text=name)
    assert events(tmp_path / "j") == [{"event": "note", "text": name}]


def test_a_place_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(MissingError, match="write elsewhere"):
        Journal(tmp_path / "file" / "j")
    with pytest.raises(MissingError, match="its folder was deleted meanwhile"):
        Journal(tmp_path / "nowhere" / "j")


def test_a_line_that_a_full_disk_tore_spoils_no_later_one(tmp_path, monkeypatch):
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
from ftbench.sweep.execute.journal import locked
with locked(Path(sys.argv[1])):
    child = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL)
    print(child.pid, flush=True)
    sys.stdin.read()
child.kill()
child.wait()
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds the folder, with a child of its own; it lets go when its stdin is closed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    child = int(process.stdout.readline())
    yield process
    process.kill()
    process.communicate()
    if process_identity.process_start(child) is not None:
        os.kill(child, signal.SIGKILL)


def test_a_folder_is_held_within_the_block_and_free_after_it(tmp_path):
    folder = tmp_path / "new" / "folder"
    assert not is_held(folder)
    with locked(folder):
        assert is_held(folder)
        assert holder_of(folder) == process_identity.this_process()
    assert not is_held(folder)
    with locked(folder):
        assert is_held(folder)


def test_an_error_in_the_block_frees_the_folder(tmp_path):
    with pytest.raises(KeyError), locked(tmp_path):
        raise KeyError
    assert not is_held(tmp_path)


def test_a_second_sweep_is_refused_with_the_pid_of_the_first(tmp_path, holder):
    with pytest.raises(FtbenchError) as caught, locked(tmp_path):
        pytest.fail("two at once")
    assert caught.value.exit_code == 1
    assert str(caught.value) == (
        f"{tmp_path}: a sweep is running there (process {holder.pid} on {process_identity.this_process()['host']}); "
        "watch it with "
        f"`ftbench sweep --status {tmp_path}`, or give this one another --out"
    )
    assert is_held(tmp_path)
    assert holder_of(tmp_path)["pid"] == holder.pid


def test_a_second_sweep_of_the_same_process_is_refused_too(tmp_path):
    with locked(tmp_path):
        with pytest.raises(FtbenchError, match=f"process {os.getpid()} on"), locked(tmp_path):
            pytest.fail("two at once")
        assert is_held(tmp_path)


def test_the_lock_goes_with_a_killed_owner_though_its_child_lives_on(tmp_path, holder):
    assert is_held(tmp_path)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert not is_held(tmp_path)
    assert holder_of(tmp_path)["pid"] == holder.pid
    with locked(tmp_path):
        assert holder_of(tmp_path)["pid"] == os.getpid()


def test_the_lock_goes_with_an_owner_that_lets_go(tmp_path, holder):
    holder.communicate("")
    assert holder.returncode == 0
    assert not is_held(tmp_path)


def test_a_longer_description_that_was_there_leaves_nothing_behind(tmp_path):
    (tmp_path / LOCK).write_text(json.dumps({"pid": 1, "more": "x" * 1000}))
    with locked(tmp_path):
        assert holder_of(tmp_path) == process_identity.this_process()


@pytest.mark.parametrize("said", ["", "{", "5", '{"pid": 7}', '{"pid": 7, "host": null}', '{"pid": [], "host": "a"}',
                                  '{"host": "elsewhere"}'])  # fmt: skip
def test_a_holder_that_has_not_said_who_it_is_is_another_process(tmp_path, said):
    with locked(tmp_path):
        (tmp_path / LOCK).write_text(said)
        with pytest.raises(FtbenchError, match=r"running there \(another process\)"), locked(tmp_path):
            pytest.fail("two at once")


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MissingError, match="write elsewhere"), locked(tmp_path / "file" / "folder"):
        pytest.fail("held nothing")

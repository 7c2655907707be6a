"""What is asked of other programs ends, whatever they do, and leaves nothing of theirs behind."""

from __future__ import annotations

import errno
import os
import signal
import threading
from pathlib import Path

import psutil
import pytest

from ftbench.core import programs
from waiting import eventually

LONG_S = 500.0  # that nothing here comes near


def script(folder: Path, text: str) -> str:
    path = folder / "program"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def is_gone(number: Path) -> bool:
    process = int(number.read_text())
    return not psutil.pid_exists(process) or psutil.Process(process).status() == psutil.STATUS_ZOMBIE


def test_an_answer_has_what_was_printed_and_the_exit_code(tmp_path):
    program = script(tmp_path, 'cat; echo "$1 $WORD"; echo no >&2; exit 3')
    answer = programs.ask([program, "given"], LONG_S, environment={**os.environ, "WORD": "word"})
    assert (answer.returncode, answer.stdout, answer.stderr) == (3, "given word\n", "no\n")
    assert programs.ask([script(tmp_path, "kill -9 $$")], LONG_S).returncode == -signal.SIGKILL


def test_all_of_a_long_answer_is_read_though_its_pipes_close_before_its_end(tmp_path):
    program = script(tmp_path, "yes | head -c 300000; exec >&- 2>&-; sleep 0.1; exit 4")
    answer = programs.ask([program], LONG_S)
    assert (answer.returncode, len(answer.stdout)) == (4, 300_000)


@pytest.mark.parametrize("stream", ["", ">&2"])
def test_one_that_prints_for_ever_is_read_no_further(tmp_path, stream):
    with pytest.raises(OSError, match="prints without end") as error:
        programs.ask([script(tmp_path, f"echo $$ > {tmp_path}/number; exec yes {stream}")], LONG_S)
    assert error.value.errno == errno.EFBIG
    assert eventually(lambda: is_gone(tmp_path / "number"))


@pytest.mark.parametrize("then", ["sleep 900", "exec >&- 2>&-; wait", "while :; do echo; sleep 0.05; done"])
def test_one_that_does_not_end_is_killed_with_its_child_that_holds_the_pipe(tmp_path, then):
    number = tmp_path / "number"
    with pytest.raises(TimeoutError, match="does not answer"):
        programs.ask([script(tmp_path, f"sleep 900 & echo $! > {number}; {then}")], 0.5)
    assert eventually(lambda: is_gone(number))


def test_what_one_leaves_behind_with_its_pipe_is_not_waited_for(tmp_path):
    program = script(tmp_path, f"sleep 900 & echo $! > {tmp_path}/number; echo done; exit 5")
    answer = programs.ask([program], LONG_S)
    assert (answer.returncode, answer.stdout) == (5, "done\n")
    assert eventually(lambda: is_gone(tmp_path / "number"))


def test_one_that_was_asked_is_killed_where_the_user_waits_no_longer(tmp_path):
    number = tmp_path / "number"

    def interrupt() -> None:
        eventually(lambda: number.exists() and number.read_text())
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        programs.ask([script(tmp_path, f"echo $$ > {number}; exec sleep 900")], LONG_S)
    thread.join()
    assert eventually(lambda: is_gone(number))


def test_what_is_not_there_is_an_error_of_the_system(tmp_path):
    with pytest.raises(FileNotFoundError):
        programs.ask([str(tmp_path / "nothing")], LONG_S)

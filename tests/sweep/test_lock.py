import os
import signal
import subprocess
import sys

import pytest

from ftbench.core import processes
from ftbench.store.rundir import read_json
from ftbench.sweep.lock import LOCK, is_held, locked

HOLDER = """
import subprocess, sys, time
from pathlib import Path
from ftbench.sweep.lock import locked
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
        assert read_json(folder / LOCK) == processes.this_process()
    assert not is_held(folder)
    with locked(folder):
        assert is_held(folder)


def test_killed_owner_releases_the_lock_although_its_child_runs(tmp_path, holder):
    assert is_held(tmp_path)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert not is_held(tmp_path)
    assert read_json(tmp_path / LOCK)["pid"] == holder.pid
    with locked(tmp_path):
        assert read_json(tmp_path / LOCK)["pid"] == os.getpid()

"""Programs run with a time limit."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from ftbench.core.processes import run_program

LONG_S = 500.0  # never reached


def script(folder: Path, text: str) -> str:
    path = folder / "program"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_output_and_exit_code_are_returned(tmp_path):
    program = script(tmp_path, 'cat; echo "$1 $WORD"; printf "\\377" >&2; exit 3')
    answer = run_program([program, "given"], LONG_S, environment={**os.environ, "WORD": "word"})
    assert (answer.returncode, answer.stdout, answer.stderr) == (3, "given word\n", "\ufffd")
    assert run_program([script(tmp_path, "kill -9 $$")], LONG_S).returncode == -signal.SIGKILL


def test_a_program_that_runs_too_long_is_killed(tmp_path):
    with pytest.raises(TimeoutError, match="does not answer"):
        run_program([script(tmp_path, "sleep 900 & wait")], 0.5)


def test_a_missing_program_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        run_program([str(tmp_path / "nothing")], LONG_S)

"""Run `scripts/fuzz` with a fixed seed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
@pytest.mark.parametrize("cases", [4, pytest.param(20, marks=pytest.mark.exhaustive)])
def test_broken_inputs_give_error_messages(tmp_path, cases):
    command = [sys.executable, ROOT / "scripts" / "fuzz", "--rounds", "1", "--cases", str(cases), "--limit", "60"]
    done = subprocess.run([*command, "--seed", "1", "--keep", tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ": 0 failures" in done.stdout

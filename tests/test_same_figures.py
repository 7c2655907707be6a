"""Committed runs still give the figures of their summaries."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMMAND = [sys.executable, ROOT / "scripts" / "same-figures"]


def test_committed_runs_give_the_same_figures():
    done = subprocess.run(COMMAND, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[0]) >= 300


def test_a_changed_figure_is_found(tmp_path):
    shutil.copytree(ROOT / "results/h200/study", tmp_path / "study")
    path = next(tmp_path.rglob("summary.json"))
    document = json.loads(path.read_text())
    document["tokens_per_s"]["real"] *= 1.001
    path.write_text(json.dumps(document))
    done = subprocess.run([*COMMAND, tmp_path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.count("tokens_per_s.real")) == (1, 1)

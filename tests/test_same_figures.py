"""Committed runs still give the figures of their summaries."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from ftbench.store.rundir import find_runs

ROOT = Path(__file__).resolve().parents[1]
COMMAND = [sys.executable, ROOT / "scripts" / "same-figures"]


def test_committed_runs_give_the_same_figures(tmp_path):
    """A copy with another figure is found."""
    paths = [run.path for run in find_runs(ROOT / "results") if run.summary.exists()]
    for number, path in enumerate(paths):
        (tmp_path / f"{number}").symlink_to(path)
    changed = shutil.copytree(next((ROOT / "results/h200/study").rglob("summary.json")).parent, tmp_path / "changed")
    document = json.loads((changed / "summary.json").read_text())
    document["tokens_per_s"]["real"] *= 1.001
    (changed / "summary.json").write_text(json.dumps(document))
    done = subprocess.run([*COMMAND, tmp_path], capture_output=True, text=True, check=False)
    difference, last = done.stdout.splitlines()
    assert difference.startswith(f"{changed}: tokens_per_s.real: ")
    assert (done.returncode, last) == (1, f"{len(paths) + 1} runs, 1 differences")
    assert len(paths) > 1000

"""`run`, `sweep --dry-run` and `report` work without the package ftbench.estimate."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from made_runs import make_run, steps

# A None entry in sys.modules makes each import of the package raise ImportError.
PROGRAM = "import sys; sys.modules['ftbench.estimate'] = None; from ftbench import cli; cli.main()"
SPEC = """
model: {id: tiny/qwen3, weights: random}
method: lora
dataset: {name: synthetic, samples: 8, length: 16}
train: {max_steps: 2}
launch: {mock: ok}
"""


def without_estimator(folder: Path, *arguments: str) -> tuple[str, str]:
    command = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize(
    ("arguments", "note"),
    [
        (("run", "spec.yaml"), "no prediction: the package ftbench.estimate is not installed"),
        (("sweep", "spec.yaml", "--dry-run"), "no predictions: the package ftbench.estimate is not installed"),
    ],
    ids=["run", "sweep"],
)
def test_run_and_dry_run_name_the_missing_estimator(tmp_path: Path, arguments: tuple[str, ...], note: str) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC)
    out, err = without_estimator(tmp_path, *arguments)
    assert note in " ".join((out + err).split())  # lines may break anywhere


def test_report_needs_no_estimator(tmp_path: Path) -> None:
    make_run(tmp_path / "results", "a", steps())
    out, _ = without_estimator(tmp_path, "report", "results")
    assert "plain is the only recipe" in out

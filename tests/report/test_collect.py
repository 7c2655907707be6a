"""Which runs a report is about."""

from __future__ import annotations

import shutil
from pathlib import Path

from ftbench.report.data.collect import collect

PACKING = Path(__file__).resolve().parents[2] / "results" / "h200" / "qwen3-8b-packing"


def test_a_copy_of_a_run_is_no_second_repeat(tmp_path):
    shutil.copytree(PACKING, tmp_path / "copy")
    assert len(collect([PACKING, tmp_path / "copy"])) == len(collect([PACKING])) == 6


def test_another_run_of_the_same_name_is_one(tmp_path):
    shutil.copytree(PACKING, tmp_path / "copy")
    for steps in tmp_path.glob("copy/*/steps.csv"):
        steps.write_text(steps.read_text() + steps.read_text().splitlines()[-1] + "\n")
    assert len(collect([PACKING, tmp_path / "copy"])) == 12

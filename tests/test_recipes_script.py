"""`scripts/studies/recipes-h200`: names of tables and resuming, without a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def recipes(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts/studies/recipes-h200"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_table_names_are_exact_and_finished_runs_are_not_repeated(tmp_path: Path) -> None:
    lines = recipes(tmp_path, "--only", "short-equal,sustained", "--estimate").stdout.splitlines()
    assert lines[0].startswith("17 of 17 runs to do")
    assert {line.split()[4] for line in lines[1:]} == {"short-equal", "sustained"}
    wrong = recipes(tmp_path, "--only", "short", "--estimate")
    assert wrong.returncode == 2
    known = (
        "fp8, fp8-head, frameworks, frameworks-short, full, full-finetuning, images, kernels, launches-1x512, "
        "launches-4x2048, moe-gpt-oss-20b, moe-qwen3-30b-a3b, policies, qlora, short-defaults, short-equal, smallest, "
        "smallest-32b, sustained"
    )
    assert f"'short' is none of {known}" in wrong.stderr
    there = ("--only", "full,short-equal,short-defaults", "--rounds", "1", "--estimate")
    lacking = recipes(ROOT / "results/h200/headline", *there).stdout.splitlines()
    assert len(lacking) == 2  # the first line counts them
    assert "load_in_fp8: on" in lacking[1]


def test_rows_are_valid_specs_in_interleaved_order(tmp_path: Path) -> None:
    for table in (
        "full-finetuning",
        "qlora",
        "fp8",
        "kernels",
        "moe-qwen3-30b-a3b",
        "moe-gpt-oss-20b",
        "launches-1x512",
    ):
        lines = recipes(tmp_path, "--only", table, "--rounds", 2, "--estimate").stdout.splitlines()
        rows = [line.split(" s ", 1)[1] for line in lines[1:]]
        assert rows[: len(rows) // 2] == rows[len(rows) // 2 :]
        assert any("recipe=fastest" in row for row in rows)


def test_run_without_time_is_not_started(tmp_path: Path) -> None:
    told = recipes(tmp_path, "--only", "sustained", "--minutes", 5).stdout
    assert "left to do: 2 runs; the same command goes on" in told
    assert not [*tmp_path.iterdir()]

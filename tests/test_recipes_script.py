"""`scripts/studies/recipes-h200` names its tables exactly and goes on where it stopped: nothing here needs a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ftbench.core.hardware import find_gpu
from ftbench.estimate.memory.estimate import estimate_memory
from ftbench.spec.load import load

ROOT = Path(__file__).resolve().parents[1]


def recipes(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts/studies/recipes-h200"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_table_is_named_exactly_and_a_run_that_is_there_is_not_made_again(tmp_path: Path) -> None:
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


def test_frameworks_take_turns_plain_and_at_their_best(tmp_path: Path) -> None:
    told = recipes(tmp_path, "--only", "frameworks", "--estimate").stdout.splitlines()
    assert told[0].startswith("42 of 42 runs to do")
    first = [line for line in told if line.startswith("round 1")]
    assert len(first) == 14
    for words in ("framework: axolotl", "framework: llamafactory", "framework: ms-swift", "settings: best"):
        assert sum(words in line for line in first) == (6 if "best" in words else 4)


def test_rows_of_pictures_are_estimated_to_fit(tmp_path: Path) -> None:
    told = recipes(tmp_path, "--only", "images", "--estimate").stdout.splitlines()
    assert told[0].startswith("20 of 20 runs to do")
    smaller = [line for line in told[1:] if "image_size=336" in line]
    assert len(smaller) == 6
    for line in (line for line in told[1:] if "unsloth" not in line):  # with images no formula knows it
        sets = [f"train.batch_size={line.split()[5].removeprefix('b')}", *line.split()[6:]]
        estimate = estimate_memory(load(ROOT / "configs/llava-next-bf16.yaml", sets), find_gpu("NVIDIA H200") or 141.0)
        assert estimate.allocated.high < 140, line
        assert estimate.batch[0] == (4 if "recipe=plain" in line else 1)
        assert "image_size=" not in line or estimate.batch[1] == 8 * 1217


def test_rows_of_policies_can_work(tmp_path: Path) -> None:
    told = recipes(tmp_path, "--only", "policies", "--estimate").stdout.splitlines()
    assert told[0].startswith("10 of 10 runs to do")  # each was read as the spec it is


def test_every_row_of_what_was_not_measured_yet_is_a_spec_that_can_work(tmp_path: Path) -> None:
    """And peers take turns with the recipes: every row once before any row twice."""
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


def test_what_would_end_after_the_call_is_not_begun(tmp_path: Path) -> None:
    told = recipes(tmp_path, "--only", "sustained", "--minutes", 5).stdout
    assert "left to do: 2 runs; the same command goes on" in told
    assert not [*tmp_path.iterdir()]

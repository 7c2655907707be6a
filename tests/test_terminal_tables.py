"""The output of all commands fits the terminal, and a sweep ends with a ranking."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.cells import cell_len

from ftbench.core import table
from ftbench.estimate.recommend import request, text

SPEC = """
model: {id: Qwen/Qwen3-8B, weights: random}
dataset: {name: synthetic, samples: 1000, mean_length: 300}
train: {batch_size: 8}
"""
SWEEP = """
model: {id: tiny/qwen3, weights: random}
dataset: {name: synthetic, samples: 100, mean_length: 30}
train: {max_steps: 8}
measure: {repeats: 2}
launch: {mock: oom, mock_fits: 1}
sweep: {axes: {method: [qlora, lora], train.batch_size: [2, 1]}}
"""
CALLS = {
    "nothing fits": ["recommend", "SPEC", "--gpu", "L4", "--method", "full", "--deadline", "1m"],
    "estimate": ["estimate", "SPEC", "--gpu", "H100 SXM5"],
    "estimates": ["estimate", "SPEC", "--gpu", "all"],
    "ambiguous card": ["estimate", "SPEC", "--gpu", "A100 SXM"],
    "unknown key": ["estimate", "SPEC", "--set", "train.optimizzer=sgd"],
    **{what: ["list", what] for what in ("methods", "optimizations", "recipes", "models", "datasets", "gpus", "keys")},
}


@pytest.mark.parametrize(
    ("call", "columns"), [*((call, "80") for call in CALLS), ("estimates", ""), ("unknown key", "")]
)
def test_every_line_fits(ftbench, monkeypatch, tmp_path, call, columns):
    """Without COLUMNS, the output is a pipe."""
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(table, "_PIPE", 120)
    monkeypatch.chdir(tmp_path)  # a long path in a printed command cannot be wrapped
    width, spec = int(columns or 120), Path("spec.yaml")
    spec.write_text(SPEC)
    code, out, err = ftbench(*(spec if part == "SPEC" else part for part in CALLS[call]))
    assert (code in (0, 1)) != bool(err)
    assert [line for line in (out + err).splitlines() if cell_len(line) > width] == []
    assert call != "ambiguous card" or '--gpu "A100 80GB"' in err  # a command is not broken


def test_what_the_doctor_says_fits(ftbench, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert [line for line in ftbench("doctor")[1].splitlines() if cell_len(line) > 80] == []


def test_every_line_of_a_recommendation_fits(monkeypatch, tmp_path):
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC)
    answer = request.answer(
        request.RecommendRequest(spec, gpu="H100 SXM5,H200 SXM", deadline_s=8 * 3600, samples=20_000, store=tmp_path)
    )
    for width in (80, 120, 160):
        monkeypatch.setenv("COLUMNS", str(width))
        lines = text.as_text(answer).partition("\nthe best as a spec")[0].splitlines()
        assert [line for line in lines if cell_len(line) > width] == []


def test_with_wide_nothing_is_left_out(ftbench, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert "more column" in ftbench("list", "gpus")[1]
    assert "more column" not in ftbench("list", "gpus", "--wide")[1]


def test_the_end_of_a_sweep_is_ranked_and_has_a_row_for_all_repeats(ftbench, tmp_path):
    spec = tmp_path / "sweep.yaml"
    spec.write_text(SWEEP)
    code, out, _ = ftbench("sweep", spec, "--out", tmp_path / "out")
    lines = [line.split() for line in out.splitlines() if " at batch" in line and not line.startswith("skipped")]
    assert code == 0
    names = [" ".join(line[1 : line.index("batch") + 2]) for line in lines]
    assert names[:2] == ["plain at batch 1", "plain qlora at batch 1"]
    assert [line[line.index("ok") + 1] for line in lines[:2]] == ["2", "2"]
    assert ["oom" in " ".join(line) for line in lines[2:]] == [True, True]
    assert "without optimizations" in out
    reported = ftbench("report", tmp_path / "out" / "sweep-mock")[1]
    assert all(f"{line[0]}  {name} " in reported for line, name in zip(lines, names, strict=True))

"""`scripts/studies/ranks-h200`: its specs are valid, and each call ends within nine minutes."""

import runpy
from pathlib import Path

import pytest

from ftbench.spec.load import load

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = runpy.run_path(str(ROOT / "scripts/studies/ranks-h200"))
CALLS = SCRIPT["CALLS"]


@pytest.mark.parametrize("call", CALLS)
def test_specs_are_valid_and_calls_end_in_time(call):
    runs = CALLS[call]
    assert sum(run.limit_s for run in runs) <= (490 if call == "zero" else 540)
    assert len({run.name for run in runs}) == len(runs)
    for run in runs:
        spec = load(ROOT / "configs/several-gpus.yaml", list(run.sets)) if run.sets else None
        assert spec is None or spec.launch.gpus in (1, 2, 4)


def test_run_beyond_its_limit_leaves_its_output_and_no_weights(tmp_path, monkeypatch):
    weights = tmp_path / "ftbench/models/Qwen-Qwen3-14B-0"
    weights.mkdir(parents=True)
    monkeypatch.setenv("FTBENCH_CACHE", str(tmp_path / "ftbench"))
    waiting = ["sh", "-c", "echo begun; exec sleep 600"]
    monkeypatch.setitem(SCRIPT["carry_out"].__globals__, "command", lambda run, out: waiting)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    SCRIPT["carry_out"](SCRIPT["Run"]("zero3-14b-full", (), 2), tmp_path)
    assert (tmp_path / "zero3-14b-full.txt").read_text().startswith("did not end within 2 s\nbegun")
    assert not weights.exists()

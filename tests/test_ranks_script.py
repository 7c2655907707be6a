"""`scripts/ranks-h200`: what it would run on GPUs can be run, and each call ends within nine minutes."""

import runpy
from pathlib import Path

import pytest

from ftbench.spec.load import load

ROOT = Path(__file__).resolve().parents[1]
CALLS = runpy.run_path(str(ROOT / "scripts/ranks-h200"))["CALLS"]


@pytest.mark.parametrize("call", CALLS)
def test_a_call_ends_in_time_and_its_specs_are_sound(call):
    runs = CALLS[call]
    assert sum(run.limit_s for run in runs) <= 540
    assert len({run.name for run in runs}) == len(runs)
    for run in runs:
        spec = load(ROOT / "configs/several-gpus.yaml", list(run.sets)) if run.sets else None
        assert spec is None or spec.launch.gpus in (1, 2, 4)

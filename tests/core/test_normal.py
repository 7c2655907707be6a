"""Normal random numbers without numpy are numpy's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftbench.core.normal import standard_normals
from ftbench.spec.batches import synthetic_lengths
from ftbench.spec.datasets import Dataset

ROOT = Path(__file__).resolve().parents[2]


@given(st.integers(0, 2**128 - 1))
def test_draws_are_those_of_numpy_for_any_seed(seed: int):
    assert standard_normals(seed, 500) == pytest.approx(np.random.default_rng(seed).standard_normal(500), abs=1e-13)


def test_the_tail_and_the_edges_of_layers_are_met_too():
    assert standard_normals(7, 50_000) == pytest.approx(np.random.default_rng(7).standard_normal(50_000), abs=1e-13)


@given(st.integers(0, 10**6), st.integers(1, 300), st.floats(3, 900), st.integers(8, 2048))
def test_lengths_are_log_normal_draws_of_numpy_with_the_mean_asked_for(seed, count, mean, longest):
    mean = min(mean, longest - 1)
    data = Dataset(name="synthetic", samples=count, seed=seed, mean_length=mean, max_length=longest)
    normal = np.random.default_rng(seed + 1).standard_normal(count)

    def cut(mu: float) -> np.ndarray:
        return np.clip(np.rint(np.exp(mu + 0.65 * normal)), 2, longest)

    low, high = np.log(2), np.log(longest) + 4 * 0.65
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if cut(middle).mean() < mean else (low, middle)
    assert synthetic_lengths(data, count) == cut(high).tolist()


def test_an_estimate_begins_without_numpy_and_pandas():
    code = (
        "import sys; from pathlib import Path; from ftbench.estimate.command import EstimateRequest, estimate\n"
        f"root = Path({str(ROOT)!r})\n"
        "estimate(EstimateRequest(root / 'configs/qwen3-8b-lora.yaml', gpu='H200', store=root / 'results'))\n"
        "assert not {'numpy', 'pandas'} & set(sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr

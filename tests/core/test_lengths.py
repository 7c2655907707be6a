import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftbench.core import stats
from ftbench.spec.batches import packed, synthetic_lengths
from ftbench.spec.datasets import Dataset

FEW = settings(max_examples=30)
some = st.lists(st.integers(1, 512), min_size=1, max_size=120)


@FEW
@given(some)
def test_statistics_agree_with_numpy(values):
    found, array = stats.describe(values), np.array(values)
    assert (found["count"], found["total"], found["max"]) == (array.size, array.sum(), array.max())
    assert found["mean"] == pytest.approx(array.mean())
    assert [found["p50"], found["p90"], found["p99"]] == pytest.approx(np.quantile(array, [0.5, 0.9, 0.99]).tolist())


@FEW
@given(some)
def test_the_weighted_mean_is_the_mean_over_tokens(values):
    of_each_token = np.repeat(values, values)
    assert stats.describe(values)["weighted_mean"] == pytest.approx(of_each_token.mean())


@FEW
@given(some)
def test_the_histogram_counts_every_sample_once_in_its_bin(values):
    found = stats.histogram(values)
    counts, _ = np.histogram(values, bins=[*found["edges"][:-1], found["edges"][-1] - 0.5])
    assert found["counts"] == counts.tolist()
    assert sum(found["counts"]) == len(values)
    assert set(np.diff(found["edges"])) == {found["edges"][1]}


def test_padding_efficiency_is_real_tokens_over_positions():
    assert stats.padding_efficiency([10, 5, 8, 8, 3], 2) == 34 / (20 + 16 + 3)


def test_halves_pack_perfectly():
    assert len(packed([256] * 8, 512)) == 4
    assert len(packed([300, 300, 212, 212], 512)) == 2


def test_samples_that_do_not_fit_together_get_separate_rows():
    assert len(packed([300, 300], 512)) == 2


@FEW
@given(st.integers(0, 10**6), st.integers(1, 300), st.floats(3, 900), st.integers(8, 2048))
def test_synthetic_lengths_are_log_normal_with_the_given_mean(seed, count, mean, longest):
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

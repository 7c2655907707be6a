import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftbench.core import stats

FEW = settings(max_examples=30)
times = st.lists(st.floats(1e-4, 1e3), min_size=1, max_size=80)


def test_the_first_step_is_never_steady():
    assert stats.warmup_steps([]) == 0
    assert stats.warmup_steps([3.0]) == 1


def test_slow_steps_at_the_start_are_warmup():
    assert stats.warmup_steps([10.0, 3.0, 1.3, 1.0, 1.3, *[1.0] * 10]) == 3


def test_steps_within_ten_percent_are_not_warmup():
    assert stats.warmup_steps([1.0, 1.09, *[1.0] * 10]) == 1
    assert stats.warmup_steps([1.0, 1.11, *[1.0] * 10]) == 2


def test_steps_of_varying_length_are_not_warmup():
    assert stats.warmup_steps([9.0, *[2.0, 1.0, 3.0, 1.5] * 6]) == 1


def test_everything_before_a_compilation_in_the_first_half_is_warmup():
    recompiles = [1, 0, 0, 1, *[0] * 16]
    assert stats.warmup_steps([1.0] * 20, recompiles) == 4


def test_a_compilation_in_the_second_half_is_not_warmup():
    assert stats.warmup_steps([1.0] * 20, [*[0] * 15, 1, *[0] * 4]) == 1


def test_a_much_slower_step_in_the_first_half_extends_the_warmup():
    assert stats.warmup_steps([5.0, 1.0, 1.0, 4.0, *[1.0] * 16]) == 4


def test_long_samples_are_not_warmup():
    tokens = np.random.default_rng(1).lognormal(6, 1, 250).astype(int).tolist()
    times = [0.05 + count / 1000 for count in tokens]
    times[0] += 2.0
    assert stats.warmup_steps(times) > 50
    assert stats.warmup_steps(times, positions=tokens) == 1
    longest = max(range(1, 125), key=tokens.__getitem__)
    times[longest] *= 1.5
    assert stats.warmup_steps(times, positions=tokens) == 1
    times[9] += 5.0
    assert stats.warmup_steps(times, positions=tokens) == 10


@FEW
@given(st.lists(st.floats(1e-4, 1e3), min_size=2, max_size=60), st.lists(st.sampled_from([None, 0, 1]), max_size=60))
def test_warmup_is_at_least_one_step_and_at_most_half(values, recompiles):
    assert 1 <= stats.warmup_steps(values, recompiles) <= len(values) // 2


@FEW
@given(times, st.floats(0, 1))
def test_quantiles_agree_with_numpy(values, q):
    assert stats.quantile(values, q) == pytest.approx(np.quantile(values, q), rel=1e-9)


@FEW
@given(times)
def test_the_interval_contains_the_median(values):
    interval = stats.median_interval(values)
    if interval is not None:
        low, high = interval
        assert low <= statistics.median(values) <= high
        assert {low, high} <= set(values)


@pytest.mark.parametrize("n", [1, 5])
def test_fewer_than_six_values_have_no_95_percent_interval(n):
    assert stats.median_interval(list(range(n))) is None


def covered(n, k):
    """Return the probability that the median is between the k-th smallest and the k-th largest of n values."""
    return 1 - 2 * sum(math.comb(n, i) for i in range(k)) / 2**n


@pytest.mark.parametrize("n", [6, 7, 8, 9, 20, 25, 100, 1001])
def test_the_interval_is_the_narrowest_with_95_percent_coverage(n):
    low, high = stats.median_interval(list(range(1, n + 1)))
    assert high == n + 1 - low
    assert covered(n, low) >= 0.95 > covered(n, low + 1 + (n > 1000))  # the normal approximation may be one wider


@FEW
@given(st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=60))
def test_step_time_agrees_with_numpy(values):
    found = stats.step_time(values)
    assert found["median"] == pytest.approx(np.median(values))
    assert found["mean"] == pytest.approx(np.mean(values))
    assert (found["p10"], found["p90"]) == pytest.approx(tuple(np.quantile(values, [0.1, 0.9])))
    assert found["cv"] == pytest.approx(np.std(values, ddof=1) / np.mean(values), abs=1e-9)


def test_one_step_has_a_median_and_no_spread():
    found = stats.step_time([2.0])
    assert (found["median"], found["cv"], found["ci95"]) == (2.0, None, None)


def test_drift_compares_the_last_third_with_the_first():
    assert stats.drift([1.0] * 5 + [9.0] * 5 + [1.1] * 5) == pytest.approx(0.1)
    assert stats.drift([2.0] * 30) == 0


def test_equivalence_is_the_90_percent_t_interval_of_the_mean():
    low, high = stats.equivalence([0.01, 0.02, 0.06])
    half = 2.920 * 0.0264575 / math.sqrt(3)  # t of 2 degrees of freedom, from a table
    assert (low, high) == pytest.approx((0.03 - half, 0.03 + half), rel=1e-3)
    assert stats.equivalence([0.2]) == (0.2, 0.2)

"""Ratios, intervals and break-even, against other ways to compute them and against what they promise."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftbench.core.compare import (
    Pace,
    Ratio,
    break_even,
    differences,
    geometric_mean,
    loss_parity,
    mean_parity,
    median_error,
    ratio_of_runs,
    ratio_of_steps,
    t_quantile,
)

# --- what differs ----------------------------------------------------------------------------------------------------

PROVEN = {"dataset.hash": "a", "dataset.order_hash": "b"}


def keys(found):
    return [one.key for one in found]


def test_the_same_recipe_has_no_differences():
    assert differences(PROVEN | {"driver": "580"}, PROVEN | {"driver": "580"}) == []


def test_what_differs_and_what_one_side_lacks_is_listed():
    found = differences(PROVEN | {"driver": "580", "x": "1"}, PROVEN | {"driver": "575"})
    assert [str(one) for one in found] == ["driver: 580 → 575", "x: 1 → unknown"]


def test_without_the_tokens_hash_on_both_sides_nothing_is_proven():
    assert keys(differences({}, {})) == ["dataset.hash", "dataset.order_hash"]
    assert keys(differences({"dataset.hash": "a"}, {"dataset.hash": "a"})) == ["dataset.order_hash"]


def test_what_the_axis_implies_is_no_difference():
    assert differences(PROVEN | {"gpu": "A"}, PROVEN | {"gpu": "B"}, lambda key: key == "gpu") == []


# --- between runs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "freedom", "quantile"),  # tables: Abramowitz and Stegun, 26.10
    [
        (0.975, 1, 12.706),
        (0.975, 2, 4.303),
        (0.975, 4, 2.776),
        (0.975, 10, 2.228),
        (0.975, 30, 2.042),
        (0.95, 5, 2.015),
    ],
)
def test_quantiles_are_those_of_the_tables(p, freedom, quantile):
    assert t_quantile(p, freedom) == pytest.approx(quantile, abs=1e-3)


def test_many_degrees_of_freedom_are_the_normal_distribution():
    assert t_quantile(0.975, 1e6) == pytest.approx(statistics.NormalDist().inv_cdf(0.975), abs=1e-4)


def test_welch_by_hand():
    """Equal spreads and counts: the pooled t interval with 2n - 2 degrees of freedom."""
    baseline, candidate = [10.0, 11.0, 12.0], [15.0, 16.5, 18.0]
    found = ratio_of_runs(baseline, candidate)
    logs = [[math.log(x) for x in side] for side in (baseline, candidate)]
    error = math.sqrt(sum(statistics.variance(side) for side in logs) / 3)
    assert found.value == pytest.approx(1.5)
    assert math.log(found.high / found.value) == pytest.approx(t_quantile(0.975, 4) * error)
    assert (found.basis, found.runs, found.verdict) == ("runs", (3, 3), "higher")


def test_one_run_a_side_has_no_interval_between_runs():
    found = ratio_of_runs([2.0], [3.0])
    assert found.value == pytest.approx(1.5)
    assert (found.low, found.verdict) == (None, "unknown")


def test_one_repeated_side_speaks_for_both():
    found = ratio_of_runs([10.0], [11.0, 12.0, 13.0])
    spread = statistics.stdev(map(math.log, [11.0, 12.0, 13.0]))
    assert math.log(found.high / found.value) == pytest.approx(t_quantile(0.975, 2) * spread * math.sqrt(1 + 1 / 3))
    assert found.verdict == "not distinguishable"


def test_runs_that_agree_to_the_last_digit_have_an_interval_without_width():
    assert ratio_of_runs([2.0, 2.0], [2.0, 2.0]).verdict == "not distinguishable"
    assert ratio_of_runs([2.0, 2.0], [3.0, 3.0]).verdict == "higher"


@pytest.mark.parametrize("values", [[], [0.0], [-1.0, 2.0]])
def test_what_has_no_logarithm_has_no_ratio(values):
    assert geometric_mean(values) is None
    assert ratio_of_runs(values, [1.0]) is None


@given(st.lists(st.floats(0.5, 2.0), min_size=2, max_size=6), st.lists(st.floats(0.5, 2.0), min_size=2, max_size=6))
def test_turned_around_the_ratio_is_its_inverse(baseline, candidate):
    there, back = ratio_of_runs(baseline, candidate), ratio_of_runs(candidate, baseline)
    assert there.value * back.value == pytest.approx(1)
    assert there.low * back.high == pytest.approx(1)


def covered(make, trials=400):
    dice = random.Random(7)
    return sum(found.low <= truth <= found.high for found, truth in (make(dice) for _ in range(trials))) / trials


def test_the_interval_between_runs_holds_the_truth_in_95_of_100():
    def make(dice):
        sides = [[math.exp(dice.gauss(mean, 0.02)) for _ in range(3)] for mean in (0.0, 0.1)]
        return ratio_of_runs(*sides), math.exp(0.1)

    assert 0.92 <= covered(make) <= 0.99


# --- within runs -----------------------------------------------------------------------------------------------------


def test_the_interval_within_runs_holds_the_ratio_of_the_medians_in_95_of_100():
    def make(dice):
        sides = [[math.exp(dice.gauss(mean, 0.05)) for _ in range(25)] for mean in (0.0, 0.1)]
        value = statistics.fmean(sides[1]) / statistics.fmean(sides[0])
        return ratio_of_steps(value, *sides, paired=False), math.exp(0.1)

    assert covered(make) >= 0.93


def test_pairs_of_the_same_tokens_see_what_the_lengths_would_hide():
    dice = random.Random(1)
    baseline = [dice.uniform(1, 3) for _ in range(40)]
    candidate = [1.02 * x * dice.uniform(0.999, 1.001) for x in baseline]
    value = sum(candidate) / sum(baseline)
    assert ratio_of_steps(value, baseline, candidate, paired=True).verdict == "higher"
    assert ratio_of_steps(value, baseline, candidate, paired=False).verdict == "not distinguishable"


def test_the_interval_holds_the_ratio_and_grows_where_long_steps_pull_it_away():
    baseline = [1.0 + 0.001 * i for i in range(20)]
    candidate = [*baseline[:-2], 9.0, 9.0]
    value = statistics.fmean(candidate) / statistics.fmean(baseline)
    found = ratio_of_steps(value, baseline, candidate, paired=False)
    assert found.low <= 1 <= value <= found.high
    assert found.verdict == "not distinguishable"


@pytest.mark.parametrize("count", range(6))
def test_fewer_than_six_steps_have_no_interval(count):
    assert ratio_of_steps(1.2, [1.0] * count, [1.2] * 30, paired=False) == Ratio(1.2)


def test_the_error_of_a_median_is_near_that_of_a_normal_sample():
    dice = random.Random(3)
    errors = [median_error([dice.gauss(0, 1) for _ in range(101)]) for _ in range(200)]
    assert statistics.fmean(errors) == pytest.approx(math.sqrt(math.pi / 2 / 101), rel=0.1)


# --- a slow start ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("baseline", "candidate", "when", "steps"),
    [
        (Pace(0, 10, 4), Pace(60, 20, 4), "after", 60 / (1 / 10 - 1 / 20) / 4),
        (Pace(60, 20, 4), Pace(0, 10, 8), "until", 60 / (1 / 10 - 1 / 20) / 8),
        (Pace(60, 10, 4), Pace(0, 20, 4), "at once", None),
        (Pace(0, 20, 4), Pace(60, 10, 4), "never", None),
        (Pace(1, 10, 4), Pace(1, 10, 4), "at once", None),
        (Pace(0, 10, 4), Pace(0.1, 20, 4), "at once", None),  # behind for half of its first step
        (Pace(0, 10, 4), Pace(0.3, 20, 4), "after", 1.5),
        (Pace(0.1, 20, 4), Pace(0, 10, 4), "never", None),
    ],
)
def test_who_is_ahead_when(baseline, candidate, when, steps):
    found = break_even(baseline, candidate)
    assert found.when == when
    assert found.steps == (None if steps is None else pytest.approx(steps))


@given(st.floats(0, 100), st.floats(0, 100), st.floats(0.1, 10), st.floats(0.1, 10), st.integers(1, 8))
def test_at_the_break_even_both_have_taken_as_long(start, other, rate, faster, samples):
    baseline, candidate = Pace(start, rate, 4), Pace(other, faster, samples)
    found = break_even(baseline, candidate)
    if found.steps is not None:
        trained = found.steps * samples
        times = [pace.start_s + trained / pace.samples_per_s for pace in (baseline, candidate)]
        assert times[0] == pytest.approx(times[1], rel=1e-6, abs=1e-6)


# --- the same learning -----------------------------------------------------------------------------------------------


def losses(factor=1.0, count=40):
    return {step: factor * (2 + 1 / step) for step in range(1, count + 1)}


@pytest.mark.parametrize(
    ("factor", "tolerance", "verdict"),
    [(1.005, 0.01, "within"), (1.02, 0.01, "outside"), (1.02, 0.05, "within"), (0.998, 0.001, "outside")],
)
def test_losses_are_held_to_a_tolerance(factor, tolerance, verdict):
    found = loss_parity(losses(), losses(factor), tolerance)
    assert (found.verdict, found.tolerance) == (verdict, tolerance)
    assert found.worst == pytest.approx(abs(factor - 1))
    assert found.change == pytest.approx(factor - 1)


def test_one_step_in_twenty_may_be_outside():
    other = losses()
    other[7] *= 1.5
    found = loss_parity(losses(), other, 0.01)
    assert (found.verdict, found.step) == ("within", 7)
    other |= {8: 9.0, 9: 9.0}
    assert loss_parity(losses(), other, 0.01).verdict == "outside"


def test_without_a_step_of_both_nothing_is_checked():
    assert loss_parity(losses(), {}, 0.01).verdict == "unchecked"


SAMPLES = [(count, 4.0 + place % 3) for place, count in enumerate([3, 9, 30, 12, 6, 6])]  # label tokens, loss of each


def in_steps(order, size):
    """(samples, label tokens, mean loss a label token) of the samples in this order, `size` a step."""
    found = []
    for at in range(0, len(order), size):
        part = [SAMPLES[place] for place in order[at : at + size]]
        labels = sum(count for count, _ in part)
        found.append((float(len(part)), float(labels), sum(count * loss for count, loss in part) / labels))
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_the_mean_over_the_same_samples_does_not_ask_for_their_order(size):
    found = mean_parity(in_steps(range(6), 2), in_steps([4, 0, 5, 2, 1, 3], size), 0.001)
    assert (found.verdict, found.step) == ("within", None)
    assert found.change == pytest.approx(0, abs=1e-9)


def test_a_mean_covers_as_many_samples_as_both_have_seen_in_whole_steps():
    longer = [*in_steps(range(6), 2), (2.0, 10.0, 99.0)]
    assert mean_parity(longer, in_steps(range(6), 3), 0.001).verdict == "within"
    halved = [(samples, labels, loss * 0.9) for samples, labels, loss in in_steps(range(6), 6)]
    found = mean_parity(longer, halved, 0.05)
    assert (found.verdict, found.change) == ("outside", pytest.approx(-0.1))


@pytest.mark.parametrize("other", [[], [(100.0, 5.0, 1.0)]])
def test_without_a_whole_step_of_both_no_mean_is_compared(other):
    assert mean_parity(in_steps(range(6), 2), other, 0.05).verdict == "unchecked"

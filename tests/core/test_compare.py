"""Ratios, intervals and break-even points, compared with other formulas and simulations."""

from __future__ import annotations

import json
import math
import random
import statistics
from pathlib import Path

import pytest

from ftbench.core.compare import (
    TYPICAL_FREEDOM,
    TYPICAL_SPREAD,
    Pace,
    Ratio,
    break_even,
    differences,
    ratio_of_runs,
    ratio_of_steps,
    spread_between,
)
from ftbench.core.stats import t_quantile

RESULTS = Path(__file__).resolve().parents[2] / "results" / "h200"

# --- what differs ----------------------------------------------------------------------------------------------------

PROVEN = {"dataset.hash": "a", "dataset.order_hash": "b"}


def keys(found):
    return [one.key for one in found]


def test_different_and_missing_settings_are_listed():
    found = differences(PROVEN | {"driver": "580", "x": "1"}, PROVEN | {"driver": "575"})
    assert [str(one) for one in found] == ["driver: 580 → 575", "x: 1 → unknown"]


def test_missing_hashes_on_both_sides_count():
    assert keys(differences({}, {})) == ["dataset.hash", "dataset.order_hash"]
    assert keys(differences({"dataset.hash": "a"}, {"dataset.hash": "a"})) == ["dataset.order_hash"]


# --- between runs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "freedom", "quantile"),  # tables: Abramowitz and Stegun, 26.10
    [
        (0.975, 1, 12.706),
        (0.975, 4, 2.776),
        (0.975, 30, 2.042),
        (0.95, 5, 2.015),
    ],
)
def test_t_quantiles_agree_with_tables(p, freedom, quantile):
    assert t_quantile(p, freedom) == pytest.approx(quantile, abs=1e-3)


def test_welch_by_hand():
    """Equal spreads and counts: the pooled t interval with 2n - 2 degrees of freedom."""
    baseline, candidate = [10.0, 11.0, 12.0], [15.0, 16.5, 18.0]
    found = ratio_of_runs(baseline, candidate)
    logs = [[math.log(x) for x in side] for side in (baseline, candidate)]
    error = math.sqrt(sum(statistics.variance(side) for side in logs) / 3)
    assert found.value == pytest.approx(1.5)
    assert math.log(found.high / found.value) == pytest.approx(t_quantile(0.975, 4) * error)
    assert (found.basis, found.runs, found.verdict) == ("runs", (3, 3), "higher")


def test_single_runs_give_no_interval():
    found = ratio_of_runs([2.0], [3.0])
    assert found.value == pytest.approx(1.5)
    assert (found.low, found.verdict) == (None, "unknown")


def test_one_repeated_side_gives_the_variance_of_both():
    found = ratio_of_runs([10.0], [11.0, 12.0, 13.0])
    spread = statistics.stdev(map(math.log, [11.0, 12.0, 13.0]))
    assert math.log(found.high / found.value) == pytest.approx(t_quantile(0.975, 2) * spread * math.sqrt(1 + 1 / 3))
    assert found.verdict == "not distinguishable"


def test_a_known_spread_moderates_the_variance():
    """The interval by hand (G. K. Smyth, 2004), with the degrees of freedom of the side with fewer runs."""
    sides, spread = ([10.0, 10.1], [15.0, 15.1, 15.3]), 0.02
    found, own = ratio_of_runs(*sides, spread=spread), [statistics.variance(map(math.log, side)) for side in sides]
    error = math.sqrt((spread**2 + own[0]) / 2 / 2 + (spread**2 + 2 * own[1]) / 3 / 3)
    assert math.log(found.high / found.value) == pytest.approx(t_quantile(0.975, 2) * error)


def covered(make, trials=400):
    dice = random.Random(7)
    return sum(found.low <= truth <= found.high for found, truth in (make(dice) for _ in range(trials))) / trials


def test_intervals_between_runs_cover_the_truth():
    def make(dice):
        sides = [[math.exp(dice.gauss(mean, 0.02)) for _ in range(3)] for mean in (0.0, 0.1)]
        return ratio_of_runs(*sides), math.exp(0.1)

    assert 0.92 <= covered(make) <= 0.99


def test_a_single_run_gives_at_most_likely():
    assert ratio_of_runs([10.0], [11.0, 11.02], spread=0.002).verdict == "likely higher"
    assert ratio_of_runs([10.0, 10.01], [11.0, 11.02], spread=0.002).verdict == "higher"


@pytest.mark.parametrize("runs", [(2, 2), (2, 3), (5, 5)])
@pytest.mark.parametrize(
    "deviation",
    [lambda dice: 0.0005, lambda dice: 0.0025, lambda dice: 0.02,
     lambda dice: dice.choice([0.0005, 0.002, 0.005, 0.02]), lambda dice: 0.0025 / abs(dice.gauss(0, 1))],
)  # fmt: skip
def test_intervals_with_a_known_spread_cover_the_truth(runs, deviation):
    """A card at its power limit, a host that stalls, and specs that are unlike each other in this."""

    def make(dice):
        own = deviation(dice)
        sides = [[math.exp(dice.gauss(mean, own)) for _ in range(n)] for mean, n in zip((0.0, 0.1), runs, strict=True)]
        return ratio_of_runs(*sides, spread=TYPICAL_SPREAD), math.exp(0.1)

    assert covered(make) >= 0.93


def test_the_typical_spread_agrees_with_committed_runs():
    """No other constants give a much higher likelihood of the variances of the repeated specs, which follow a scaled F
    distribution."""
    groups: dict[tuple[Path, str], list[float]] = {}
    for file in sorted(path for path in RESULTS.rglob("summary.json") if ".left-out" not in path.parts):
        summary = json.loads(file.read_text("utf-8"))
        if summary["state"] == "ok" and summary["gpu"] and summary["steps"]["steady"] >= 6:
            spec = file.parent.name.rpartition("-r")[0]
            groups.setdefault((file.parent.parent, spec), []).append(summary["tokens_per_s"].get("real") or 0.0)
    repeated = [(statistics.variance(map(math.log, values)), len(values) - 1)
                for values in groups.values() if len(values) > 1 and min(values) > 0]  # fmt: skip
    assert len(repeated) >= 25

    def likelihood(spread, freedom):
        return sum(_log_f(variance / spread**2, d1, freedom) - 2 * math.log(spread) for variance, d1 in repeated)

    best = max(likelihood(0.0005 * 1.2**i, 0.25 * 1.3**j) for i in range(20) for j in range(14))
    assert likelihood(TYPICAL_SPREAD, TYPICAL_FREEDOM) > best - 2  # within its 95 % region: χ² of 2 degrees, 5.99 / 2


def _log_f(x, d1, d2):
    """Return the logarithm of the density of Snedecor's F (Abramowitz and Stegun 26.6)."""
    beta = math.lgamma(d1 / 2) + math.lgamma(d2 / 2) - math.lgamma((d1 + d2) / 2)
    return (d1 / 2 * math.log(d1 / d2) + (d1 / 2 - 1) * math.log(x)
            - (d1 + d2) / 2 * math.log1p(d1 * x / d2) - beta)  # fmt: skip


# --- within runs -----------------------------------------------------------------------------------------------------


def test_intervals_within_runs_cover_the_ratio_of_medians():
    def make(dice):
        sides = [[math.exp(dice.gauss(mean, 0.05)) for _ in range(25)] for mean in (0.0, 0.1)]
        value = statistics.fmean(sides[1]) / statistics.fmean(sides[0])
        return ratio_of_steps(value, *sides, paired=False), math.exp(0.1)

    assert 0.93 <= covered(make) <= 0.99


def test_pairing_removes_the_variance_of_lengths():
    dice = random.Random(1)
    baseline = [dice.uniform(1, 3) for _ in range(40)]
    candidate = [1.02 * x * dice.uniform(0.999, 1.001) for x in baseline]
    value = sum(candidate) / sum(baseline)
    assert ratio_of_steps(value, baseline, candidate, paired=True).verdict == "likely higher"
    assert ratio_of_steps(value, baseline, candidate, paired=False).verdict == "not distinguishable"


def test_long_steps_widen_the_interval():
    baseline = [1.0 + 0.001 * i for i in range(20)]
    candidate = [*baseline[:-2], 9.0, 9.0]
    value = statistics.fmean(candidate) / statistics.fmean(baseline)
    found = ratio_of_steps(value, baseline, candidate, paired=False)
    assert found.low <= 1 <= value <= found.high
    assert found.verdict == "not distinguishable"


@pytest.mark.parametrize("count", [0, 1, 5])
def test_fewer_than_six_steps_give_no_interval(count):
    assert ratio_of_steps(1.2, [1.0] * count, [1.2] * 30, paired=False) == Ratio(1.2)


def test_single_runs_use_the_spread_between_runs():
    baseline, candidate = [1 + 0.001 * i for i in range(20)], [1.01 + 0.001 * i for i in range(20)]
    near = ratio_of_steps(1.01, baseline, candidate, paired=True, spread=0.0)
    assert (near.verdict, near.direction) == ("likely higher", "higher")
    far = ratio_of_steps(1.01, baseline, candidate, paired=True, spread=0.01)
    assert (far.verdict, far.direction) == ("not distinguishable", "")
    assert math.log(far.high / near.high) == pytest.approx(1.96 * math.sqrt(2) * 0.01, rel=0.1)


def test_the_spread_is_the_median_over_groups():
    dice = random.Random(2)
    groups = [[math.exp(dice.gauss(0, 0.003)) for _ in range(count)] for count in (2, 3, 2, 4) * 100]
    assert spread_between(groups) == pytest.approx(0.003, rel=0.1)
    assert spread_between([*groups, [1.0, 9.0]]) == pytest.approx(spread_between(groups), rel=0.05)
    assert spread_between([[1.0], []]) == TYPICAL_SPREAD


def test_corrected_intervals_hold_simultaneously():
    """Bonferroni: twelve intervals that each miss with 5 % / 12 miss together with at most 5 %."""
    sides = [10.0, 11.0, 12.0], [15.0, 16.5, 18.0]
    one, twelve = (ratio_of_runs(*sides, comparisons=count) for count in (1, 12))
    widths = [math.log(found.high / found.value) for found in (one, twelve)]
    assert widths[1] / widths[0] == pytest.approx(5.8853 / 2.7764, rel=1e-4)  # t of 4 degrees, at 0.997917 and 0.975


def test_a_wide_interval_shows_the_direction():
    assert ratio_of_runs([1213.0, 1451.0], [15401.0, 15488.0]).direction == "higher"
    assert math.isfinite(ratio_of_runs([1.0, 1e9], [1e9, 1.0], comparisons=100).high)


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
        (Pace(0.1, 20, 4), Pace(0, 10, 4), "never", None),
    ],
)
def test_break_even_points(baseline, candidate, when, steps):
    found = break_even(baseline, candidate)
    assert found.when == when
    assert found.steps == (None if steps is None else pytest.approx(steps))

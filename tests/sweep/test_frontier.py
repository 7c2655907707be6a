import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftbench.sweep.plan.search import Trial, knee, next_batch, search_result

EVERY = list(range(1, 257))


def searched(candidates, tried):
    """Return all trials of a search in order. `tried` returns the trial of a batch."""
    trials = []
    while (batch := next_batch(trials, candidates)) is not None:
        assert batch in candidates
        assert batch not in [trial.batch for trial in trials], "a batch is never tried twice"
        trials.append(tried(batch))
    return trials


def fits_up_to(limit, **more):
    return lambda batch: Trial(batch, batch <= limit, **more)


def order(trials):
    return [trial.batch for trial in trials]


CANDIDATES = st.one_of(
    st.integers(1, 600).map(lambda most: list(range(1, most + 1))),
    st.integers(1, 4096).map(lambda whole: [batch for batch in range(1, whole + 1) if whole % batch == 0]),
    st.lists(st.integers(1, 5000), min_size=1, max_size=40, unique=True).map(sorted),
)


@given(candidates=CANDIDATES, limit=st.integers(0, 6000))
def test_search_finds_the_largest_batch_and_the_first_that_fails(candidates, limit):
    trials = searched(candidates, fits_up_to(limit))
    fitting = [batch for batch in candidates if batch <= limit]
    failing = [batch for batch in candidates if batch > limit]
    found = search_result(trials, candidates)
    assert (found.largest.batch if found.largest else None) == max(fitting, default=None)
    assert (found.first_failing.batch if found.first_failing else None) == min(failing, default=None)
    span = candidates[-1] / candidates[0]
    assert len(trials) <= math.log2(span) + math.log2(len(candidates)) + 5


def test_batch_doubles_and_then_bisects():
    assert order(searched(EVERY, fits_up_to(21))) == [1, 2, 4, 8, 16, 32, 24, 20, 22, 21]


def test_trials_of_other_candidates_count():
    assert next_batch([Trial(64, False)], [1, 2, 4, 8]) in (2, 4)
    assert next_batch([Trial(3, True), Trial(5, False)], [1, 2, 4, 8]) == 4


# --- trials that failed otherwise ------------------------------------------------------------------------------------


@pytest.mark.parametrize("others", [[], [Trial(1, True)], [Trial(1, True), Trial(4, False)]])
def test_failed_trial_stops_the_search(others):
    trials = [*others, Trial(2, None, reason="killed by signal 11")]
    assert next_batch(trials, EVERY) is None
    assert search_result(trials, EVERY).note == "stopped at batch 2: killed by signal 11"


# --- the result of a search ------------------------------------------------------------------------------------------


def test_note_names_the_limit_of_the_candidates():
    found = search_result(searched([1, 2, 4], fits_up_to(99)), [1, 2, 4])
    assert (found.largest.batch, found.first_failing) == (4, None)
    assert found.note == "not reached up to batch 4"


@pytest.mark.parametrize("trials", [[], [Trial(1, True)], [Trial(1, True), Trial(2, True), Trial(4, False)]])
def test_note_of_an_unfinished_search(trials):
    assert search_result(trials, EVERY).note == "not finished"


# --- the knee --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        ({1: 100, 2: 190, 4: 300, 8: 310, 16: 312}, 4),
        ({1: 100, 2: 104.9}, 1),
        ({1: 100, 2: 105}, 2),
        ({1: 100, 2: 103, 4: 106}, 2),  # slow growth adds up
        ({1: 100, 2: 101, 4: 200, 8: 150}, 4),  # a dip is not the end
        ({4: 100, 1: 40, 2: 99}, 2),
        ({1: 100}, None),
        ({1: 100, 2: None, 4: 101}, 1),
        ({}, None),
    ],
)
def test_knee(speeds, expected):
    assert knee([Trial(batch, True, speed=speed) for batch, speed in speeds.items()]) == expected


# --- with an estimate ------------------------------------------------------------------------------------------------


def seeded(candidates, tried, seed):
    trials = []
    while (batch := next_batch(trials, candidates, seed)) is not None:
        assert batch not in [trial.batch for trial in trials], "a batch is never tried twice"
        trials.append(tried(batch))
    return trials


@given(st.integers(0, 256), st.integers(1, 256))
def test_wrong_estimate_gives_the_same_result(limit, seed):
    trials = seeded(EVERY, fits_up_to(limit), seed)
    assert max((trial.batch for trial in trials if trial.fits), default=0) == limit
    assert len(trials) <= 2 * len(searched(EVERY, fits_up_to(limit)))


def test_correct_estimate_needs_one_failing_trial():
    assert order(seeded(EVERY, fits_up_to(23), 23)) == [1, 2, 4, 8, 16, 23, 24]
    assert order(seeded(EVERY, fits_up_to(24), 23)) == [1, 2, 4, 8, 16, 23, 24, 26, 25]
    assert order(seeded(EVERY, fits_up_to(45), 23))[5:10] == [23, 24, 26, 30, 38]
    assert search_result(seeded(EVERY, fits_up_to(23), 23), EVERY, 23).note == ""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftbench.core.units import parse_seconds
from ftbench.spec.experiment import Experiment
from ftbench.sweep.plan.base import WallTimes, job


def a_job(batch=1, repeat=1, values=None, method="lora", **train):
    """A job of a tiny model with this batch."""
    spec = Experiment.model_validate(
        {
            "name": "x",
            "model": {"id": "tiny/qwen3", "weights": "random"},
            "method": {"name": method},
            "train": {"batch_size": batch, "max_steps": 10} | train,
        }
    )
    return job(spec, (), {"train.batch_size": batch} if values is None else values, repeat, Path("x"), "a GPU")


# --- how long a night is ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90min", 5400), ("1h 30m", 5400), ("1H30M", 5400), (" 8 h ", 28800), ("1h2m3s", 3723), ("1.5h", 5400),
    ],
)  # fmt: skip
def test_duration(text, seconds):
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize(
    "text",
    ["", "8", "h", "0h", "-1h", "30m1h", "1h1h", "1d", "1:30", "1e3s", "nan"],
)  # fmt: skip
def test_other_text_is_no_duration(text):
    assert parse_seconds(text) is None


# --- how long a run will take at most --------------------------------------------------------------------------------


def history(*ended):
    made = WallTimes()
    for each, wall_s in ended:
        made.add(each, wall_s)
    return made


def test_unknown_before_the_first_run():
    assert history().at_most_s(a_job()) is None
    assert history().remaining_s([a_job()], 1) is None


def test_repeat_takes_as_long_as_the_slowest_of_its_cell():
    made = history((a_job(4, 1), 100.0), (a_job(4, 2), 120.0), (a_job(4, 3), 90.0), (a_job(8), 999.0))
    assert made.at_most_s(a_job(4, 4)) == pytest.approx(132.0)


def test_fixed_steps_scale_with_a_larger_batch():
    made = history((a_job(4), 100.0))
    assert made.at_most_s(a_job(8)) == pytest.approx(220.0)
    assert made.at_most_s(a_job(8, gradient_accumulation_steps=2)) == pytest.approx(440.0)


def test_fixed_steps_do_not_scale_with_a_smaller_batch():
    assert history((a_job(4), 100.0)).at_most_s(a_job(1)) == pytest.approx(110.0)


def test_fixed_epochs_scale_with_a_smaller_batch():
    epochs = {"max_steps": None}
    made = history((a_job(4, **epochs), 100.0))
    assert made.at_most_s(a_job(1, **epochs)) == pytest.approx(440.0)
    assert made.at_most_s(a_job(8, **epochs)) == pytest.approx(110.0)


def test_more_epochs_take_longer():
    epochs = {"max_steps": None}
    made = history((a_job(4, **epochs), 100.0))
    assert made.at_most_s(a_job(4, epochs=20, **epochs)) == pytest.approx(2200.0)


def test_nearest_batch_of_the_family_is_used():
    made = history((a_job(1), 10.0), (a_job(16), 100.0), (a_job(4, method="qlora"), 5000.0))
    assert made.at_most_s(a_job(32)) == pytest.approx(220.0)
    assert made.at_most_s(a_job(2)) == pytest.approx(22.0)


def test_slowest_run_bounds_other_families():
    made = history((a_job(2), 50.0), (a_job(4, method="qlora"), 100.0))
    assert made.at_most_s(a_job(8, method="full")) == pytest.approx(220.0)
    assert made.at_most_s(a_job(4, method="full")) == pytest.approx(110.0)


def test_packed_rows_bound_unpacked_batches():
    """A row counts as one sample and takes as long as all of them."""
    made = history((a_job(1, method="lora"), 60.0), (a_job(8, method="qlora"), 55.0))
    assert made.at_most_s(a_job(8, method="full")) == pytest.approx(66.0)


@given(st.lists(st.tuples(st.sampled_from([1, 2, 4, 8]), st.floats(0.1, 1e5)), min_size=1), st.integers(1, 64))
def test_bound_is_never_too_low(ended, batch):
    """A machine whose runs take between a constant and in proportion to the batch."""
    slope = min(wall / size for size, wall in ended)
    made = history(*((a_job(size), slope * size) for size, _ in ended))
    assert made.at_most_s(a_job(batch)) >= slope * batch


# --- how long all of it will take ------------------------------------------------------------------------------------


def test_remaining_time_is_the_sum_of_the_bounds():
    made = history((a_job(1), 10.0), (a_job(8), 100.0))
    assert made.remaining_s([a_job(8), a_job(1)], 1) == pytest.approx(121.0)
    assert made.remaining_s([a_job(8), a_job(1)], 2) == pytest.approx(110.0)  # one slot trains longer than the other
    assert made.remaining_s([a_job(8), a_job(8), a_job(8), a_job(1)], 2) == pytest.approx(170.5)
    assert made.remaining_s([a_job(1)], 1, [(a_job(8), 10.0)]) == pytest.approx(111.0)
    assert made.remaining_s([a_job(1)], 1, [(a_job(8), 999.0)]) == pytest.approx(11.0)

import pytest

from ftbench.core import units


@pytest.mark.parametrize(
    "function", [units.seconds, units.gibibytes, units.count, units.rate, units.percent, units.parameters]
)
def test_unknown_is_an_empty_text(function):
    assert function(None) == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0081, "8.1 ms"),
        (0.92, "0.92 s"),
        (9.999, "10.00 s"),
        (119.9, "119.9 s"),
        (245, "4 min 05 s"),
        (3600, "1 h 00 min"),
        (7199.6, "2 h 00 min"),
        (100_000, "27 h 46 min"),
        (3_417_540, "39.6 days"),
    ],
)
def test_durations_use_a_suitable_unit(value, text):
    assert units.seconds(value) == text


@pytest.mark.parametrize(("value", "text"), [(0.1234, "0.123"), (7.6, "7.60"), (77.31, "77.3"), (139.72, "139.7")])
def test_gib_have_three_digits(value, text):
    assert units.gibibytes(value) == text


@pytest.mark.parametrize(("value", "text"), [(12345.6, "12,346"), (10, "10"), (3.14159, "3.14"), (0.01234, "0.0123")])
def test_rates_are_integers_from_ten_up(value, text):
    assert units.rate(value) == text


def test_a_change_has_its_sign():
    assert units.change(0.423) == "+42.3 %"
    assert units.change(-0.5, 0) == "-50 %"
    assert units.change(503.67) == "+50,367 %"
    assert units.change(None) == ""


def test_one_is_singular():
    assert [units.some(number, "run") for number in (0, 1, 1200)] == ["0 runs", "1 run", "1,200 runs"]
    assert [units.some(number, "other process") for number in (1, 2)] == ["1 other process", "2 other processes"]


def test_sentences_have_no_plural_of_one_and_a_space_before_percent():
    long = "1 steps were far slower than the others: step 6 (1.8 times the median, 1 graphs compiled)"
    assert units.tidy(long) == "1 step was far slower than the others: step 6 (1.8 times the median, 1 graph compiled)"
    assert units.tidy("the GPU worked 9% of the time") == "the GPU worked 9 % of the time"
    kept = "11 steps were far slower than the others: 2.1 times the median in 1,001 steps; 4 % of them"
    assert units.tidy(kept) == kept


@pytest.mark.parametrize(
    ("value", "text"),
    [(8_190_735_360, "8.19 B"), (21_823_488, "21.8 M"), (999_600_000, "1 B"), (1_500, "1.5 k"), (999, "999")],
)
def test_parameters_are_counted_in_thousands_millions_and_billions(value, text):
    assert units.parameters(value) == text

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftbench.core import lengths

some = st.lists(st.integers(1, 512), min_size=1, max_size=120)


@given(some)
def test_the_description_is_that_of_numpy(values):
    found, array = lengths.describe(values), np.array(values)
    assert (found["count"], found["total"], found["max"]) == (array.size, array.sum(), array.max())
    assert found["mean"] == pytest.approx(array.mean())
    assert [found["p50"], found["p90"], found["p99"]] == pytest.approx(np.quantile(array, [0.5, 0.9, 0.99]).tolist())


@given(some)
def test_the_weighted_mean_is_the_mean_over_tokens(values):
    of_each_token = np.repeat(values, values)
    assert lengths.describe(values)["weighted_mean"] == pytest.approx(of_each_token.mean())


def test_no_lengths_cannot_be_described():
    with pytest.raises(ValueError, match="no lengths"):
        lengths.describe([])


@given(some)
def test_the_histogram_counts_every_sample_once_in_its_bin(values):
    found = lengths.histogram(values)
    counts, _ = np.histogram(values, bins=[*found["edges"][:-1], found["edges"][-1] - 0.5])
    assert found["counts"] == counts.tolist()
    assert sum(found["counts"]) == len(values)
    assert set(np.diff(found["edges"])) == {found["edges"][1]}


def test_padding_efficiency_is_real_tokens_over_the_rectangle_of_each_batch():
    assert lengths.padding_efficiency([10, 5, 8, 8, 3], 2) == 34 / (20 + 16 + 3)


def test_batches_of_one_are_never_padded():
    assert lengths.padding_efficiency([3, 9, 1], 1) == 1


@given(some, st.integers(1, 16))
def test_padding_efficiency_is_a_share(values, batch):
    assert 0 < lengths.padding_efficiency(values, batch) <= 1


@given(some)
def test_packing_never_computes_less_than_the_tokens_there_are(values):
    assert 0 < lengths.packing_efficiency(values, 512) <= 1


@given(some)
def test_packing_never_needs_more_rows_than_samples(values):
    assert lengths.packing_efficiency(values, 512) >= sum(values) / (len(values) * 512) - 1e-12


def test_halves_pack_perfectly():
    assert lengths.packing_efficiency([256] * 8, 512) == 1
    assert lengths.packing_efficiency([300, 300, 212, 212], 512) == 1


def test_samples_that_do_not_fit_together_get_rows_of_their_own():
    assert lengths.packing_efficiency([300, 300], 512) == 600 / 1024

"""Verdicts on what two runs learn."""

from __future__ import annotations

import math
import random

import pytest

from ftbench.core.learning import (
    DIFFERS,
    FOLLOWS,
    INCONCLUSIVE,
    NOT_FINITE,
    TrainedStep,
    learned,
    learning_verdict,
)


def losses(factor=1.0, count=40, grad_norm=None):
    """A loss that falls from 3 towards 2."""
    return [TrainedStep(step, 4.0, 100.0, factor * (2 + 1 / step), grad_norm) for step in range(1, count + 1)]


def changed(steps, **values):
    """Steps with other losses in some of them: `step_7=9.0`."""
    other = {int(name.removeprefix("step_")): loss for name, loss in values.items()}
    return [TrainedStep(s.step, s.samples, s.labels, other.get(s.step, s.loss), s.grad_norm) for s in steps]


@pytest.mark.parametrize(
    ("factor", "tolerance", "verdict"),
    [(1.005, 0.01, FOLLOWS), (1.02, 0.01, DIFFERS), (1.02, 0.05, FOLLOWS), (0.998, 0.001, DIFFERS)],
)
@pytest.mark.parametrize("paired", [True, False])
def test_mean_losses_are_compared_with_the_tolerance(factor, tolerance, verdict, paired):
    found = learning_verdict(losses(), losses(factor), tolerance, paired=paired)
    assert (found.verdict, found.tolerance) == (verdict, tolerance)
    assert found.change == pytest.approx(factor - 1)
    assert found.worst == (pytest.approx(abs(factor - 1)) if paired else None)


def test_five_percent_of_steps_may_exceed_the_tolerance():
    found = learning_verdict(losses(), changed(losses(), step_7=2.3), 0.01, paired=True)
    assert (found.verdict, found.step) == (FOLLOWS, 7)
    swung = changed(losses(), step_7=2.3, step_8=1.94, step_9=2.0)
    found = learning_verdict(losses(), swung, 0.01, paired=True)
    assert abs(found.change) < 0.01
    assert (found.verdict, found.step) == (DIFFERS, 8)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_losses_and_gradient_norms_are_failures(value):
    found = learning_verdict(losses(), changed(losses(), step_7=value, step_9=value), 0.05, paired=True)
    assert (found.verdict, found.failed) == (NOT_FINITE, True)
    assert found.reason == "the loss is not a number in 2 steps, first in step 7"
    found = learning_verdict(losses(), losses(grad_norm=value), 0.05, paired=False)
    assert (found.verdict, "gradient norm" in found.reason) == (NOT_FINITE, True)


def test_without_common_steps_there_is_no_verdict():
    assert learning_verdict(losses(), [], 0.01, paired=True).verdict == INCONCLUSIVE
    assert learning_verdict(losses(count=3), losses(count=3), 0.01, paired=True).verdict == INCONCLUSIVE


# --- progress of the reference ---------------------------------------------------------------------------------------


def random_tokens(seed, slope=0.0, count=40):
    """Losses of random weights on random tokens: near ln 150,000 + 0.8, and each step's own tokens move it a little."""
    dice = random.Random(1)  # the data are the same for all
    noise = random.Random(seed)
    return [
        TrainedStep(step, 4.0, 8188.0, 12.76 * (1 + 3e-4 * dice.gauss(0, 1) + slope * step) + 1e-5 * noise.gauss(0, 1))
        for step in range(1, count + 1)
    ]


@pytest.mark.parametrize("slope", [0.0, 5e-6, -5e-6], ids=["learning rate 0", "gradient reversed", "trained"])
def test_a_constant_loss_gives_no_verdict(slope):
    """With random weights, a learning rate of 0 differed by 0.005 %, a reversed gradient by 0.011 %."""
    found = learning_verdict(random_tokens(1, -2e-6), random_tokens(2, slope), 0.01, paired=True)
    assert abs(found.change) < 0.001
    assert (found.verdict, found.failed) == (INCONCLUSIVE, False)
    assert "beyond noise" in found.reason


@pytest.mark.parametrize("tolerance", [0.001, 0.01, 0.05])
@pytest.mark.parametrize("seed", range(20))
def test_a_run_that_learns_nothing_is_caught(tolerance, seed):
    """The control of a learning rate of 0 on any curve: it stays at the level where the reference began."""
    dice = random.Random(seed)
    fall, shape, noise = dice.uniform(0, 0.2), dice.uniform(1, 30), 10 ** dice.uniform(-4, -1)
    data = [noise * dice.gauss(0, 1) for _ in range(60)]
    reference = [TrainedStep(i, 4.0, 9.0, 3 + d - fall * (1 - math.exp(-i / shape))) for i, d in enumerate(data)]
    control = [TrainedStep(i, 4.0, 9.0, 3 + d) for i, d in enumerate(data)]
    told = learning_verdict(reference, reference, tolerance, paired=True)
    caught = learning_verdict(reference, control, tolerance, paired=True)
    assert (told.verdict == INCONCLUSIVE) or caught.failed
    assert caught.verdict != FOLLOWS or told.verdict == INCONCLUSIVE


def test_progress_is_the_difference_to_a_constant_loss():
    steps = [TrainedStep(i, 4.0, 9.0, 4.0 if i < 10 else 2.0) for i in range(100)]
    mean = 2.2
    assert learned(steps) == pytest.approx((4 - mean) / mean, rel=0.1)


# --- samples in another order ----------------------------------------------------------------------------------------

SAMPLES = [(count, 4.0 + place % 3) for place, count in enumerate([3, 9, 30, 12, 6, 6])]  # label tokens, loss of each


def in_steps(order, size, norm=1.0):
    """Return steps of `size` samples in this order, each with its mean loss per label token."""
    found = []
    for at in range(0, len(order), size):
        part = [SAMPLES[place] for place in order[at : at + size]]
        labels = sum(count for count, _ in part)
        loss = sum(count * loss for count, loss in part) / labels
        found.append(TrainedStep(len(found) + 1, float(len(part)), float(labels), loss, norm))
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_the_mean_does_not_depend_on_the_order(size):
    found = learning_verdict(in_steps(range(6), 2), in_steps([4, 0, 5, 2, 1, 3], size), 0.001, paired=False)
    assert (found.failed, found.step) == (False, None)
    assert found.change == pytest.approx(0, abs=1e-9)


def test_means_cover_the_common_samples():
    longer = [*in_steps(range(6), 2), TrainedStep(4, 2.0, 10.0, 99.0)]
    assert not learning_verdict(longer, in_steps(range(6), 3), 0.001, paired=False).failed
    halved = [TrainedStep(s.step, s.samples, s.labels, s.loss * 0.9) for s in in_steps(range(6), 6)]
    found = learning_verdict(longer, halved, 0.05, paired=False)
    assert (found.verdict, found.change) == (DIFFERS, pytest.approx(-0.1))


@pytest.mark.parametrize("other", [[], [TrainedStep(1, 100.0, 5.0, 1.0)], [TrainedStep(1, None, 5.0, 1.0)]])
def test_without_common_samples_there_is_no_verdict(other):
    assert learning_verdict(in_steps(range(6), 2), other, 0.05, paired=False).verdict == INCONCLUSIVE


def test_gradient_norms_are_compared_for_equal_step_sizes():
    plain = in_steps(range(6), 2)
    assert learning_verdict(plain, in_steps(range(6), 2, 0.99), 0.05, paired=True).grad_norm == pytest.approx(-0.01)
    assert learning_verdict(plain, in_steps(range(6), 3, 0.99), 0.05, paired=False).grad_norm is None

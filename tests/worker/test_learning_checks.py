"""Controls do not learn, and the gradients that a run keeps are those of its first steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from conftest import train_in
from ftbench.store.rundir import read_json
from ftbench.store.steps import read_steps
from ftbench.worker.measure.gradients import WIDTH, sketch

CHAIN = {"mean_length": None, "length": 32, "samples": 200, "structure": "markov", "eval_samples": 16}
FULL = {"name": "full"}


def losses(run):
    steps, _ = read_steps(run.steps)
    return [row.loss for row in steps if row.phase == "train"], steps[-1].loss


@pytest.fixture(scope="module")
def learned(tmp_path_factory, cache):
    return losses(train_in(tmp_path_factory.mktemp("plain"), method=FULL, dataset=CHAIN, train={"batch_size": 4}))


@pytest.mark.parametrize("control", ["learning_rate_0", "reversed_gradient", "random_labels"])
def test_a_control_does_not_learn_what_the_run_without_it_does(train_here, learned, control):
    run = train_here(method=FULL, dataset=CHAIN, train={"batch_size": 4}, measure={"control": control})
    train, held_out = losses(run)
    assert learned[1] < 0.9 * learned[0][0]
    assert held_out > 0.99 * learned[0][0]
    assert any("a control" in warning for warning in read_json(run.applied)["warnings"])
    if control == "learning_rate_0":
        assert {row.learning_rate for row in read_steps(run.steps)[0] if row.phase == "train"} == {0.0}
    if control == "reversed_gradient":
        assert train[-1] > train[0]


def test_a_sketch_tells_angles_and_norms():
    first = torch.randn(300_000, generator=torch.Generator().manual_seed(1))
    second = first + 0.1 * torch.randn(300_000, generator=torch.Generator().manual_seed(2))
    a, b = sketch("layer", first).double(), sketch("layer", second).double()
    assert float(a.norm() / first.norm()) == pytest.approx(1, abs=0.1)
    cosine = float(torch.nn.functional.cosine_similarity(a, b, dim=0))
    assert 1 - cosine == pytest.approx(1 - 1 / np.sqrt(1.01), rel=0.2)  # four standard errors of 1,024 sums
    small = torch.arange(5.0)
    assert sketch("bias", small)[:5].tolist() == small.tolist()
    assert len(sketch("bias", small)) == WIDTH


def test_the_gradients_of_the_first_steps_are_kept_as_they_were_before_clipping(train_here):
    run = train_here(measure={"gradients": 2}, train={"max_grad_norm": 1e-3})
    kept = np.load(run.gradients)
    norms = [row.grad_norm for row in read_steps(run.steps)[0]][:2]
    assert np.sqrt((kept["norms"] ** 2).sum(axis=1)) == pytest.approx(norms, rel=1e-3)
    assert min(norms) > 1e-3
    assert len(kept["names"]) == kept["sketches"].shape[1] == kept["begin"].shape[0] == 28
    a = [name for name in kept["names"] if "lora_A" in name]
    assert len(a) == 14
    assert kept["sketches"].shape == (2, 28, WIDTH)

"""Controls do not learn, and parity runs record the gradients at the given weights."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from conftest import spec_of, train_in
from ftbench.spec.batches import synthetic_lengths
from ftbench.spec.datasets import Dataset
from ftbench.store.rundir import RunDir, read_json
from ftbench.store.steps import read_steps
from ftbench.worker import methods
from ftbench.worker.data.prepare import prepare
from ftbench.worker.data.synthetic import draw
from ftbench.worker.data.tokens import IGNORE
from ftbench.worker.measure.levels import WIDTH, Levels, _moment, sketch
from ftbench.worker.model import loading

CHAIN = {"mean_length": None, "length": 32, "samples": 200, "structure": "tasks", "eval_samples": 16}
FULL = {"name": "full"}


def losses(run):
    steps, _ = read_steps(run.steps)
    return [row.loss for row in steps if row.phase == "train"], steps[-1].loss


@pytest.fixture(scope="module")
def learned(tmp_path_factory, cache):
    return losses(train_in(tmp_path_factory.mktemp("plain"), method=FULL, dataset=CHAIN, train={"batch_size": 4}))


@pytest.mark.parametrize("control", ["learning_rate_0", "reversed_gradient"])
def test_control_does_not_learn(train_here, learned, control):
    train = {"batch_size": 4, "max_steps": 20}
    run = train_here(method=FULL, dataset=CHAIN, train=train, measure={"control": control})
    train, held_out = losses(run)
    assert learned[1] < 0.9 * learned[0][0]
    assert held_out > 0.95 * learned[0][0]
    applied = read_json(run.applied)
    assert applied["control"]["name"] == control
    assert any("control" in warning for warning in applied["warnings"])
    if control == "learning_rate_0":
        assert {row.learning_rate for row in read_steps(run.steps)[0] if row.phase == "train"} == {0.0}
    if control == "reversed_gradient":
        assert train[-1] > train[0]


def test_control_without_anything_to_damage_fails(train_here):
    from ftbench.errors import NotAppliedError

    with pytest.raises(NotAppliedError, match="nothing to damage"):
        train_here(method=FULL, measure={"control": "lora_scale_x1.5"})


RECIPE = {"precision": "fp32", "learning_rate": 0.1, "warmup_steps": 2, "weight_decay": 0.5, "epochs": 2,
          "gradient_accumulation_steps": 2}  # fmt: skip


@pytest.mark.parametrize(
    ("optimizer", "most", "schedule"), [("sgd", 2.0, "linear"), ("adamw_torch", 0.0, "constant_with_warmup")]
)
def test_recipe_trains_as_a_plain_loop(train_here, optimizer, most, schedule):
    """Schedule, warm-up, weight decay, clipping, accumulation, order of the samples, and evaluation per label token."""
    train = RECIPE | {"optimizer": optimizer, "max_grad_norm": most, "lr_scheduler": schedule}
    given = {"method": FULL, "train": train, "dataset": {"eval_samples": 3}}
    *steps, evaluated = read_steps(train_here(**given).steps)[0]
    spec = spec_of(**given)
    model = methods.load("full").load(spec, loading.source_of(spec.model)).train()
    data = prepare(spec, None, model.config.vocab_size)
    *batches, held_out = (
        [torch.tensor([row[0].ids]) for row in rows]
        for rows in (*(data.train[at : at + 4] for at in (0, 4, 8)), data.evaluation)
    )
    weights = [[p for p in model.parameters() if (p.ndim > 1) is decayed] for decayed in (True, False)]
    groups = [{"params": decayed, "weight_decay": decay} for decayed, decay in zip(weights, (0.5, 0.0), strict=True)]
    loop = {"sgd": torch.optim.SGD, "adamw_torch": torch.optim.AdamW}[optimizer](groups, lr=0.0)

    def loss(samples):
        logits = [model(ids).logits[0, :-1] for ids in samples]
        return torch.nn.functional.cross_entropy(torch.cat(logits), torch.cat([ids[0, 1:] for ids in samples]))

    for step, batch in enumerate(batches * 2):
        (made := loss(batch)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), most or torch.inf)
        rate = 0.1 * min(step / 2, (6 - step) / 4 if schedule == "linear" else 1.0)
        for group in loop.param_groups:
            group["lr"] = rate
        loop.step()
        loop.zero_grad()
        row = steps[step]
        assert (row.loss, row.grad_norm) == pytest.approx((made.item(), norm.item()), rel=1e-4)
        assert row.learning_rate == pytest.approx(rate)
    assert evaluated.loss == pytest.approx(loss(held_out).item(), rel=1e-4)


def test_run_that_repeats_a_batch_fails(train_here, monkeypatch):
    from transformers import Trainer

    from ftbench.errors import NotAppliedError

    fetch, seen = Trainer.get_batch_samples, []

    def repeated(*args, **kwargs):
        seen.append(fetch(*args, **kwargs))
        return seen[0]

    monkeypatch.setattr(Trainer, "get_batch_samples", repeated)
    with pytest.raises(NotAppliedError, match="did not train on its samples in the expected order"):
        train_here(method=FULL)


def test_sketch_keeps_angles_and_norms():
    first = torch.randn(300_000, generator=torch.Generator().manual_seed(1))
    second = first + 0.1 * torch.randn(300_000, generator=torch.Generator().manual_seed(2))
    a, b = sketch("layer", first).double(), sketch("layer", second).double()
    assert float(a.norm() / first.norm()) == pytest.approx(1, abs=0.1)
    cosine = float(torch.nn.functional.cosine_similarity(a, b, dim=0))
    assert 1 - cosine == pytest.approx(1 - 1 / np.sqrt(1.01), rel=0.2)  # four standard errors of 1,024 sums
    small = torch.arange(5.0)
    assert sketch("bias", small)[:5].tolist() == small.tolist()
    assert len(sketch("bias", small)) == WIDTH


def test_recorded_gradients_are_those_before_clipping_at_the_given_weights(train_here):
    tasks = {"structure": "tasks", "mean_length": 20, "samples": 9}
    steps = {"max_grad_norm": 1e-3, "gradient_accumulation_steps": 9, "max_steps": 6}
    source = train_here(dataset=tasks, measure={"keep_weights": True})
    run = train_here(dataset=tasks, train=steps, measure={"gradients": 2, "weights_of": source.run_id})
    kept = np.load(run.gradients)
    norms = [row.grad_norm for row in read_steps(run.steps)[0]][1::3]
    assert np.sqrt((kept["gradient"][..., 0] ** 2).sum(axis=1)) == pytest.approx(norms, rel=1e-3)
    assert min(norms) > 1e-3
    a = np.array(["lora_A" in name for name in kept["names"]])
    assert (len(a), a.sum()) == (28, 14)
    assert np.all(kept["gradient"][0, a, 0] == 0)  # lora_B is zero at the start
    assert np.all(kept["gradient"][1, a, 0] > 0)
    assert kept["losses"].shape == (4, 9)
    assert not source.gradients.exists()


@pytest.mark.parametrize(("norm", "most", "kept"), [(None, 0.0, 0.5), (4.0, 1.0, 128.0)])
def test_recorded_gradients_do_not_have_the_scale_of_fp16(tmp_path, norm, most, kept):
    weight = torch.nn.Parameter(torch.zeros(1))
    scaler = SimpleNamespace(get_scale=lambda: 64.0)
    loop = SimpleNamespace(accelerator=SimpleNamespace(scaler=scaler), optimizer=torch.optim.SGD([weight], lr=1.0))
    levels = Levels(spec_of(measure={"gradients": 2}), RunDir(tmp_path), loop, SimpleNamespace(grad_norm=norm))
    levels._parameters, weight.grad = {"weight": weight}, torch.tensor([32.0])  # clipping removes the scale
    levels.on_pre_optimizer_step(SimpleNamespace(max_grad_norm=most), SimpleNamespace(global_step=1), None)
    assert levels._kept["gradient"][0][0][0] == kept


def test_second_moment_in_8_bits_is_unknown():
    weight = torch.zeros(2)
    assert _moment({"exp_avg_sq": torch.tensor([4.0, 9.0])}, weight).tolist() == [2.0, 3.0]
    assert _moment({"exp_avg_sq": torch.ones(2, dtype=torch.uint8)}, weight).isnan().all()
    assert _moment({}, weight).tolist() == [0.0, 0.0]


def test_tasks_need_their_prompts_and_mask_them():
    """Every answer follows from its prompt, and recall samples contradict each other once they share a row."""
    dataset = Dataset(name="synthetic", structure="tasks", mean_length=24, max_length=64, samples=30, seed=3)
    samples = draw(dataset, 30, 64)
    assert samples == draw(dataset, 30, 64)
    lengths = synthetic_lengths(dataset, 30)
    assert len({*lengths}) > 5
    assert all(
        abs(len(sample.ids) - length) <= 1 for sample, length in zip(samples, lengths, strict=True) if length > 5
    )
    assert all(sample.labels[0] == IGNORE and sample.labels[-1] == sample.ids[-1] for sample in samples)
    assert {token for sample in samples for token in sample.ids} <= set(range(64))
    answers = [[label for label in sample.labels if label != IGNORE] for sample in samples]
    for sample, answer in list(zip(samples, answers, strict=True))[::3]:
        assert sample.ids[1 : 1 + len(answer)] == answer
    bound = []
    for sample, answer in list(zip(samples, answers, strict=True))[1::3]:
        prompt = sample.ids[1 : len(sample.ids) - len(answer) - 1]
        pairs, queries = prompt[: -len(answer)], prompt[-len(answer) :]
        bound.append(dict(zip(pairs[::2], pairs[1::2], strict=True)))
        assert [bound[-1][key] for key in queries] == answer
    shared = bound[0].keys() & bound[1].keys()
    assert any(bound[0][key] != bound[1][key] for key in shared)


def test_damaged_runs_enter_no_answer(train_here, tmp_path):
    from ftbench.report import build

    train_here(train={"max_steps": 1})
    train_here(train={"max_steps": 1}, measure={"control": "layer_frozen"})
    told = json.loads(build.report(build.Request([tmp_path], "json", answers=True)).text)
    assert told["answer"]["left_out"]["control"] == 1

"""Updates inside the backward pass equal updates after it, bit by bit; the states may be in host memory."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from conftest import spec_of, train_in
from ftbench.errors import NotAppliedError
from ftbench.kernels import host_states
from ftbench.kernels.host_states import HostStates
from ftbench.spec.incompatibilities import incompatibilities, machine_incompatibilities
from ftbench.store.rundir import read_json
from ftbench.store.steps import read_steps
from ftbench.worker.optimizations import optimizer_in_backward

FULL = {"name": "full"}


@pytest.fixture
def trained(tmp_path, cache):
    """Trains every weight of a tiny model without clipping; its directory."""

    def run(setting, optimizer="sgd", **optimizations):
        train = {"optimizer": optimizer, "max_grad_norm": 0, "learning_rate": 0.05}
        on = {"optimizer_in_backward": setting, **optimizations}
        return train_in(tmp_path, method=FULL, train=train, optimizations=on, measure={"save_adapter": True})

    return run


def figures(run) -> list[tuple]:
    return [(row.phase, row.loss, row.grad_norm, row.learning_rate) for row in read_steps(run.steps)[0]]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw_torch"])
@pytest.mark.parametrize("on", [{"gradient_checkpointing": True, "chunked_loss": 16}])
def test_losses_norms_and_weights_are_those_of_a_step_behind_the_backward_pass(trained, optimizer, on):
    behind, within = trained(False, optimizer, **on), trained(True, optimizer, **on)
    assert figures(within) == figures(behind)
    assert figures(within)[0][1:] != figures(within)[-1][1:]
    ours, theirs = (load_file(run.adapter / "model.safetensors") for run in (within, behind))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize("optimizer", ["adamw_torch", "adamw_bnb_8bit"])
def test_states_in_host_memory_change_nothing(trained, monkeypatch, optimizer):
    monkeypatch.setattr(host_states, "_SMALL", 64)
    end, between = HostStates.end_step, []
    monkeypatch.setattr(
        HostStates, "end_step", lambda self: between.append((end(self), [*self._coming, *self._leaving]))
    )
    there, away = trained(True, optimizer), trained("offload", optimizer)
    assert len(between) == len(figures(away)) > 2
    assert not any(there for _, there in between)  # no states on the device between steps
    assert figures(away) == figures(there)
    assert read_json(away.applied)["optimizer_states_on_host_gb"] > 0


def test_what_is_not_stepped_in_the_backward_pass_is_told(trained, monkeypatch):
    monkeypatch.setattr(optimizer_in_backward.StepsInBackward, "on_train_begin", lambda *_, **__: None)
    monkeypatch.setattr(optimizer_in_backward.StepsInBackward, "norm", lambda *_, **__: torch.tensor(1.0))
    with pytest.raises(NotAppliedError, match="was not updated in the backward pass"):
        trained(True)


def test_states_are_the_parameters_own_whatever_the_order(monkeypatch):
    """A state that its parameter's steps count up, poisoned wherever it should not be read."""
    monkeypatch.setattr(host_states, "_SMALL", 0)
    names, state = list("abcde"), {}
    kept = HostStates(state, torch.device("cpu"))

    def step(name: str) -> None:
        values = state.setdefault(name, {"sum": torch.zeros(3)})
        values["sum"] += ord(name)
        on_device = values["sum"]
        left.append((name, on_device))

    left: list[tuple[str, torch.Tensor]] = []
    for order in (names, names, names[::-1], "aabbc", "e"):
        for name in order:
            kept.around(name, lambda name=name: step(name))
            left[-1][1].fill_(float("nan"))  # the device copy is unused from here on
    totals = {name: sum(order.count(name) for order in ("abcde", "abcde", "edcba", "aabbc", "e")) for name in names}
    assert {name: state[name]["sum"].tolist() for name in names} == {
        name: [ord(name) * count] * 3 for name, count in totals.items()
    }
    assert kept.bytes == 5 * 3 * 4


@pytest.mark.parametrize(
    ("section", "keys", "said"),
    [
        ("train", {"max_grad_norm": 0.3}, "set train.max_grad_norm to 0"),
        ("train", {"gradient_accumulation_steps": 2}, "set train.gradient_accumulation_steps to 1"),
        ("train", {"precision": "fp16"}, "set train.precision to bf16 or fp32"),
        ("train", {"optimizer": "paged_adamw_8bit"}, "already pages its state"),
        ("train", {"optimizer": "sgd"}, "sgd has no state"),
        ("launch", {"gpus": 2}, "is for one GPU"),
        ("measure", {"gradients": 2}, "keeps no gradients"),
    ],
)
def test_incompatible_settings_are_errors_with_a_fix(section, keys, said):
    spec = spec_of(method=FULL, train={"max_grad_norm": 0}, optimizations={"optimizer_in_backward": "offload"})
    assert incompatibilities(spec) == []
    assert machine_incompatibilities(spec, (9, 0)) == []
    assert "needs a GPU" in machine_incompatibilities(spec, None)[0]
    changed = spec.model_copy(update={section: getattr(spec, section).model_copy(update=keys)})
    assert any("optimizer_in_backward" in told and said in told for told in incompatibilities(changed))

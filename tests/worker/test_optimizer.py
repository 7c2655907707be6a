"""torchao's optimizers: dtypes of their state and stochastic rounding. Without torchao a fake replaces it."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from conftest import spec_of
from ftbench.errors import MissingError, NotAppliedError
from ftbench.launch import trl
from ftbench.spec.incompatibilities import incompatibilities
from ftbench.store.rundir import read_json
from ftbench.store.steps import read_steps
from ftbench.worker import optimizer
from ftbench.worker.model.parts import plain_tensors
from tritons import DEVICE, module

HAS_TORCHAO = importlib.util.find_spec("torchao") is not None
NEEDS_TORCHAO = pytest.mark.skipif(not HAS_TORCHAO, reason="torchao is not installed: ftbench[torchao]")
STATES = {"adamw_torchao_fp32": "float32", "adamw_torchao_bf16": "bfloat16"}


class Adam(torch.optim.Optimizer):
    """Keep one moment and step by the sign of the gradient, like Adam's first step."""

    def __init__(self, params, lr, bf16_stochastic_round=False, **options):
        super().__init__(params, {"lr": torch.tensor(lr), "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0})
        self.bf16_stochastic_round = bf16_stochastic_round

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("exp_avg", self._new_buffer(p, True))
                p -= float(group["lr"]) * p.grad.sign()


@pytest.fixture
def torchao(monkeypatch):
    """Use torchao or the fake."""
    if not HAS_TORCHAO:
        package, optim = ModuleType("torchao"), ModuleType("torchao.optim")
        package.optim, optim._AdamW = optim, Adam
        monkeypatch.setitem(sys.modules, "torchao", package)
        monkeypatch.setitem(sys.modules, "torchao.optim", optim)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


@pytest.mark.parametrize("name", STATES)
def test_state_has_the_requested_dtype(torchao, train_here, name):
    run = train_here(train={"optimizer": name}, method={"name": "full"}, model={"dtype": "bfloat16"})
    found = read_json(run.applied)["optimizer"]
    assert found["class"].startswith("torchao.optim")
    assert {entry.rpartition(": ")[2] for entry in found["state"]} == {STATES[name]}
    losses = [step.loss for step in read_steps(run.steps)[0] if step.phase == "train"]
    assert len(losses) == 6
    assert losses[-1] < losses[0]


def test_kernel_clips_and_steps_like_torch(torchao, train_here, monkeypatch):
    """In float32 without stochastic rounding. Some steps clip. Each update has a new seed."""
    kernel, seeds = module("kernels.adamw"), []
    step_once = kernel.adamw_step
    monkeypatch.setattr(kernel, "adamw_step", lambda *given: seeds.append(given[6]) or step_once(*given))
    monkeypatch.setattr(optimizer, "_is_plain", lambda parameter: True)
    steps, limit = {}, 2.65
    for name in ("adamw_torch", "adamw_torchao_fp32"):
        train = {"optimizer": name, "max_grad_norm": limit, "weight_decay": 0.1}
        run = train_here(train=train, method={"name": "full"})
        steps[name] = [step for step in read_steps(run.steps)[0] if step.phase == "train"]
    assert read_json(run.applied)["optimizer"]["fused"]
    assert {step.grad_norm > limit for step in steps["adamw_torch"]} == {True, False}
    assert len({*seeds}) == len(seeds) > 0
    for step, expected in zip(*steps.values(), strict=True):
        assert (step.loss, step.grad_norm) == pytest.approx((expected.loss, expected.grad_norm), rel=1e-4)


@pytest.mark.parametrize(("changes", "in_kernel"), [
    ({}, True), ({"launch": {"gpus": 2, "strategy": "ddp"}}, False), ({"train": {"precision": "fp16"}}, False),
])  # fmt: skip
def test_kernel_clips_only_unscaled_gradients_of_one_gpu(torchao, changes, in_kernel):
    train = {"optimizer": "adamw_torchao_bf16"} | changes.get("train", {})
    loop = SimpleNamespace(accelerator=SimpleNamespace(clip_grad_norm_=print))
    optimizer.attach(loop, spec_of(**changes | {"train": train}))
    assert (loop.accelerator.clip_grad_norm_ is not print) is in_kernel


@NEEDS_TORCHAO
def test_kernel_steps_8_bit_states_like_torchao(torchao):
    """In float32 without stochastic rounding. Codes may differ by one where two numbers are equally near."""
    module("kernels.adamw")
    given = {"train": {"optimizer": "adamw_torchao_8bit"}, "method": {"name": "full"}}
    kind, options = optimizer.arguments(spec_of(**given))["optimizer_cls_and_kwargs"]
    torch.manual_seed(0)
    first = torch.randn(37, 256)  # not a multiple of the kernel's block
    weights = [torch.nn.Parameter(first.to(DEVICE, copy=True)) for _ in range(2)]
    ours, theirs = (kind([weight], **options | {"lr": 1e-2}) for weight in weights)
    ours.by_kernel, theirs.by_kernel = True, False
    for size in (1.0, 100.0, 0.01):
        gradient = size * torch.randn(37, 256).to(DEVICE)
        for weight, stepping in zip(weights, (ours, theirs), strict=True):
            weight.grad = gradient.clone()
            stepping.step()
        assert torch.allclose(*weights, rtol=1e-4, atol=1e-5)
        for name in ("exp_avg", "exp_avg_sq"):
            one, other = (each.state[weight][name] for each, weight in zip((ours, theirs), weights, strict=True))
            assert torch.allclose(one.scale, other.scale, rtol=1e-5)
            apart = (one.codes.int() - other.codes.int()).abs()
            assert apart.max() <= 1
            assert apart.float().mean() < 1e-3
    assert (weights[0].cpu() != first).all()


def test_nan_gradient_makes_weights_nan():
    """A GPU's NaN is 0x7FFFFFFF. Stochastic rounding without a check would turn it into -0."""
    adamw_step = module("kernels.adamw").adamw_step
    weight, first, second = (torch.ones(3000, dtype=torch.bfloat16, device=DEVICE) for _ in range(3))
    gradient = torch.full((3000,), 0x7FFFFFFF, dtype=torch.int32, device=DEVICE).view(torch.float32)
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0, "eps": 1e-8}
    adamw_step(weight, gradient, first, second, torch.ones((), device=DEVICE), 1, 12345, group)
    assert all(part.isnan().all() for part in (weight, first, second))


def test_learning_rate_stays_on_the_host(torchao):
    """accelerate loads a state that it moved to the device."""
    weight = torch.nn.Parameter(torch.ones(4))
    kind, options = optimizer.arguments(spec_of(train={"optimizer": "adamw_torchao_fp32"}))["optimizer_cls_and_kwargs"]
    made = kind([weight], **options)
    rate, state = made.param_groups[0]["lr"], made.state_dict()
    state["param_groups"][0]["lr"] = torch.tensor(0.5)
    made.load_state_dict(state)
    assert made.param_groups[0]["lr"] is rate
    assert rate == 0.5


def test_missing_stochastic_rounding_fails_the_run(torchao, train_here, monkeypatch):
    arguments = optimizer.arguments
    monkeypatch.setattr(optimizer, "arguments", lambda spec: {
        key: (kind, options | {"bf16_stochastic_round": False}) for key, (kind, options) in arguments(spec).items()
    })  # fmt: skip
    with pytest.raises(NotAppliedError, match="does not use stochastic rounding"):
        train_here(train={"optimizer": "adamw_torchao_bf16"}, method={"name": "full"})


@NEEDS_TORCHAO
@pytest.mark.parametrize("name", [*STATES, "adamw_torchao_8bit"])
def test_stochastic_rounding_is_unbiased(torchao, name):
    """Adam's first step is the learning rate.

    Below 1 the distance of bfloat16 numbers is 2^-8, so one weight in 39 moves at a step of 1e-4. The mean of n choices
    has a standard deviation of sqrt(q (1 - q) / n) distances.
    """
    n, step, apart = 1 << 20, 1e-4, torch.finfo(torch.bfloat16).eps / 2
    weight = torch.nn.Parameter(torch.ones(n, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    kind, options = optimizer.arguments(spec_of(train={"optimizer": name}))["optimizer_cls_and_kwargs"]
    made = kind([weight], **options | {"lr": step, "weight_decay": 0.0})
    torch.manual_seed(0)
    made.step()
    share = step / apart
    moved = (1 - weight.double()).mean().item()
    assert moved == pytest.approx(step, abs=5 * apart * (share * (1 - share) / n) ** 0.5)
    dtypes = {tensor.dtype for tensor in plain_tensors(made.state[weight]["exp_avg"])}
    assert optimizer.STATES[name.rpartition("_")[2]][0] in dtypes


def test_missing_torchao_is_an_error_with_the_command(monkeypatch):
    monkeypatch.setattr(trl, "_installed", lambda name: name != "torchao")
    with pytest.raises(MissingError, match=r"needs torchao.*pip install 'ftbench\[torchao\]'"):
        trl.check_installed(spec_of(train={"optimizer": "adamw_torchao_8bit"}))
    trl.check_installed(spec_of(method={"name": "full"}, optimizations={"fp8": "tensorwise"}))


def test_strategy_without_torchao_support_is_rejected():
    changes = {"train": {"optimizer": "adamw_torchao_8bit"}, "method": {"name": "full"}}
    assert incompatibilities(spec_of(**changes)) == []
    launch = spec_of().launch.model_copy(update={"gpus": 2, "strategy": "zero2"})
    problems = incompatibilities(spec_of(**changes).model_copy(update={"launch": launch}))
    assert "train.optimizer adamw_torchao_8bit is not supported by zero2: use adamw_torch_fused" in problems

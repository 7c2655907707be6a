"""Transformer Engine's layers replace frozen ones. A stand-in replaces the package, which needs a GPU."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from types import ModuleType
from typing import ClassVar

import pytest
import torch

from conftest import spec_of
from ftbench.errors import MissingError, SpecError
from ftbench.estimate.workload.model import shape_of
from ftbench.estimate.workload.plan import plan_of
from ftbench.kernels.te_linear import RECIPES, TeLinear
from ftbench.launch import trl
from ftbench.spec.incompatibilities import incompatibilities, machine_incompatibilities
from ftbench.worker import methods, optimizations
from ftbench.worker.model import loading
from ftbench.worker.optimizations import fp8

IMAGES = {"name": "images", "samples": 8, "image_size": [60, 40], "mean_length": 20, "max_length": 512}


def asking(value="te-current", **sections):
    spec = spec_of(**sections)
    return spec.model_copy(update={"optimizations": spec.optimizations.model_copy(update={"fp8": value})})


class Engine(torch.nn.Linear):
    """Enforce the requirements of te.pytorch.Linear: rows in multiples, and 8 bits only inside its context."""

    scaling: ClassVar[list] = []

    def __init__(self, in_features, out_features, bias, params_dtype, device):
        super().__init__(in_features, out_features, bias, dtype=params_dtype, device=device)

    def forward(self, x):
        assert self.scaling, "a product outside of the context is made in 16 bits"
        assert len(x) % 16 == 0
        return super().forward(x)


@pytest.fixture
def engine(monkeypatch):
    @contextmanager
    def fp8_autocast(enabled, fp8_recipe):
        Engine.scaling.append(type(fp8_recipe).__name__)
        yield
        Engine.scaling.pop()

    names = (
        "transformer_engine",
        "transformer_engine.pytorch",
        "transformer_engine.common",
        "transformer_engine.common.recipe",
    )
    modules = {name: ModuleType(name) for name in names}
    modules["transformer_engine.pytorch"].Linear, modules["transformer_engine.pytorch"].fp8_autocast = (
        Engine,
        fp8_autocast,
    )
    for name in RECIPES.values():
        setattr(modules["transformer_engine.common.recipe"], name, type(name, (), {}))
    modules["transformer_engine"].pytorch = modules["transformer_engine.pytorch"]
    modules["transformer_engine.common"].recipe = modules["transformer_engine.common.recipe"]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("value", RECIPES)
@pytest.mark.parametrize("rows", [1, 577, 64])
def test_any_number_of_rows_is_multiplied_and_takes_its_gradient(engine, value, rows):
    torch.manual_seed(0)
    base = torch.nn.Linear(32, 48)
    base.requires_grad_(False)
    layer = TeLinear(base, value)
    x = torch.randn(1, rows, 32, requires_grad=True)
    out = layer(x)
    assert torch.allclose(out, base(x), atol=1e-6)
    (found,) = torch.autograd.grad(out.sum(), x)
    (expected,) = torch.autograd.grad(base(x).sum(), x)
    assert torch.allclose(found, expected, atol=1e-5)
    assert torch.allclose(layer.forward_in_16_bits(x), base(x), atol=1e-6)
    assert not any(parameter.requires_grad for parameter in layer.parameters())


@pytest.mark.parametrize("model", ["tiny/qwen3", "tiny/llava-next"])
def test_what_is_frozen_is_converted_once_adapters_lie_on_it(engine, cache, model):
    """Layers of each part are replaced; adapters, the head and fully trained layers are not."""
    vision = {} if model == "tiny/qwen3" else {"projector": "full"}
    spec = asking(model={"id": model}, method=vision, **({"dataset": IMAGES} if vision else {}))
    plain = methods.load("lora").adapt(loading.load_model(spec, loading.source_of(spec.model)), spec)
    before = {name for name, module in plain.named_modules() if type(module) is torch.nn.Linear}
    trained = {name: parameter.clone() for name, parameter in plain.named_parameters() if parameter.requires_grad}
    optimizations.apply(plain, spec)
    converted = {name for name, module in plain.named_modules() if isinstance(module, TeLinear)}
    left = before - converted
    assert converted
    assert all("lora_" in name or "lm_head" in name or "projector" in name for name in left)
    assert any("vision_tower" in name for name in converted) == bool(vision)
    assert fp8.layers(plain) == len(converted)
    assert fp8.verify(plain, spec) == []
    now = {name: parameter for name, parameter in plain.named_parameters() if parameter.requires_grad}
    assert now.keys() == trained.keys()
    assert all(torch.equal(now[name], value) for name, value in trained.items())


@pytest.mark.parametrize("fused", [False, True])
def test_products_of_adapted_layers_are_those_of_the_layers_before(engine, cache, fused):
    outputs = []
    for value in ("off", "te-delayed"):
        torch.manual_seed(0)
        spec = asking(value, optimizations={"fused_lora": fused})
        model = methods.load("lora").adapt(loading.load_model(spec, loading.source_of(spec.model)), spec)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.constant_(parameter, 0.02)
        optimizations.apply(model, spec)
        outputs.append(model(input_ids=torch.arange(21)[None]).logits)
    assert torch.allclose(*outputs, atol=1e-4)


def test_what_is_not_installed_is_told_with_the_command(monkeypatch):
    monkeypatch.setattr(trl, "_installed", lambda name: name != "transformer_engine")
    with pytest.raises(MissingError, match=r"pip install --no-build-isolation 'transformer-engine\[pytorch\]'"):
        trl.check_installed(asking("te-delayed"))
    trl.check_installed(asking("tensorwise"))


@pytest.mark.parametrize(
    ("value", "capability", "told"),
    [("te-mxfp8", (9, 0), "10.0 or higher"), ("te-current", (8, 0), "8.9 or higher"), ("te-mxfp8", None, "no GPU")],
)
def test_a_gpu_without_its_products_is_refused(value, capability, told):
    assert told in "; ".join(machine_incompatibilities(asking(value), capability))
    assert machine_incompatibilities(asking("te-mxfp8"), (10, 0)) == []
    assert machine_incompatibilities(asking("te-current"), (9, 0)) == []


def test_te_delayed_is_refused_with_gradient_checkpointing():
    checkpointed = {"gradient_checkpointing": True}
    assert "use te-current" in "; ".join(incompatibilities(asking("te-delayed", optimizations=checkpointed)))
    current = asking("te-current", train={"precision": "bf16"}, optimizations=checkpointed)
    assert incompatibilities(current) == []


def test_transformer_engine_is_not_estimated():
    spec = asking()
    with pytest.raises(SpecError, match="estimate with tensorwise"):
        plan_of(spec, shape_of(spec.model))

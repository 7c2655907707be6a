"""`measure.save_adapter` saves the trained weights in a format that the libraries load."""

from __future__ import annotations

import pytest
import torch
from peft import LoraModel, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from conftest import spec_of
from ftbench.errors import NotAppliedError
from ftbench.store.rundir import read_json
from ftbench.worker import methods
from ftbench.worker.model import loading

IDS = torch.arange(5, 45).view(2, 20)
SAVE = {"measure": {"save_adapter": True}, "train": {"learning_rate": 0.02, "max_steps": 2}}


@pytest.mark.parametrize(
    ("model", "method"),
    [
        ("tiny/qwen3", {"name": "lora"}),
        ("tiny/qwen3", {"name": "qlora"}),
        ("tiny/qwen3-moe", {"name": "lora", "experts": True}),
        ("tiny/gpt-oss", {"name": "qlora", "quant_type": "mxfp4", "experts": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_only_adapters_are_saved_and_peft_loads_them(train_here, model, method):
    run = train_here(model={"id": model}, method=method, **SAVE)
    saved_tensors = load_file(run.adapter / "adapter_model.safetensors")
    assert all("lora_" in name for name in saved_tensors)
    assert sum(t.numel() for t in saved_tensors.values()) == read_json(run.applied)["parameters"]["trainable"]
    assert not list(run.adapter.glob("model*"))
    assert sum(file.stat().st_size for file in run.adapter.iterdir()) < 4e6
    if method.get("quant_type") == "mxfp4":  # loaded in test_mxfp4.py
        return
    spec = spec_of(model={"id": model}, method=method)
    base = methods.load(spec.method.name).load(spec, loading.source_of(spec.model))
    untrained = base(input_ids=IDS).logits.detach()
    trained = PeftModel.from_pretrained(base, run.adapter)(input_ids=IDS).logits
    assert not torch.allclose(trained, untrained, atol=1e-3)
    saved = {name: value for name, value in saved_tensors.items() if "lora_B" in name}
    assert all(float(value.abs().max()) > 0 for value in saved.values() if value.numel())


def test_full_training_saves_the_model(train_here):
    run = train_here(method={"name": "full"}, **SAVE)
    model = AutoModelForCausalLM.from_pretrained(run.adapter)
    spec = spec_of()
    before = AutoModelForCausalLM.from_pretrained(loading.source_of(spec.model))
    assert not torch.allclose(model(input_ids=IDS).logits, before(input_ids=IDS).logits, atol=1e-3)


def test_omitted_adapters_fail_the_run(train_here, monkeypatch):
    """peft 0.21.2 omitted adapters of checkpointed layers under FSDP2."""
    monkeypatch.setattr(LoraModel, "_get_adapter_state_dict", lambda **given: {})
    with pytest.raises(NotAppliedError, match=r"measure.save_adapter is on and 0 of [\d,]+ weights were saved"):
        train_here(method={"name": "lora"}, **SAVE)


def test_nothing_is_saved_by_default(train_here):
    assert not train_here(train={"max_steps": 1}).adapter.exists()

"""`measure.save_adapter`: what was trained is kept, no more, and the libraries read it."""

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
KEEP = {"measure": {"save_adapter": True}, "train": {"learning_rate": 0.02}}


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
def test_adapters_are_all_that_is_kept_and_peft_reads_them(train_here, model, method):
    run = train_here(model={"id": model}, method=method, **KEEP)
    kept = load_file(run.adapter / "adapter_model.safetensors")
    assert all("lora_" in name for name in kept)
    assert sum(t.numel() for t in kept.values()) == read_json(run.applied)["parameters"]["trainable"]
    assert not list(run.adapter.glob("model*"))
    assert sum(file.stat().st_size for file in run.adapter.iterdir()) < 4e6
    if method.get("quant_type") == "mxfp4":  # the 16-bit model is another test's: test_mxfp4.py
        return
    spec = spec_of(model={"id": model}, method=method)
    base = methods.load(spec.method.name).load(spec, loading.source_of(spec.model))
    untrained = base(input_ids=IDS).logits.detach()
    trained = PeftModel.from_pretrained(base, run.adapter)(input_ids=IDS).logits
    assert not torch.allclose(trained, untrained, atol=1e-3)
    saved = {name: value for name, value in kept.items() if "lora_B" in name}
    assert all(float(value.abs().max()) > 0 for value in saved.values() if value.numel())


def test_of_full_training_the_model_is_kept(train_here):
    run = train_here(method={"name": "full"}, **KEEP)
    model = AutoModelForCausalLM.from_pretrained(run.adapter)
    spec = spec_of()
    before = AutoModelForCausalLM.from_pretrained(loading.source_of(spec.model))
    assert not torch.allclose(model(input_ids=IDS).logits, before(input_ids=IDS).logits, atol=1e-3)


def test_adapters_that_a_library_leaves_out_are_said(train_here, monkeypatch):
    """As peft 0.21.2 did of those of layers that are computed again under FSDP2."""
    monkeypatch.setattr(LoraModel, "_get_adapter_state_dict", lambda **given: {})
    with pytest.raises(NotAppliedError, match=r"measure.save_adapter is on and 0 of [\d,]+ weights are saved"):
        train_here(method={"name": "lora"}, **KEEP)


def test_nothing_is_kept_unasked(train_here):
    assert not train_here(train={"max_steps": 1}).adapter.exists()

"""Every family trains with the estimated parameters and isolated samples. Unsupported options are error messages."""

from __future__ import annotations

import json

import pytest
import torch
from shapes import SHAPES, config_of
from transformers import AutoConfig, AutoModelForCausalLM

from conftest import spec_of
from ftbench.errors import SpecError
from ftbench.estimate.workload.model import adapter_parameters
from ftbench.estimate.workload.plan import targets
from ftbench.families import describe
from ftbench.store.rundir import read_json
from ftbench.worker.optimizations import packing

LINEAR_ATTENTION = {
    "model_type": "qwen3_next", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip


@pytest.fixture
def train_family(train_here, tmp_path):
    """Train a small model of a family and return applied.json."""

    def train(family, config=None, **sections):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config or config_of(family)))
        model = {"id": f"tiny/{family}", "path": str(path)}
        return read_json(train_here(model=model, dataset={"samples": 4}, **sections).applied)

    return train


@pytest.mark.parametrize("family", SHAPES)
def test_every_family_trains_the_estimated_parameters(train_family, family):
    """test_family_shapes.py counts those of other methods and targets."""
    parameters = train_family(family, optimizations={"fused_lora": True, "gradient_checkpointing": True})["parameters"]
    spec, model = spec_of(), describe(config_of(family))
    adapters = adapter_parameters(model, targets(spec.method, model), spec.method.rank)
    assert (parameters["trainable"], parameters["total"]) == (adapters, model.total + adapters)


def model_of(family):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config_of(family))).float().eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, 0, 0.2)
    return model


@pytest.mark.parametrize("family", SHAPES)
def test_packed_samples_do_not_see_each_other(family):
    model = model_of(family)
    packing.apply(model, spec_of(optimizations={"packing": True}))
    samples = [torch.randint(4, 500, (length,)) for length in (9, 17, 40)]
    row, places = torch.cat(samples)[None], torch.cat([torch.arange(len(each)) for each in samples])[None]
    with torch.no_grad():
        single = model(input_ids=samples[1][None], use_cache=False).logits[0]
        together = model(input_ids=row, position_ids=places, use_cache=False).logits[0, 9:26]
        unmarked = model(input_ids=row, use_cache=False).logits[0, 9:26]
    rounding = 2 * 96 * torch.finfo(torch.float32).eps * single.abs().max()  # layers with sums of 96 terms
    assert (together - single).abs().max() < rounding
    assert (unmarked - single).abs().max() > 100 * rounding  # without isolation the difference is visible


@pytest.mark.parametrize("name", ["packing", "padding_free"])
def test_packing_rejects_linear_attention(train_family, name):
    with pytest.raises(SpecError, match=f"optimizations.{name}: Qwen3NextForCausalLM has layers of linear attention"):
        train_family("qwen3_next", LINEAR_ATTENTION, optimizations={name: True})


@pytest.mark.parametrize(
    ("family", "scale"), [("gemma2", {}), ("cohere2", {}), ("granite", {"logits_scaling": 8.0})], ids=str
)
def test_chunked_loss_rejects_scaled_logits(train_family, family, scale):
    with pytest.raises(SpecError, match="chunked_loss does not support how"):
        train_family(family, config_of(family) | scale, optimizations={"chunked_loss": True})


def test_model_without_layers_is_an_error_message(train_family):
    config = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 512, "n_positions": 128}
    with pytest.raises(SpecError, match="does not find the layers of GPT2LMHeadModel"):
        train_family("gpt2", config, method={"targets": "all-linear"})

"""A family's description equals transformers' model with the method applied: parameters, matrices and FLOPs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from shapes import SHAPES, config_of
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from conftest import spec_of
from ftbench.errors import SpecError
from ftbench.estimate.workload import model as estimates
from ftbench.estimate.workload.plan import targets
from ftbench.estimate.workload.sharding import sharding_of
from ftbench.facts import architectures
from ftbench.families import FAMILIES, describe
from ftbench.worker import methods
from ftbench.worker.measure import effective_config

TINY = {  # vision models: test_image_counts.py
    config["model_type"]: config
    for name, config in architectures().items()
    if name.startswith("tiny/") and config["model_type"] in FAMILIES
}
CONFIGS = TINY | {family: config_of(family) for family in SHAPES}
METHODS: dict[str, dict[str, Any]] = {
    "full": {"name": "full"},
    "lora": {"name": "lora"},
    "all-linear": {"name": "lora", "targets": "all-linear"},
    "two": {"name": "lora", "targets": ["o_proj", "down_proj"], "rank": 4},
    "experts": {"name": "lora", "experts": True},
}


def built(family: str, **options: Any) -> Any:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIGS[family]), **options)


def trainable_shape(spec: Any, family: str) -> Any:
    """Return the estimate for a family's test shape."""
    shape = describe(CONFIGS[family])
    rank = getattr(spec.method, "rank", 0)
    return estimates._trainable(shape, targets(spec.method, shape), rank, sharding_of(spec.launch))


def test_every_family_has_a_test_shape() -> None:
    assert set(CONFIGS) == set(FAMILIES)


def test_experts_of_a_token_are_counted_in_gemma4() -> None:
    """Its config names them `top_k_experts`."""
    config = {"model_type": "gemma4_text", "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64,
              "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
              "global_head_dim": 16, "vocab_size": 2048, "hidden_size_per_layer_input": 0, "num_experts": 4,
              "enable_moe_block": True}  # fmt: skip
    with torch.device("meta"):
        two, four = (AutoModelForCausalLM.from_config(AutoConfig.for_model(**config, top_k_experts=n)) for n in (2, 4))
    experts = effective_config.parameters_by_kind(four)["experts"]["total"]
    assert experts > 0
    assert effective_config.matmul_shape(four).base - effective_config.matmul_shape(two).base == experts / 2


@pytest.mark.parametrize(
    ("family", "method"),
    [(family, method) for family in FAMILIES for method in METHODS if method != "two" or family == "qwen3"],
)
def test_description_equals_the_live_model(family: str, method: str) -> None:
    spec, shape = spec_of(method=METHODS[method]), describe(CONFIGS[family])
    if method == "experts" and not shape.has_experts:
        pytest.skip("has no experts")
    with torch.device("meta"):
        model = methods.load(spec.method.name).adapt(built(family), spec)
    estimate = trainable_shape(spec, family)
    kinds = effective_config.parameters_by_kind(model)
    adapters = 0 if method == "full" else estimate.trained
    assert sum(kind["total"] for kind in kinds.values()) - adapters == shape.total
    assert sum(kind["trainable"] for kind in kinds.values()) == estimate.trained
    assert effective_config.matmul_shape(model) == estimate.matmul
    assert kinds["other"]["total"] == 0


def test_lookup_tables_are_not_products() -> None:
    """Gemma 3n has a table of inputs for each layer, and its head is the weight of the other table."""
    config = AutoConfig.for_model(
        "gemma3n_text", hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, vocab_size=100, vocab_size_per_layer_input=90,
        hidden_size_per_layer_input=8, num_kv_shared_layers=0, layer_types=["full_attention"] * 4,
        activation_sparsity_pattern=[0.0] * 4, laurel_rank=4,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert effective_config.matmul_shape(model).head == 100 * 32


def test_the_layers_of_a_model_can_differ_in_head_size() -> None:
    config = AutoConfig.for_model("gemma4_text", num_hidden_layers=6)
    widths, _ = effective_config._attention(config)
    heads = config.num_attention_heads
    assert widths == tuple(heads * layer.head_dim for layer in config.per_layer_config)
    assert len(set(widths)) == 2


def test_dense_model_rejects_expert_adapters() -> None:
    with torch.device("meta"), pytest.raises(SpecError, match="has no fused expert weights"):
        methods.load("lora").adapt(built("phi3"), spec_of(method=METHODS["experts"]))


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_flops_equal_torchs_count(family: str) -> None:
    length = 24
    model = built(family, attn_implementation="eager", experts_implementation="eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.randint(4, 100, (1, length)), use_cache=False)
    matmul = trainable_shape(spec_of(method={"name": "full"}), family).matmul
    squares = 4 * sum(matmul.attention_width) * length**2  # eager attention computes all pairs
    counts = {module: sum(by.values()) for module, by in counter.get_flop_counts().items()}
    angles = sum(count for module, count in counts.items() if module.endswith("rotary_emb"))  # not matrix products
    assert counts["Global"] - angles == 2 * length * (matmul.base + matmul.head) + squares

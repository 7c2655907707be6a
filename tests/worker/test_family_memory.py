"""The formula estimate of every family against the simulation of the worker's own code, on small shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="training libraries are not installed")

import warm
from ftbench.core.hardware import find_gpu
from ftbench.estimate.memory.estimate import estimate_memory
from ftbench.families import FAMILIES
from ftbench.spec.experiment import Experiment, resolve
from ftbench.store.rundir import RunDir
from ftbench.worker.simulate.run import simulate

GPU = find_gpu("NVIDIA GeForce RTX 4090")
CAPABILITY = (8, 9)
_DECODER = {
    "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 1024, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False, "max_position_embeddings": 4096,
}  # fmt: skip
_WIDE = {"head_dim": 48}
_TIED = {"tie_word_embeddings": True}
_SLIDING = _WIDE | _TIED | {"sliding_window": 128, "query_pre_attn_scalar": 48}
_MOE = {"moe_intermediate_size": 192, "num_experts": 8, "num_experts_per_tok": 2}
_LOCAL = {"intermediate_size": 192, "num_local_experts": 8, "num_experts_per_tok": 2}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": _WIDE, "mistral": _WIDE | {"sliding_window": 128}, "qwen2": {}, "qwen3": _WIDE, "smollm3": _TIED,
    "granite": {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.02},
    "phi3": {}, "olmo2": {}, "gemma2": _SLIDING, "gemma3_text": _SLIDING,
    "cohere2": _WIDE | _TIED | {"sliding_window": 128}, "glm4": _WIDE, "qwen3_moe": _WIDE | _MOE,
    "mixtral": _WIDE | _LOCAL, "gpt_oss": _WIDE | _LOCAL | {"sliding_window": 128, "num_hidden_layers": 4},
    "deepseek_v3": {
        "num_key_value_heads": 8, "moe_intermediate_size": 192, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "q_lora_rank": 96, "kv_lora_rank": 64,
        "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
    },
    "qwen3_next": _WIDE | _MOE | {
        "num_hidden_layers": 4, "shared_expert_intermediate_size": 160, "linear_num_key_heads": 4,
        "linear_num_value_heads": 8, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    },
}  # fmt: skip
METHODS = ("lora", "full")


def spec_of(family: str, method: str, folder: Path, on: dict[str, Any] | None = None) -> Experiment:
    """3,072 tokens a step: activations are most of what there is."""
    path = folder / f"{family}.json"
    path.write_text(json.dumps({"model_type": family, **_DECODER, **SHAPES[family]}))
    spec = Experiment.model_validate({
        "name": "x", "model": {"id": f"small/{family}", "weights": "random", "path": str(path), "dtype": "bfloat16"},
        "method": {"name": method}, "train": {"batch_size": 6, "precision": "bf16"},
        "dataset": {"name": "synthetic", "samples": 12, "length": 512, "max_length": 512}, "optimizations": on or {},
    })  # fmt: skip
    return resolve(spec, CAPABILITY)


def largest_errors(cases: list[tuple[str, str]], folder: Path, **on: Any) -> dict[str, float]:
    """Estimated over simulated allocated memory, less 1, by family and method."""
    specs = {f"{family} {method}": spec_of(family, method, folder, on) for family, method in cases}
    found = warm.each(simulate, [(spec, RunDir(folder), CAPABILITY, 24 * 10**9) for spec in specs.values()])
    peaks = {name: simulated["peak"]["gb"] for name, simulated in zip(specs, found, strict=True)}
    assert GPU is not None
    return {name: estimate_memory(spec, GPU).allocated.expected / peaks[name] - 1 for name, spec in specs.items()}


def test_every_family_has_a_shape_here() -> None:
    assert set(SHAPES) == set(FAMILIES)


def test_checkpointed_experts_are_estimated_as_the_worker_allocates(tmp_path: Path) -> None:
    """While a layer is made again its experts' outputs stand beside the gradient that waits for them."""
    cases = [(family, method) for family in ("deepseek_v3", "qwen3_moe") for method in METHODS]
    errors = largest_errors(cases, tmp_path, gradient_checkpointing=True)
    assert {name: error for name, error in errors.items() if abs(error) > 0.02} == {}


# Each family with one method, the next one with the other; then the other way round.
MATRIX = [(family, METHODS[(at + turn) % 2]) for turn in (0, 1) for at, family in enumerate(FAMILIES)]
FIRST, REST = MATRIX[: len(FAMILIES)], MATRIX[len(FAMILIES) :]


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [pytest.param(FIRST[0::2], id="lora"), pytest.param(FIRST[1::2], id="full"),
     pytest.param(REST, marks=pytest.mark.exhaustive, id="the other of each")],
)  # fmt: skip
def test_every_family_is_estimated_as_the_worker_allocates(tmp_path: Path, cases: list[tuple[str, str]]) -> None:
    errors = largest_errors(cases, tmp_path)
    assert {name: error for name, error in errors.items() if abs(error) > 0.02} == {}


def test_most_of_a_small_shape_is_activations(tmp_path: Path) -> None:
    """Else 2 % would say little of the terms."""
    assert GPU is not None
    for family in FAMILIES:
        parts = estimate_memory(spec_of(family, "full", tmp_path), GPU).parts
        assert parts["activations"] > 0.5 * sum(parts.values()), family

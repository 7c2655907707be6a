"""Compare the memory estimate of each model family with peaks of the worker's own code on small shapes.

`recorded_peaks.json` holds GiB that the worker allocated in two steps on tensors without memory (torch 2.13,
transformers 5.17, peft 0.21, trl 1.14). Peaks of models that read images are without cuBLAS's workspace.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ftbench.core.hardware import Gpu, find_gpu
from ftbench.estimate.memory.estimate import estimate_memory
from ftbench.families import FAMILIES
from ftbench.spec.experiment import Experiment, resolve

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("recorded_peaks.json").read_text())
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
}  # fmt: skip
_TEXT = {
    "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 1024, "max_position_embeddings": 4096, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_ENCODER = {"hidden_size": 128, "intermediate_size": 320}
_BLOCKS = {**_ENCODER, "depth": 4, "num_heads": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
           "out_hidden_size": 256}  # fmt: skip
IMAGE_SHAPES: dict[str, dict[str, Any]] = {
    "llava_next": {
        "image_grid_pinpoints": [[112, 224], [224, 112], [224, 224]],
        "text_config": {"model_type": "mistral", "sliding_window": None},
        "vision_config": {**_ENCODER, "model_type": "clip_vision_model", "num_hidden_layers": 4,
                          "num_attention_heads": 4, "patch_size": 14, "image_size": 112, "projection_dim": 32,
                          "vocab_size": 1024},
    },
    "qwen2_5_vl": {
        "text_config": {"model_type": "qwen2_5_vl_text", "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}},
        "vision_config": {**_BLOCKS, "patch_size": 14, "window_size": 112, "fullatt_block_indexes": [1, 3],
                          "tokens_per_second": 2},
    },
    "qwen3_vl": {
        "text_config": {"model_type": "qwen3_vl_text", "head_dim": 32, "rope_scaling": {
            "rope_type": "default", "mrope_section": [8, 4, 4], "mrope_interleaved": True}},
        "vision_config": {**_BLOCKS, "patch_size": 16, "deepstack_visual_indexes": [0, 2],
                          "num_position_embeddings": 256},
    },
}  # fmt: skip
_LEARNS = {"vision": "lora"}
IMAGE_METHODS = {
    "lora": {"name": "lora"}, "lora, vision lora": {"name": "lora"} | _LEARNS, "full": {"name": "full"},
    "qlora": {"name": "qlora"}, "qlora, vision lora": {"name": "qlora", "projector": "lora"} | _LEARNS,
}  # fmt: skip


def gpu_named(name: str) -> Gpu:
    gpu = find_gpu(name)
    assert gpu is not None
    return gpu


def family_spec(family: str, method: str, folder: Path, **on: Any) -> Experiment:
    """Return a spec with 3,072 tokens per step, so that activations are most of its memory."""
    path = folder / f"{family}.json"
    path.write_text(json.dumps({"model_type": family, **_DECODER, **SHAPES[family]}))
    spec = Experiment.model_validate({
        "name": "x", "model": {"id": f"small/{family}", "weights": "random", "path": str(path), "dtype": "bfloat16"},
        "method": {"name": method}, "train": {"batch_size": 6, "precision": "bf16"}, "optimizations": on,
        "dataset": {"name": "synthetic", "samples": 12, "length": 512, "max_length": 512},
    })  # fmt: skip
    return resolve(spec, (8, 9))


def image_spec(family: str, method: str, folder: Path, **on: Any) -> Experiment:
    """Return a spec with four pictures per step, so that activations are most of its memory."""
    path, shape = folder / f"{family}.json", IMAGE_SHAPES[family]
    text = {"text_config": _TEXT | shape["text_config"]}
    path.write_text(json.dumps({"model_type": family, "tie_word_embeddings": False, **shape, **text}))
    spec = Experiment.model_validate({
        "name": "x", "model": {"id": f"small/{family}", "weights": "random", "path": str(path), "dtype": "bfloat16"},
        "method": IMAGE_METHODS[method], "train": {"batch_size": 4, "precision": "bf16"}, "optimizations": on,
        "dataset": {"name": "images", "samples": 8, "image_size": [700, 500], "max_length": 1024},
    })  # fmt: skip
    return resolve(spec, (9, 0))


def test_every_family_has_a_recorded_peak_for_lora_and_full() -> None:
    assert set(SHAPES) == set(FAMILIES)
    assert set(RECORDED["family"]) == {f"{family} {method}" for family in FAMILIES for method in ("lora", "full")}


CASES = [(kind, case) for kind in ("family", "checkpointed") for case in RECORDED[kind]]


@pytest.mark.parametrize(("kind", "case"), CASES)
def test_estimate_of_every_family_agrees_with_the_worker(tmp_path: Path, kind: str, case: str) -> None:
    on = {"gradient_checkpointing": True} if kind == "checkpointed" else {}
    estimate = estimate_memory(family_spec(*case.split(), tmp_path, **on), gpu_named("NVIDIA GeForce RTX 4090"))
    assert estimate.allocated.expected == pytest.approx(RECORDED[kind][case], rel=0.02)


def test_most_memory_of_a_small_shape_is_activations(tmp_path: Path) -> None:
    """Otherwise 2 % of the total would hide an error in the activations."""
    for family in FAMILIES:
        parts = estimate_memory(family_spec(family, "full", tmp_path), gpu_named("NVIDIA GeForce RTX 4090")).parts
        assert parts["activations"] > 0.5 * sum(parts.values()), family


@pytest.mark.parametrize("case", RECORDED["images"])
def test_estimate_of_models_with_images_agrees_with_the_worker(tmp_path: Path, case: str) -> None:
    family, _, method = case.partition(" ")
    estimate = estimate_memory(image_spec(family, method, tmp_path), gpu_named("NVIDIA H200"))
    tensors = estimate.allocated.expected - estimate.parts["workspace"]
    assert tensors == pytest.approx(RECORDED["images"][case], rel=0.03)


@pytest.mark.parametrize("family", RECORDED["images_checkpointed"])
def test_estimate_of_checkpointed_models_with_images_agrees_with_the_worker(tmp_path: Path, family: str) -> None:
    spec = image_spec(family, "lora", tmp_path, gradient_checkpointing=True)
    estimate = estimate_memory(spec, gpu_named("NVIDIA H200"))
    tensors = estimate.allocated.expected - estimate.parts["workspace"]
    assert tensors == pytest.approx(RECORDED["images_checkpointed"][family], rel=0.07)

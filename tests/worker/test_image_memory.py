"""The formula estimate of models that read images against the simulation of the worker's own code, on small shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="training libraries are not installed")

import warm
from ftbench.core.hardware import find_gpu
from ftbench.estimate.memory.estimate import estimate_memory
from ftbench.spec.experiment import Experiment, resolve
from ftbench.store.rundir import RunDir
from ftbench.worker.simulate.run import simulate

GPU, CAPABILITY = find_gpu("NVIDIA H200"), (9, 0)
_TEXT = {
    "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 1024, "max_position_embeddings": 4096, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_ENCODER = {"hidden_size": 128, "intermediate_size": 320}
_BLOCKS = {**_ENCODER, "depth": 4, "num_heads": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
           "out_hidden_size": 256}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
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
METHODS = {
    "lora": {"name": "lora"}, "lora, vision lora": {"name": "lora"} | _LEARNS, "full": {"name": "full"},
    "qlora": {"name": "qlora"}, "qlora, vision lora": {"name": "qlora", "projector": "lora"} | _LEARNS,
}  # fmt: skip


def spec_of(family: str, method: str, folder: Path, **on: Any) -> Experiment:
    """Four pictures a step: activations are most of what there is."""
    path, shape = folder / f"{family}.json", SHAPES[family]
    text = {"text_config": _TEXT | shape["text_config"]}
    path.write_text(json.dumps({"model_type": family, "tie_word_embeddings": False, **shape, **text}))
    spec = Experiment.model_validate({
        "name": "x", "model": {"id": f"small/{family}", "weights": "random", "path": str(path), "dtype": "bfloat16"},
        "method": METHODS[method], "train": {"batch_size": 4, "precision": "bf16"}, "optimizations": on,
        "dataset": {"name": "images", "samples": 8, "image_size": [700, 500], "max_length": 1024},
    })  # fmt: skip
    return resolve(spec, CAPABILITY)


def errors(cases: list[tuple[str, str]], folder: Path, **on: Any) -> dict[str, float]:
    """Estimated over simulated allocated memory, both without the workspace of products, less 1."""
    specs = [spec_of(family, method, folder, **on) for family, method in cases]
    found = warm.each(simulate, [(spec, RunDir(folder), CAPABILITY, 141 * 10**9) for spec in specs])
    assert GPU is not None
    result = {}
    for (family, method), spec, simulated in zip(cases, specs, found, strict=True):
        estimate, peak = estimate_memory(spec, GPU), simulated["peak"]
        said = estimate.allocated.expected - estimate.parts["workspace"]
        result[f"{family} {method}"] = said / (peak["gb"] - peak["parts_gb"]["workspace"]) - 1
    return result


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=pytest.mark.exhaustive) if family != "llava_next" else family for family in SHAPES],
)
def test_every_method_on_images_is_estimated_as_the_worker_allocates(tmp_path: Path, family: str) -> None:
    """All methods with one family; of the others a frozen and a trained encoder, 16-bit and 4-bit weights."""
    methods = METHODS if family == "llava_next" else ("lora, vision lora", "full", "qlora")
    cases = [(family, method) for method in methods]
    assert {name: error for name, error in errors(cases, tmp_path).items() if abs(error) > 0.03} == {}


@pytest.mark.slow
@pytest.mark.exhaustive
def test_checkpointed_layers_with_images_are_estimated_as_the_worker_allocates(tmp_path: Path) -> None:
    cases = [(family, "lora") for family in SHAPES]
    found = errors(cases, tmp_path, gradient_checkpointing=True)
    assert {name: error for name, error in found.items() if abs(error) > 0.07} == {}

"""No optimization reads the device within a step: the host would wait for all that the device has still to do, and
launch nothing meanwhile; a step that does could not be a CUDA graph."""

from __future__ import annotations

from typing import Any

import pytest

import warm
from conftest import spec_of
from device_waits import waits
from ftbench.store.rundir import RunDir

HALF: dict[str, Any] = {"model": {"dtype": "bfloat16"}, "train": {"precision": "bf16"}}
FASTEST = {"packing": True, "fixed_shape": True, "chunked_loss": True, "fused_lora": True, "attention": "varlen"}
PICTURES = {"name": "images", "samples": 4, "image_size": [90, 60], "max_length": 256, "mean_length": 20}
CASES: dict[str, tuple[dict[str, Any], set[str]]] = {  # what is changed, and who waits
    "what trl computes": ({}, {"sft_trainer.py _chunked_cross_entropy_loss", "sft_trainer.py compute_loss"}),
    "qlora": ({"optimizations": FASTEST, "method": {"name": "qlora", "upcast": False}}, set()),
    "sinks, adapters of experts": (
        {"optimizations": FASTEST, "model": {"id": "tiny/gpt-oss"}, "method": {"experts": True}}, set()),
    "full, stepped in the backward pass": (
        {"optimizations": FASTEST | {"fused_lora": False, "optimizer_in_backward": True}, "method": {"name": "full"},
         "train": {"max_grad_norm": 0}}, set()),
    "images": (
        {"optimizations": FASTEST | {"feature_cache": True}, "model": {"id": "tiny/llava-next"}, "dataset": PICTURES},
        {"import_utils.py torch_compilable_check", "modeling_llava_next.py pack_image_features"}),
}  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    folder = tmp_path_factory.mktemp("waits")
    specs = [spec_of(**{**HALF, **{key: HALF.get(key, {}) | keys for key, keys in changes.items()}})
             for changes, _ in CASES.values()]  # fmt: skip
    return dict(zip(CASES, warm.each(waits, [(spec, RunDir(folder)) for spec in specs]), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_nothing_within_a_step_waits_for_the_device(found, name):
    assert {wait.partition(" in ")[2] for wait in found[name]} - {"masking_utils.py _ignore_causal_mask_sdpa"} == (
        CASES[name][1]
    )

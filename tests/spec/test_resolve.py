"""A local checkpoint gets the settings of its family, `auto` settings keep their reason, and kernels are never dropped
silently in a comparison."""

from __future__ import annotations

import json

import pytest

from ftbench.spec.experiment import resolve
from ftbench.spec.incompatibilities import unpublished
from ftbench.spec.load import load
from ftbench.spec.methods import family

H200, AMPERE = (9, 0), (8, 0)
KERNELS = "optimizations.triton_kernels"


@pytest.fixture
def local(tmp_path):
    """A spec that trains a local folder with a Qwen3 config, and the folder."""
    model = tmp_path / "my-model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}))
    path = tmp_path / "spec.yaml"
    path.write_text("model: {path: my-model}\ndataset: sample\n")
    return path, model


def test_local_checkpoint_gets_the_settings_of_its_family(local, tmp_path):
    path, _ = local
    known = tmp_path / "known.yaml"
    known.write_text("model: Qwen/Qwen3-8B\ndataset: sample\n")
    for recipe in ("fastest", "fastest-fp8", "smallest", "small"):
        mine, published = (resolve(load(file, [f"recipe={recipe}"]), H200) for file in (path, known))
        assert family(mine.model) == family(published.model) == "qwen3"
        assert mine.optimizations == published.optimizations
        assert mine.train == published.train
        assert mine.resolved == published.resolved


def test_broken_or_missing_config_leaves_the_family_unknown(local):
    path, model = local
    (model / "config.json").write_text("{")
    assert family(load(path).model) is None
    (model / "config.json").unlink()
    assert family(load(path).model) is None


def test_resolved_settings_carry_value_and_reason(local):
    path, _ = local
    found = resolve(load(path, ["recipe=fastest-fp8", "method=lora"]), AMPERE).resolved
    assert {key: each["value"] for key, each in found.items()} == {
        "model.dtype": "bfloat16", KERNELS: False, "optimizations.fp8": "tensorwise", "optimizations.cuda_graph": False,
    }  # fmt: skip
    assert "9.0" in found[KERNELS]["reason"]
    assert resolve(load(path, ["model.dtype=float32", "train.precision=fp32"]), AMPERE).resolved == {}


def test_recipe_without_its_kernels_is_unpublished_unless_switched_off_by_name(local):
    path, _ = local
    assert unpublished(load(path, ["recipe=fastest"]), H200) is None
    assert unpublished(load(path, ["recipe=fastest", f"{KERNELS}=off"]), AMPERE) is None
    assert unpublished(load(path), None) is None
    assert "only on compute capability 9.0" in unpublished(load(path, ["recipe=fastest"]), AMPERE)
    other = ["model.path=none", "model.id=openai/gpt-oss-20b"]
    for machine in (H200, AMPERE, None):  # off on every machine, so that it is published without the kernels
        assert unpublished(load(path, ["recipe=fastest", *other]), machine) is None
    assert "the layers of gpt_oss" in unpublished(load(path, ["recipe=fastest-fp8", *other]), H200)
    sharded = ["recipe=fastest", "optimizations.fused_lora=off", "launch.gpus=2", "launch.strategy=fsdp"]
    assert "not tested with launch.strategy fsdp" in unpublished(load(path, sharded), H200)

"""Variants of an ablation: each value of each optimization."""

import json

import pytest

from ftbench.errors import SpecError
from ftbench.spec import ablation
from ftbench.spec.datasets import Dataset
from ftbench.spec.experiment import Experiment
from ftbench.spec.incompatibilities import incompatibilities
from ftbench.spec.load import load
from ftbench.spec.optimizations import Optimizations, choices

SPEC = Experiment.model_validate(
    {"name": "a", "model": {"id": "tiny/qwen3"}, "train": {"precision": "bf16", "optimizer": "adamw_torch_fused"},
     "optimizations": {"compile": True, "gradient_checkpointing": True}}
)  # fmt: skip
EVERY = ablation.variants("adamw_torch")
LEFT_OUT = {
    "attention": {"sdpa", "eager"},
    "compile": {"lean"},  # saves memory, not faster
    "image_size": {True},  # a size is a number
    "fp8": {"tensorwise-delayed"},  # not tested
    "cuda_graph": {True},  # needs three others; has its own recipe
    "optimizer_in_backward": {True, "offload"},  # needs a recipe without clipping
}
# Datasets for optimizations of images.
OF_IMAGES = {key: {"name": "file", "path": "/images"} for key in ("image_cache",)}


def test_each_value_of_an_optimization_is_a_variant():
    for key in Optimizations.model_fields:
        tried = [rung.changes[f"optimizations.{key}"] for rung in EVERY if rung.key == key]
        assert len(tried) == len(set(tried))
        assert set(tried) == set(choices(key)) - LEFT_OUT.get(key, set()), key


def test_variants_are_valid():
    for rung in EVERY:
        spec = SPEC.model_copy(update={"dataset": Dataset.model_validate(OF_IMAGES.get(rung.key, {}))})
        assert incompatibilities(ablation.with_changes(ablation.plain_spec(spec), rung.changes)) == [], rung.name


def test_plain_spec_has_no_optimizations():
    found = ablation.plain_spec(SPEC)
    assert (found.optimizations, found.train.optimizer, found.train.precision) == (
        Optimizations(), "adamw_torch", "bf16",
    )  # fmt: skip


def test_plain_spec_keeps_sgd():
    spec = ablation.with_changes(SPEC, {"train.optimizer": "sgd"})
    assert ablation.plain_spec(spec).train.optimizer == "sgd"
    assert not [rung for rung in ablation.variants("sgd") if rung.key == "optimizer"]


@pytest.mark.parametrize(
    ("only", "names"),
    [
        (["compile"], ["compile", "compile dynamic"]),
        (["compile dynamic"], ["compile dynamic"]),
        (["fp8"], [f"compile + fp8 {recipe}" for recipe in ("tensorwise", "tensorwise-fast")]),
        (["gradient_checkpointing selective", "optimizer"],
         ["gradient checkpointing selective", *ablation.OPTIMIZERS]),
    ],
)  # fmt: skip
def test_only_keeps_the_named_variants(only, names):
    assert [rung.name for rung in ablation.variants("adamw_torch", only)] == names


@pytest.mark.parametrize(("name", "expected"), [("complie", "did you mean compile?"), ("", "allowed: ")])
def test_only_lists_the_allowed_names(name, expected):
    with pytest.raises(SpecError, match="--only") as caught:
        ablation.variants("adamw_torch", [name])
    assert expected in str(caught.value)


def test_settings_reproduce_each_variant(tmp_path):
    path = tmp_path / "spec.yaml"
    for rung in EVERY:
        path.write_text(
            "model: tiny/qwen3\ntrain: {precision: bf16}\noptimizations: {liger: on, compile: dynamic}\n"
            f"dataset: {json.dumps(OF_IMAGES.get(rung.key, {}))}\n"
        )
        wanted = ablation.with_changes(ablation.plain_spec(load(path)), rung.changes)
        assert load(path, ["recipe=plain", *ablation.settings(rung.changes.items())]) == wanted, rung.name

"""The rungs of an ablation: every optimization once for each of its values, held against what it needs beside it."""

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
    "compile": {"lean"},  # for memory, and no faster
    "image_size": {True},  # a size is a number
    "fp8": {"tensorwise-delayed", "te-current", "te-delayed", "te-mxfp8"},  # not proven
    "fp8_head": {True},  # a part of two others
    "cuda_graph": {True},  # beside three others: a recipe of its own
    "optimizer_in_backward": {True, "offload"},  # for recipes that clip nothing
}
# The data that an optimization is for.
OF_IMAGES = {key: {"name": "file", "path": "/images"} for key in ("image_cache", "feature_cache", "tile_buckets")}


@pytest.mark.parametrize("key", Optimizations.model_fields)
def test_every_value_of_an_optimization_is_tried_on_its_own_spec(key):
    tried = [rung.changes[f"optimizations.{key}"] for rung in EVERY if rung.key == key]
    assert len(tried) == len(set(tried))
    assert set(tried) == set(choices(key)) - LEFT_OUT.get(key, set())


@pytest.mark.parametrize("rung", EVERY, ids=lambda rung: rung.name)
def test_a_rung_adds_one_thing_to_what_it_is_held_against_and_can_work(rung):
    over = next((other.changes for other in EVERY if other.name == rung.over), {})
    assert rung.over in ("plain", *(other.name for other in EVERY))
    assert len(rung.changes) == len(over) + 1
    assert over.items() <= rung.changes.items()
    spec = SPEC.model_copy(update={"dataset": Dataset.model_validate(OF_IMAGES.get(rung.key, {}))})
    assert incompatibilities(ablation.with_changes(ablation.plain_spec(spec), rung.changes)) == []


def test_what_a_rung_is_held_against_comes_before_it():
    names = ["plain", *(rung.name for rung in EVERY)]
    assert all(names.index(rung.over) < names.index(rung.name) for rung in EVERY)
    assert len(set(names)) == len(names)


def test_plain_is_the_spec_without_its_optimizations():
    found = ablation.plain_spec(SPEC)
    assert (found.optimizations, found.train.optimizer, found.train.precision) == (
        Optimizations(), "adamw_torch", "bf16",
    )  # fmt: skip


def test_another_optimizer_than_adamw_learns_otherwise_and_stays():
    spec = ablation.with_changes(SPEC, {"train.optimizer": "sgd"})
    assert ablation.plain_spec(spec).train.optimizer == "sgd"
    assert not [rung for rung in ablation.variants("sgd") if rung.key == "optimizer"]


@pytest.mark.parametrize(
    ("only", "names"),
    [
        (["compile"], ["compile", "compile dynamic"]),
        (["compile dynamic"], ["compile dynamic"]),
        (["fp8"], ["compile", *(f"compile + fp8 {recipe}" for recipe in ("tensorwise", "tensorwise-fast", "rowwise"))]),
        (["gradient_checkpointing selective", "optimizer"],
         ["gradient checkpointing selective", *ablation.OPTIMIZERS]),
    ],
)  # fmt: skip
def test_only_keeps_what_is_named_and_what_that_is_held_against(only, names):
    assert [rung.name for rung in ablation.variants("adamw_torch", only)] == names


@pytest.mark.parametrize(("name", "said"), [("complie", "did you mean compile?"), ("", "allowed: "), ("x" * 99, "fp8")])
def test_only_says_what_there_is(name, said):
    with pytest.raises(SpecError, match="--only") as caught:
        ablation.variants("adamw_torch", [name])
    assert said in str(caught.value)


def test_varlen_goes_with_the_rows_that_are_packed_already():
    varlen = next(rung for rung in EVERY if rung.changes.get("optimizations.attention") == "varlen")
    assert "optimizations.padding_free" in varlen.changes
    packed = {"optimizations.packing": True}
    assert ablation.merged(packed, varlen) == packed | {"optimizations.attention": "varlen"}


@pytest.mark.parametrize("rung", EVERY, ids=lambda rung: rung.name)
def test_the_settings_of_a_rung_make_it_of_the_spec_file_again(rung, tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_text(
        "model: tiny/qwen3\ntrain: {precision: bf16}\noptimizations: {liger: on, compile: dynamic}\n"
        f"dataset: {json.dumps(OF_IMAGES.get(rung.key, {}))}\n"
    )
    wanted = ablation.with_changes(ablation.plain_spec(load(path)), rung.changes)
    assert load(path, ["recipe=plain", *ablation.settings(rung.changes.items())]) == wanted

"""A checkpoint is trained on as published only if it is whole."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from ftbench.errors import MissingError, SpecError
from ftbench.spec.experiment import Model
from ftbench.store.summary import summarise
from ftbench.worker.model import loading
from ftbench.worker.model.random_weights import materialise

INDEX, SHARD = "model.safetensors.index.json", "model-00001-of-00001.safetensors"
LOST = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def trained_from(train_here, tmp_path):
    """Trains a step from a local checkpoint whose weights were changed by a function."""

    def train(change, method="lora", values=None):
        folder = tmp_path / "model"
        source = materialise(Model(id="tiny/qwen3", weights="random", dtype="float32"))
        shutil.copytree(source, folder, dirs_exist_ok=True)
        weights = load_file(folder / SHARD)
        change(weights)
        save_file(weights, folder / SHARD, {"format": "pt"})
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(weights, SHARD)}))
        config = json.loads((folder / "config.json").read_text()) | (values or {})
        (folder / "config.json").write_text(json.dumps(config))
        pretrained = {"path": str(folder), "weights": "pretrained", "dtype": "float32"}
        return train_here(model=pretrained, method={"name": method}, train={"max_steps": 1})

    return train


@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
def test_a_checkpoint_that_lacks_a_weight_fails_and_says_which(trained_from, method):
    with pytest.raises(MissingError, match=rf"lacks weights .*{LOST}\..*model\.weights=random"):
        trained_from(lambda weights: weights.pop(LOST), method)


def test_a_file_of_something_else_is_no_checkpoint(trained_from):
    def replace(weights):
        weights.clear()
        weights["x"] = torch.zeros(2)

    with pytest.raises(MissingError, match=r"lacks weights .* and \d+ more"):
        trained_from(replace)


def test_a_weight_of_another_shape_fails_and_says_both_shapes(trained_from):
    with pytest.raises(MissingError, match=r"down_proj\.weight \(\[64, 192\], not \[64, 80\]\)"):
        trained_from(lambda weights: None, values={"intermediate_size": 80})


def test_weights_that_the_model_leaves_out_are_a_warning_with_their_names(trained_from):
    run = trained_from(lambda weights: weights.update({"x": torch.zeros(2)}))
    assert any("leaves out: x" in warning for warning in summarise(run).warnings)


def test_a_head_may_be_missing_only_where_it_is_tied_to_the_embedding(trained_from):
    with pytest.raises(MissingError, match=r"lacks weights .*: lm_head\.weight\."):
        trained_from(lambda weights: weights.pop("lm_head.weight", None), values={"tie_word_embeddings": False})
    run = trained_from(lambda weights: weights.pop("lm_head.weight", None), values={"tie_word_embeddings": True})
    assert not any("checkpoint" in warning for warning in summarise(run).warnings)


def test_a_damaged_description_of_a_model_is_a_sentence(trained_from):
    with pytest.raises(SpecError, match=r"model: ValueError: `num_hidden_layers` \(3\) must be equal"):
        trained_from(lambda weights: None, values={"num_hidden_layers": 3, "layer_types": ["full_attention"] * 2})


@pytest.mark.parametrize("content", [b"", b"noise"])
def test_a_damaged_file_of_pickled_weights_is_a_sentence(tmp_path, content):
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(MissingError, match="its weights are damaged"):
        loading.reach(Model(id="mine", path=str(tmp_path)), lambda: torch.load(tmp_path / "pytorch_model.bin"))


def test_what_a_parser_says_of_a_models_description_is_a_sentence():
    def parse():
        raise KeyError("rope_type")

    with pytest.raises(
        SpecError, match=r"model mine: its configuration.* \(KeyError: 'rope_type'\): get the files again"
    ):
        loading.reach_description(Model(id="mine"), parse)

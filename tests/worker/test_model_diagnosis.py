"""Errors about the files of a user's model: incomplete checkpoints and unusable configurations."""

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
def train_from(train_here, tmp_path):
    """Train one step from a local checkpoint after `change(weights)`, with `values` replaced in config.json."""

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
def test_missing_weight_fails_with_its_name(train_from, method):
    with pytest.raises(MissingError, match=rf"lacks weights .*{LOST}\..*model\.weights=random"):
        train_from(lambda weights: weights.pop(LOST), method)


def test_weight_of_another_shape_fails_with_both_shapes(train_from):
    with pytest.raises(MissingError, match=r"down_proj\.weight \(\[64, 192\], not \[64, 80\]\)"):
        train_from(lambda weights: None, values={"intermediate_size": 80})


def test_unused_weights_are_a_warning_with_their_names(train_from):
    run = train_from(lambda weights: weights.update({"x": torch.zeros(2)}))
    assert any("ignores these weights of the checkpoint: x" in warning for warning in summarise(run).warnings)


def test_output_head_can_only_be_missing_if_it_is_tied(train_from):
    with pytest.raises(MissingError, match=r"lacks weights .*: lm_head\.weight\."):
        train_from(lambda weights: weights.pop("lm_head.weight", None), values={"tie_word_embeddings": False})
    run = train_from(lambda weights: weights.pop("lm_head.weight", None), values={"tie_word_embeddings": True})
    assert not any("checkpoint" in warning for warning in summarise(run).warnings)


def test_inconsistent_configuration_is_an_error_message(train_from):
    with pytest.raises(SpecError, match=r"model: ValueError: `num_hidden_layers` \(3\) must be equal"):
        train_from(lambda weights: None, values={"num_hidden_layers": 3, "layer_types": ["full_attention"] * 2})


def test_damaged_pickle_file_is_an_error_message(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"noise")
    with pytest.raises(MissingError, match="its weights are damaged"):
        loading.reach(Model(id="mine", path=str(tmp_path)), lambda: torch.load(tmp_path / "pytorch_model.bin"))


def test_parser_error_in_a_model_description_is_an_error_message():
    def parse():
        raise KeyError("rope_type")

    with pytest.raises(
        SpecError, match=r"model mine: its configuration.* \(KeyError: 'rope_type'\): download the files again"
    ):
        loading.reach_description(Model(id="mine"), parse)

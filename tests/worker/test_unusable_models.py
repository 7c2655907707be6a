"""A config.json that transformers cannot make a model of, or run: the run says which key, and what to do."""

import json

import pytest

pytest.importorskip("torch", reason="training libraries are not installed")

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ftbench.core.architectures import architectures
from ftbench.errors import SpecError
from ftbench.spec.experiment import Model
from ftbench.worker.model.unusable import blame

pytestmark = pytest.mark.torch


def trained(config):
    """Make the model as a run does, and go forward as its first step does."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    return model(torch.zeros(1, 4, dtype=torch.long))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_parameters": {"rope_type": "abc", "rope_theta": 1e4}}, "(rope_parameters.rope_type: abc is unknown)"),
        ({"hidden_act": "nonsense"}, "(hidden_act: nonsense is unknown)"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0 and must be a whole number"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "4 is no multiple of num_key_value_heads 3"),
        ({"head_dim": 7}, "a head is 7 wide"),
        ({"pad_token_id": 10**6}, "AssertionError: Padding_idx must be within num_embeddings"),
        ({"layer_types": ["nonsense", "nonsense"]}, "`layer_types` entries must be in"),
        ({"rms_norm_eps": "x"}, "'rms_norm_eps' expected float, got str"),
        ({"attention_dropout": 7.0}, "dropout probability has to be between 0 and 1, but got 7"),
    ],
)
def test_what_transformers_makes_nothing_of_is_a_sentence_about_the_file(tmp_path, changes, said):
    config = architectures()["tiny/qwen3"] | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(Exception) as raised:  # noqa: PT011 - whatever a library says of it
        trained(config)
    error = blame(Model(id="my/own", path=str(tmp_path), weights="random"), raised.value)
    assert isinstance(error, SpecError)
    assert str(error).startswith(f"model {tmp_path}: transformers cannot make or run what its config.json describes")
    assert said in str(error)
    assert "correct it" in str(error)


def test_other_errors_are_not_the_file_s(tmp_path):
    config = architectures()["tiny/qwen3"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    mine = Model(id="my/own", path=str(tmp_path), weights="random")
    for error in (KeyError("of ours"), torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: lost")):
        assert blame(mine, error) is error
    with pytest.raises(KeyError) as raised:
        trained(config | {"hidden_act": "nonsense"})
    assert blame(Model(id="tiny/qwen3", weights="random"), raised.value) is raised.value

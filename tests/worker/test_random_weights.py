"""Random weights: the same from the same seed, made shard by shard, loaded like published ones."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ftbench.core.architectures import architectures
from ftbench.errors import MissingError, SpecError
from ftbench.spec.experiment import Model
from ftbench.worker.model import random_weights
from ftbench.worker.model.random_weights import materialise

FAMILIES = ["tiny/qwen3", "tiny/qwen3-moe", "tiny/gpt-oss", "tiny/llama", "tiny/mistral", "tiny/qwen2"]


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FTBENCH_CACHE", str(tmp_path))
    return tmp_path


def tiny(name="tiny/qwen3", **more):
    return Model(id=name, weights="random", dtype="float32", **more)


def tensors_of(folder):
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_loads_through_from_pretrained_as_it_was_made(own_cache, name):
    folder = materialise(tiny(name))
    model, told = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(told.values())
    loaded = model.state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in tensors_of(folder).items())
    assert sum(p.numel() for p in model.parameters()) == sum(
        p.numel() for p in AutoModelForCausalLM.from_config(AutoConfig.for_model(**architectures()[name])).parameters()
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_are_spread_as_transformers_initialises_them(own_cache, name):
    made = tensors_of(materialise(tiny(name)))
    fresh = AutoModelForCausalLM.from_config(AutoConfig.for_model(**architectures()[name])).state_dict()
    for key, tensor in made.items():
        wanted = fresh[key].float()
        if tensor.numel() >= 2048:
            assert float(tensor.std()) == pytest.approx(float(wanted.std()), rel=0.1), key
        elif key.endswith("norm.weight"):
            assert torch.equal(tensor, wanted), key


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(own_cache):
    first = tensors_of(materialise(tiny()))
    folder = materialise(tiny())
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    again, other = tensors_of(materialise(tiny())), tensors_of(materialise(tiny(seed=1)))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_dtype_and_shards_change_nothing_but_the_files(own_cache, monkeypatch):
    whole = tensors_of(materialise(tiny()))
    monkeypatch.setattr(random_weights, "SHARD_BYTES", 200_000)
    folder = materialise(Model(id="tiny/qwen3", weights="random", dtype="bfloat16"))
    assert len(list(folder.glob("*.safetensors"))) > 1
    made = tensors_of(folder)
    assert all(torch.equal(made[key], value.bfloat16()) for key, value in whole.items())
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(whole)


def test_a_second_use_writes_nothing(own_cache):
    folder = materialise(tiny())
    before = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert materialise(tiny()) == folder
    assert {file: file.stat().st_mtime_ns for file in folder.iterdir()} == before


def test_an_unfinished_cache_entry_is_never_seen(own_cache, monkeypatch):
    monkeypatch.setattr(
        random_weights, "save_tokenizer", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left"))
    )
    with pytest.raises(MissingError, match="FTBENCH_CACHE"):
        materialise(tiny())
    assert [entry for entry in (own_cache / "models").iterdir() if entry.is_dir()] == []


def test_a_cache_that_is_a_file_is_told_so(tmp_path, monkeypatch):
    (file := tmp_path / "cache").write_text("")
    monkeypatch.setenv("FTBENCH_CACHE", str(file))
    with pytest.raises(MissingError, match="a file is in the place of a folder; set FTBENCH_CACHE to a folder"):
        materialise(tiny())


def test_a_cache_that_is_anothers_is_told_so(own_cache, monkeypatch):
    def refused(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(random_weights, "save_tokenizer", refused)
    with pytest.raises(MissingError, match="Permission denied; set FTBENCH_CACHE to a folder that can be written"):
        materialise(tiny())


def test_a_disk_without_room_is_told_before_anything_is_written(own_cache):
    with pytest.raises(MissingError, match=r"take 437\.9 GiB .* set FTBENCH_CACHE"):
        materialise(Model(id="Qwen/Qwen3-235B-A22B", weights="random", dtype="bfloat16"))


def test_a_users_own_config_gives_the_shape(own_cache, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(architectures()["tiny/llama"]))
    made = tensors_of(materialise(tiny("my/model", path=str(config))))
    assert made["model.embed_tokens.weight"].shape == (2048, 64)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "has no model_type"),
        ('{"model_type": "nope"}', "cannot build this shape"),
    ],
)
def test_a_config_that_is_none_is_refused(own_cache, tmp_path, text, told):
    config = tmp_path / "config.json"
    config.write_text(text)
    with pytest.raises(SpecError, match=told):
        materialise(tiny("my/model", path=str(config)))


def test_the_tokenizer_needs_no_download_and_keeps_every_character(own_cache):
    tokenizer = AutoTokenizer.from_pretrained(materialise(tiny()))
    for text in ("日本語の文章です。GPUは速い。", "plain English, 123!", "emoji 🎉 and\ttabs\n"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert max(tokenizer.get_vocab().values()) < 2048
    assert tokenizer.pad_token_id is not None


def test_the_tokenizer_is_the_same_each_time(own_cache, tmp_path):
    from ftbench.worker.model.tokenizer import save_tokenizer

    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        save_tokenizer(tmp_path / name, 2048)
    assert (tmp_path / "a" / "tokenizer.json").read_text() == (tmp_path / "b" / "tokenizer.json").read_text()

"""Random weights depend on the seed, are created in shards and load like published ones."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from conftest import spec_of
from ftbench.errors import MissingError, SpecError
from ftbench.facts import architectures
from ftbench.spec.experiment import Experiment, Model
from ftbench.worker import methods, parallel
from ftbench.worker.model import loading, random_weights
from ftbench.worker.model.random_weights import RandomStateDict, configuration, materialise

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
def test_every_family_loads_with_from_pretrained(own_cache, name):
    folder = materialise(tiny(name))
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values())
    loaded = model.state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in tensors_of(folder).items())
    assert sum(p.numel() for p in model.parameters()) == sum(
        p.numel() for p in AutoModelForCausalLM.from_config(AutoConfig.for_model(**architectures()[name])).parameters()
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_have_the_deviation_of_transformers(own_cache, name):
    made = tensors_of(materialise(tiny(name)))
    fresh = AutoModelForCausalLM.from_config(AutoConfig.for_model(**architectures()[name])).state_dict()
    for key, tensor in made.items():
        wanted = fresh[key].float()
        if tensor.numel() >= 2048:
            assert float(tensor.std()) == pytest.approx(float(wanted.std()), rel=0.1), key
        elif key.endswith("norm.weight"):
            assert torch.equal(tensor, wanted), key


def test_weights_depend_only_on_the_seed(own_cache):
    first = tensors_of(materialise(tiny()))
    folder = materialise(tiny())
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    again, other = tensors_of(materialise(tiny())), tensors_of(materialise(tiny(seed=1)))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_dtype_and_shards_do_not_change_values(own_cache, monkeypatch):
    single = tensors_of(materialise(tiny()))
    monkeypatch.setattr(random_weights, "SHARD_BYTES", 200_000)
    folder = materialise(Model(id="tiny/qwen3", weights="random", dtype="bfloat16"))
    assert len(list(folder.glob("*.safetensors"))) > 1
    made = tensors_of(folder)
    assert all(torch.equal(made[key], value.bfloat16()) for key, value in single.items())
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(single)


def test_second_use_does_not_write(own_cache):
    folder = materialise(tiny())
    before = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert materialise(tiny()) == folder
    assert {file: file.stat().st_mtime_ns for file in folder.iterdir()} == before


def test_unfinished_cache_entry_is_deleted(own_cache, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left")

    monkeypatch.setattr(random_weights, "build_tokenizer", fail)
    with pytest.raises(MissingError, match="FTBENCH_CACHE"):
        materialise(tiny())
    assert [entry for entry in (own_cache / "models").iterdir() if entry.is_dir()] == []


def test_cache_that_is_a_file_is_an_error(tmp_path, monkeypatch):
    (file := tmp_path / "cache").write_text("")
    monkeypatch.setenv("FTBENCH_CACHE", str(file))
    with pytest.raises(MissingError, match=r"cache.*set FTBENCH_CACHE to a writable folder"):
        materialise(tiny())


def test_full_disk_is_detected_before_writing(own_cache):
    with pytest.raises(MissingError, match=r"take 437\.9 GiB .* set FTBENCH_CACHE"):
        materialise(Model(id="Qwen/Qwen3-235B-A22B", weights="random", dtype="bfloat16"))


def test_own_config_gives_the_shape(own_cache, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(architectures()["tiny/llama"]))
    made = tensors_of(materialise(tiny("my/model", path=str(config))))
    assert made["model.embed_tokens.weight"].shape == (2048, 64)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "has no model_type"),
        ('{"model_type": "nope"}', "cannot build this shape"),
    ],
)
def test_invalid_config_is_an_error(own_cache, tmp_path, text, message):
    config = tmp_path / "config.json"
    config.write_text(text)
    with pytest.raises(SpecError, match=message):
        materialise(tiny("my/model", path=str(config)))


def test_tokenizer_is_lossless(own_cache):
    tokenizer = AutoTokenizer.from_pretrained(materialise(tiny()))
    for text in ("日本語の文章です。GPUは速い。", "plain English, 123!", "emoji 🎉 and\ttabs\n"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert max(tokenizer.get_vocab().values()) < 2048
    assert tokenizer.pad_token_id is not None


def test_tokenizer_is_deterministic(own_cache, tmp_path):
    from ftbench.worker.model.tokenizer import build_tokenizer

    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        build_tokenizer(2048).save_pretrained(tmp_path / name)
    assert (tmp_path / "a" / "tokenizer.json").read_text() == (tmp_path / "b" / "tokenizer.json").read_text()


# --- sharded models --------------------------------------------------------------------------------------------------


def sharded_spec(**parts):
    model = {"id": "tiny/llama", "weights": "random", "dtype": "bfloat16"}
    values = {"name": "a", "model": model, "train": {"precision": "bf16"}, "launch": {"gpus": 2, "strategy": "fsdp"}}
    return Experiment.model_validate(values | parts)


def test_skeleton_takes_no_memory():
    config = LlamaConfig(hidden_size=4096, intermediate_size=16384, num_hidden_layers=4, vocab_size=2**15)
    before = psutil.Process().memory_info().rss
    model = loading.skeleton(AutoModelForCausalLM, config, sharded_spec())
    assert sum(each.nbytes for each in model.parameters()) > 2 * 2**30
    assert psutil.Process().memory_info().rss - before < 2**28
    assert {each.device.type for each in model.parameters()} == {"cpu"}


def test_skeleton_has_the_buffers_of_a_loaded_model(own_cache):
    model = tiny("tiny/llama")
    loaded = dict(AutoModelForCausalLM.from_pretrained(materialise(model)).named_buffers())
    created = dict(loading.skeleton(AutoModelForCausalLM, configuration(model), sharded_spec()).named_buffers())
    assert created.keys() == loaded.keys() != set()
    assert all(torch.equal(created[name], loaded[name]) for name in loaded)


@pytest.mark.parametrize("model_id", ["tiny/llama", "tiny/qwen3", "tiny/qwen3-moe"])
def test_drawn_weights_equal_those_of_files(own_cache, model_id):
    """Also for tied heads, under peft's names, and in the trained dtype."""
    model = Model(id=model_id, weights="random", dtype="bfloat16")
    files = AutoModelForCausalLM.from_pretrained(materialise(model)).state_dict()
    names = {name: f"base_model.model.{name.replace('q_proj', 'q_proj.base_layer')}" for name in files}
    empty = {named: torch.empty_like(files[name], dtype=torch.float32) for name, named in names.items()}
    adapter = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight": torch.ones(2)}
    drawn = RandomStateDict(empty | adapter, model)
    assert drawn.keys() == empty.keys() | adapter.keys()
    assert all(torch.equal(drawn[named], files[name].float()) for name, named in names.items())
    assert all(drawn[name] is adapter[name] for name in adapter)


def test_sharded_random_weights_are_not_written(own_cache):
    spec = sharded_spec()
    folder = loading.source_of(spec.model, spec.method, loading.are_drawn(spec))
    assert not [*Path(folder).glob("*.safetensors*")]


@pytest.mark.parametrize("strategy", ["fsdp", "cp"])
@pytest.mark.parametrize(
    ("weights", "rank", "reads"), [("pretrained", 0, True), ("pretrained", 1, False), ("random", 0, False)]
)
def test_only_rank_0_reads_published_weights(monkeypatch, strategy, weights, rank, reads):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    spec = sharded_spec(model={"id": "tiny/llama", "weights": weights}, launch={"gpus": 2, "strategy": strategy})
    assert parallel.load(strategy).reads(spec) is reads


def test_files_in_nf4_load_as_16_bit_files_that_are_quantised(own_cache, monkeypatch):
    spec = spec_of(model={"dtype": "bfloat16"}, method={"name": "qlora", "compute_dtype": "bfloat16"})
    assert loading.are_packed(spec)
    sources = [loading.source_of(spec.model, spec.method, packed=packed) for packed in (False, True)]
    sizes = [sum(file.stat().st_size for file in Path(source).glob("*.safetensors")) for source in sources]
    assert sizes[1] < sizes[0]
    plain, packed = (methods.load("qlora").load(spec, source).state_dict() for source in sources)
    assert plain.keys() == packed.keys()
    assert any("absmax" in name for name in plain)
    for name, value in plain.items():
        assert torch.equal(value, packed[name]), name


@pytest.mark.parametrize(
    "changes",
    [{"method": {"name": "lora"}}, {"method": {"name": "qlora", "double_quant": False}},
     {"model": {"id": "tiny/qwen3-moe", "dtype": "bfloat16"}}, {"model": {"dtype": "float32"}},
     {"model": {"id": "tiny/llava-next", "dtype": "bfloat16"}}],
    ids=str,
)  # fmt: skip
def test_other_weights_have_no_files_in_nf4(changes):
    usual = {"model": {"dtype": "bfloat16"}, "method": {"name": "qlora"}}
    assert not loading.are_packed(spec_of(**usual | changes))

"""Weights of models that are sharded: no rank reads random ones, one reads published ones, none touches the others."""

from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from ftbench.spec.experiment import Experiment, Model
from ftbench.worker import parallel
from ftbench.worker.model import loading
from ftbench.worker.model.random_weights import Drawn, configuration, materialise

pytestmark = pytest.mark.usefixtures("cache")
ON_TWO = {"gpus": 2, "strategy": "fsdp"}


def spec_of(**parts):
    model = {"id": "tiny/llama", "weights": "random", "dtype": "bfloat16"}
    values = {"name": "a", "model": model, "train": {"precision": "bf16"}, "launch": ON_TWO}
    return Experiment.model_validate(values | parts)


def test_what_nobody_has_read_takes_no_memory():
    """A model of more than 2 GiB, of which this process gets no more than what it computes with."""
    config = LlamaConfig(hidden_size=4096, intermediate_size=16384, num_hidden_layers=4, vocab_size=2**15)
    before = psutil.Process().memory_info().rss
    model = loading.skeleton(AutoModelForCausalLM, config, spec_of())
    assert sum(each.nbytes for each in model.parameters()) > 2 * 2**30
    assert psutil.Process().memory_info().rss - before < 2**28
    assert {each.device.type for each in model.parameters()} == {"cpu"}


def test_its_buffers_are_those_of_a_model_that_was_read():
    model = Model(id="tiny/llama", weights="random", dtype="float32")
    config = configuration(model)
    read = dict(AutoModelForCausalLM.from_pretrained(materialise(model)).named_buffers())
    made = dict(loading.skeleton(AutoModelForCausalLM, config, spec_of()).named_buffers())
    assert made.keys() == read.keys() != set()
    assert all(torch.equal(made[name], read[name]) for name in read)


@pytest.mark.parametrize("model_id", ["tiny/llama", "tiny/qwen3", "tiny/qwen3-moe"])
def test_what_is_drawn_while_a_model_is_sharded_is_what_files_would_hold(model_id):
    """Also where the head is the embedding, under the names that adapters give, and in the type that is trained."""
    model = Model(id=model_id, weights="random", dtype="bfloat16")
    files = AutoModelForCausalLM.from_pretrained(materialise(model)).state_dict()
    names = {name: f"base_model.model.{name.replace('q_proj', 'q_proj.base_layer')}" for name in files}
    unread = {named: torch.empty_like(files[name], dtype=torch.float32) for name, named in names.items()}
    adapter = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight": torch.ones(2)}
    drawn = Drawn(unread | adapter, model)
    assert drawn.keys() == unread.keys() | adapter.keys()
    assert all(torch.equal(drawn[named], files[name].float()) for name, named in names.items())
    assert all(drawn[name] is adapter[name] for name in adapter)


def test_random_weights_of_a_sharded_model_are_in_no_file():
    spec = spec_of(model={"id": "tiny/llama", "weights": "random", "seed": 5, "dtype": "bfloat16"})
    folder = loading.source_of(spec.model, spec.method, loading.are_drawn(spec))
    assert not [*Path(folder).glob("*.safetensors*")]


@pytest.mark.parametrize("strategy", ["fsdp", "cp"])
@pytest.mark.parametrize(
    ("weights", "rank", "reads"), [("pretrained", 0, True), ("pretrained", 1, False), ("random", 0, False)]
)
def test_rank_0_reads_published_weights_and_no_other(monkeypatch, strategy, weights, rank, reads):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert (
        parallel.load(strategy).reads(
            spec_of(model={"id": "tiny/llama", "weights": weights}, launch={"gpus": 2, "strategy": strategy})
        )
        is reads
    )

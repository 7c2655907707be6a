"""What a strategy says of a model that it cannot divide, before its weights are read."""

from types import SimpleNamespace

import pytest

from ftbench.errors import SpecError
from ftbench.spec.experiment import Experiment
from ftbench.worker import parallel


def loading(strategy, gpus, **shape):
    values = {"name": "a", "model": {"id": "tiny/qwen3"}, "launch": {"gpus": gpus, "strategy": strategy}}
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(**shape))
    return parallel.load(strategy).loading(Experiment.model_validate(values), config)


@pytest.mark.parametrize(
    ("strategy", "shape", "sentence"),
    [
        ("tp", {"num_key_value_heads": 4}, "the 4 heads of keys of tiny/qwen3 evenly, and 4 is no multiple of 3: "),
        ("ep", {"num_experts": 8}, "the 8 experts of tiny/qwen3 evenly, and 8 is no multiple of 3: .* 2, 4, 8"),
        ("ep", {}, "ep deals experts to the GPUs and tiny/qwen3 has none: use fsdp or ddp"),
        ("cp", {"layer_types": ["full_attention", "sliding_attention"]}, "tiny/qwen3 has sliding_attention: use fsdp"),
        ("cp", {"sliding_window": 4096}, "tiny/qwen3 has a sliding window: use fsdp"),
    ],
)
def test_a_model_that_cannot_be_divided_so_is_refused_with_a_way_out(strategy, shape, sentence):
    with pytest.raises(SpecError, match=sentence):
        loading(strategy, 3, **shape)


def test_a_model_whose_layers_all_see_the_whole_sequence_can_be_cut():
    assert loading("cp", 2, layer_types=["full_attention"], sliding_window=8) == {}

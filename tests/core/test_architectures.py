import pytest

from ftbench.core.units import GIB
from ftbench.facts import architecture, architectures
from ftbench.families import describe

PUBLISHED = {  # the hub's own counts (safetensors metadata)
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "openai/gpt-oss-20b": 20_914_757_184,
    "llava-hf/llava-v1.6-mistral-7b-hf": 7_566_747_648,
    "Qwen/Qwen2.5-VL-3B-Instruct": 3_754_622_976,
    "Qwen/Qwen2.5-VL-7B-Instruct": 8_292_166_656,
    "Qwen/Qwen3-VL-4B-Instruct": 4_437_815_808,
    "Qwen/Qwen3-VL-8B-Instruct": 8_767_123_696,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_public_model_has_its_published_number_of_parameters(name):
    assert describe(architectures()[name]).total == PUBLISHED[name]


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"), ("Qwen/Qwen3-8B-Base", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen/Qwen3-30B-A3B"),
        ("mistralai/Mistral-7B-Instruct-v0.1", "mistralai/Mistral-7B-v0.1"),
        ("Qwen/Qwen3-VL-8B-Thinking", "Qwen/Qwen3-VL-8B-Instruct"),
    ],
)  # fmt: skip
def test_a_variant_has_the_shape_of_its_base(variant, name):
    assert architecture(variant) == architectures()[name]


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen3-9B-Instruct", "Qwen/Qwen3-VL-8B", "other/Llama-3.1-8B-Instruct", "Qwen/Qwen3-8B-Instruction"]
)
def test_other_names_are_unknown(name):
    assert architecture(name) == {}


COMPARED = [name for name in architectures() if name.startswith("tiny/")] + ["openai/gpt-oss-20b"]
LARGE = [name for name in architectures() if "-VL-" in name or "llava-hf" in name] + ["Qwen/Qwen3-32B"]
COMPARED += [pytest.param(name, marks=pytest.mark.exhaustive) for name in LARGE]
KINDS = {
    "embed_tokens": "embedding",
    "lm_head": "head",
    "self_attn": "attention",
    "experts": "experts",
    "router": "router",
    "gate.weight": "router",
    "norm": "norm",
    "mlp": "mlp",
}


def kind_of(parameter):
    """The q and k norms of qwen3 in self_attn count as norms."""
    if "q_norm" in parameter or "k_norm" in parameter:
        return "norm"
    return next(kind for part, kind in KINDS.items() if part in parameter)


@pytest.mark.torch
@pytest.mark.parametrize("name", COMPARED)
def test_parameter_counts_agree_with_transformers(name):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    config, shape = dict(architectures()[name]), describe(architectures()[name])
    kind = transformers.AutoModelForImageTextToText if shape.vision else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(transformers.AutoConfig.for_model(config.pop("model_type"), **config))
    counted = dict.fromkeys(shape.parameters, 0)
    seeing = {"encoder": 0, "projector": 0}
    for parameter, tensor in model.named_parameters():
        if "language_model" in parameter or "vision_config" not in config or "lm_head" in parameter:
            counted[kind_of(parameter)] += tensor.numel()
        else:
            projects = any(part in parameter for part in ("projector", "merger", "image_newline"))
            seeing["projector" if projects else "encoder"] += tensor.numel()
    assert counted == shape.parameters
    assert seeing == {part: getattr(shape.vision, part, 0) for part in seeing}


@pytest.mark.parametrize(
    ("name", "bf16", "published"), [("openai/gpt-oss-20b", 39.0, 12.8), ("openai/gpt-oss-120b", 217.6, 60.8)]
)
def test_gpt_oss_has_the_size_of_its_model_card(name, bf16, published):
    """Checkpoints of 12.8 and 60.8 GiB: OpenAI, gpt-oss model card, 2025-08."""
    assert describe(architectures()[name]).weight_bytes(2) / GIB == pytest.approx(bf16, abs=0.05)
    assert describe(architectures()[name]).weight_bytes(2, mxfp4=True) / GIB == pytest.approx(published, abs=0.05)

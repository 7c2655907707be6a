"""gpt-oss with its experts in MXFP4: the same mathematics as in 16 bits, in a quarter of the memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from conftest import spec_of
from ftbench.errors import SpecError
from ftbench.facts import architectures
from ftbench.families import describe
from ftbench.spec.experiment import Experiment, resolve
from ftbench.store.rundir import read_json
from ftbench.store.steps import read_steps
from ftbench.worker.measure import effective_config
from ftbench.worker.methods import lora, qlora
from ftbench.worker.model import loading, mxfp4
from ftbench.worker.model.random_weights import materialise

GPT_OSS = {"id": "tiny/gpt-oss"}
MXFP4 = {"name": "qlora", "quant_type": "mxfp4"}
IDS = torch.arange(5, 61).view(2, 28)


def published(**method):
    """Return a spec for weights in the published format: bf16 with experts in MXFP4."""
    made = spec_of(model={**GPT_OSS, "dtype": "bfloat16"}).model
    folder = materialise(made, "mxfp4")
    model = {"id": "my/gpt-oss", "path": str(folder), "dtype": "bfloat16"}
    return resolve(Experiment.model_validate({"name": "a", "model": model, "method": method}), None), str(folder)


@pytest.fixture
def both(cache):
    """Models with the same weights and adapters: ours in MXFP4, and the libraries' in 16 bits."""

    def build(module, **method):
        spec, folder = published(experts=True, **method)
        model = module.adapt(module.load(spec, folder), spec)
        return model, spec

    (small, spec), (wide, _) = build(qlora, **MXFP4), build(lora, name="lora")
    weights = dict(small.named_parameters())
    torch.manual_seed(0)
    for name, parameter in wide.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0, 0.05)
            assert weights[name].shape == parameter.shape
            weights[name].data.copy_(parameter.data)
    return small, wide, spec


def test_dequantised_values_equal_those_of_transformers(cache):
    blocks = torch.randint(0, 256, (4, 48, 3, 16), dtype=torch.uint8)
    scales = torch.randint(90, 150, (4, 48, 3), dtype=torch.uint8)
    for dtype in (torch.bfloat16, torch.float32):
        theirs = convert_moe_packed_tensors(blocks, scales, dtype=dtype).transpose(1, 2)
        assert torch.equal(mxfp4.dequantise(blocks, scales, dtype), theirs)


# Error bound of float32: two layers with sums of 64 terms.
ROUNDING = 2 * 64 * torch.finfo(torch.float32).eps


def exact(model):
    """Return the 16-bit model in float64 with eager experts."""
    model.double().get_base_model().set_experts_implementation("eager")
    return model


def test_logits_and_gradients_equal_those_of_the_16_bit_model(both):
    small, wide = both[0].float(), exact(both[1])
    ours, theirs = (model(input_ids=IDS, labels=IDS) for model in (small, wide))
    torch.testing.assert_close(ours.logits.double(), theirs.logits, rtol=ROUNDING, atol=ROUNDING)
    assert float(ours.loss) == pytest.approx(float(theirs.loss), rel=ROUNDING)
    ours.loss.backward(), theirs.loss.backward()
    expected = {name: p.grad for name, p in wide.named_parameters() if p.requires_grad}
    gradients = {name: p.grad for name, p in small.named_parameters() if p.requires_grad}
    assert gradients.keys() == expected.keys()
    assert any(".experts." in name for name in gradients)
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).norm() < ROUNDING * gradient.norm(), name


def test_few_tokens_give_the_same_result_as_many(both):
    experts = both[0].float().get_base_model().model.layers[0].mlp.experts.get_base_layer()
    torch.manual_seed(1)
    rows = torch.randn(6, 64)
    chosen = torch.tensor([[0, 1], [1, 3], [2, 0], [0, 2], [3, 1], [2, 3]])
    weights = torch.rand(6, 2)
    many = experts(rows, chosen, weights)
    torch.testing.assert_close(experts(rows[:1], chosen[:1], weights[:1]), many[:1], rtol=ROUNDING, atol=ROUNDING)
    theirs = exact(both[1]).get_base_model().model.layers[0].mlp.experts.get_base_layer()
    large = 100 * rows  # gates and values beyond the limit of gpt-oss
    expected = theirs(large.double(), chosen, weights.double())
    assert (experts(large, chosen, weights) - expected).norm() < ROUNDING * expected.norm()


def test_no_16_bit_matrix_is_saved_for_backward(both):
    small, _, _ = both
    saved = []

    def note(tensor):
        if tensor.dtype != torch.uint8:
            saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        small.get_base_model().model(input_ids=IDS[:, :4])
    assert max(saved) < 4 * 64 * 64  # the down matrix of the experts of one layer


def test_weights_drawn_in_memory_equal_those_of_files(cache):
    spec, folder = published(**MXFP4)
    read = qlora.load(spec, folder)
    random = resolve(spec.model_copy(update={"model": spec_of(model={**GPT_OSS, "dtype": "bfloat16"}).model}), None)
    source = loading.source_of(random.model, random.method)
    assert not list(Path(source).glob("*.safetensors"))
    made = qlora.load(random, source)
    assert made.training == read.training
    assert all(torch.equal(value, made.state_dict()[name]) for name, value in read.state_dict().items())
    assert all(torch.equal(a, b) for a, b in zip(read.buffers(), made.buffers(), strict=True))
    expert = mxfp4.dequantise(
        made.model.layers[0].mlp.experts.down_proj_blocks, made.model.layers[0].mlp.experts.down_proj_scales,
        torch.float32,
    )  # fmt: skip
    assert float(expert.std()) == pytest.approx(0.02, rel=0.3)


@pytest.mark.parametrize("experts", [False, True])
def test_mxfp4_model_trains_and_is_described(train_here, experts):
    method = {**MXFP4, "experts": experts}
    run = train_here(model=GPT_OSS, method=method, dataset={"samples": 4}, train={"learning_rate": 0.01, "epochs": 8})
    losses = [row.loss for row in read_steps(run.steps)[0]]
    learned = (sum(losses[:2]) - sum(losses[-2:])) / 2
    assert learned > (0.3 if experts else 0.1)  # on the same two batches
    found = read_json(run.applied)
    kinds = found["parameters"]["by_kind"]
    assert (kinds["experts"]["trainable"] > 0) == experts
    lora_run = train_here(model=GPT_OSS, method={"name": "lora", "experts": experts}, train={"max_steps": 1})
    plain = read_json(lora_run.applied)
    assert found["parameters"] == plain["parameters"]
    assert found["matmul_shape"] == plain["matmul_shape"]


def test_optimizations_do_not_change_losses(train_here):
    def losses(**changes):
        run = train_here(model=GPT_OSS, method={**MXFP4, "experts": True}, dataset={"samples": 6}, **changes)
        return [row.loss for row in read_steps(run.steps)[0]]

    on = {"gradient_checkpointing": True, "chunked_loss": True, "padding_free": True}
    assert losses(optimizations=on) == pytest.approx(losses(), rel=2e-3)


@pytest.mark.parametrize(
    ("name", "gibibytes"), [("openai/gpt-oss-20b", 12.8), ("openai/gpt-oss-120b", 60.8)]
)  # OpenAI, gpt-oss model card, 2025-08
def test_published_sizes_are_reproduced(name, gibibytes):
    config = AutoConfig.for_model(**architectures()[name])
    with torch.device("meta"), mxfp4.as_experts():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert sum(p.numel() * p.element_size() for p in model.parameters()) / 2**30 == pytest.approx(gibibytes, rel=0.01)
    counted = sum(kind["total"] for kind in effective_config.parameters_by_kind(model).values())
    assert counted == describe(architectures()[name]).total
    active = effective_config.matmul_shape(model)
    assert active.base + active.head == pytest.approx({"20b": 3.6e9, "120b": 5.1e9}[name.rpartition("-")[2]], rel=0.01)


def test_saved_adapters_load_on_the_16_bit_model(both, tmp_path):
    small, wide, _ = both
    small.save_pretrained(tmp_path)
    _, folder = published(**MXFP4)
    plain = lora.load(published(name="lora")[0], folder)
    loaded = PeftModel.from_pretrained(plain, tmp_path)
    assert torch.equal(loaded(input_ids=IDS).logits, wide(input_ids=IDS).logits)
    ours, theirs = small.float()(input_ids=IDS).logits, exact(loaded)(input_ids=IDS).logits
    torch.testing.assert_close(ours.double(), theirs, rtol=ROUNDING, atol=ROUNDING)


def test_16_bit_weights_are_rejected(cache):
    folder = materialise(spec_of(model=GPT_OSS).model)
    values = {"name": "a", "model": {"id": "my/gpt-oss", "path": str(folder)}, "method": MXFP4}
    spec = resolve(Experiment.model_validate(values), None)
    with pytest.raises(SpecError, match="needs the published format of gpt-oss"):
        qlora.load(spec, str(folder))


def test_16_bit_experts_are_reported(cache):
    spec, folder = published(**MXFP4)
    wide = lora.load(published(name="lora")[0], folder)
    assert "the model lacks MXFP4 experts" in " ".join(mxfp4.problems(wide))
    small = qlora.load(spec, folder)
    assert mxfp4.problems(small) == []
    small.model.layers[0].mlp.experts = wide.model.layers[0].mlp.experts
    assert "layers.0.mlp.experts" in " ".join(mxfp4.problems(small))


def test_transformers_is_restored():
    from transformers.models.gpt_oss import modeling_gpt_oss

    before = modeling_gpt_oss.GptOssExperts
    with pytest.raises(RuntimeError), mxfp4.as_experts():
        raise RuntimeError
    assert modeling_gpt_oss.GptOssExperts is before is not mxfp4.Mxfp4Experts

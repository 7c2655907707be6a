"""With the Triton kernels a model learns the same as without: values, gradients, one compiled graph."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from few_labels import require_few_tokens
from peft import LoraConfig, get_peft_model
from transformers import AttentionInterface, AutoConfig
from transformers import AutoModelForCausalLM as Model

from conftest import spec_of
from ftbench.errors import MissingError, SpecError
from ftbench.kernels import adapter_copies
from ftbench.kernels.small_products import AdaptedProduct
from ftbench.launch import trl
from ftbench.spec.incompatibilities import incompatibilities, machine_incompatibilities
from ftbench.spec.methods import PROJECTIONS
from ftbench.spec.optimizations import OPTIMIZATIONS
from ftbench.store.rundir import read_json
from ftbench.store.steps import read_steps
from ftbench.worker.model.parts import decoder_layers
from ftbench.worker.optimizations import compile as compiled
from ftbench.worker.optimizations import fp8, fused_lora, triton_kernels
from tritons import DEVICE, module, on_gpu

ROOT = Path(__file__).resolve().parents[2]
ON = spec_of(optimizations={"fused_lora": True, "triton_kernels": True})
IDS = torch.randint(0, 64, (2, 5), generator=torch.Generator().manual_seed(0)).to(DEVICE)
SHAPE = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 3, "head_dim": 16,
    "num_key_value_heads": 1, "vocab_size": 64, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
}  # fmt: skip
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")  # named in the refusal


@pytest.fixture
def kernels():
    module("kernels.decoder_layer")
    return triton_kernels


def model_of(family="qwen3", dtype=torch.float32, adapters=False, **changes):
    """A small model whose adapters (with `adapters`, also those of experts) and norms already do something."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SHAPE | changes)
    model = get_peft_model(
        Model.from_config(config, dtype=dtype).to(DEVICE),
        LoraConfig(
            r=4,
            lora_alpha=16,
            target_modules=list(PROJECTIONS),
            task_type="CAUSAL_LM",
            target_parameters=["experts.gate_up_proj", "experts.down_proj"] if adapters else None,
        ),
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "norm" in name:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def learned(model):
    """The loss, and the gradient of each adapter."""
    model.zero_grad()
    loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(("family", "fused"), [*[(family, True) for family in FAMILIES], ("qwen3", False)])
def test_loss_and_gradients_equal_transformers(kernels, family, fused):
    plain, ours = model_of(family), model_of(family)
    if fused:
        fused_lora.apply(ours, ON)
    kernels.apply(ours, ON)
    assert kernels.verify(ours, ON) == []
    torch.testing.assert_close(learned(ours), learned(plain), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_the_last_layer_computes_only_tokens_that_the_loss_reads(kernels, compile):
    plain, ours = model_of(), model_of()
    fused_lora.apply(ours, ON)
    kernels.apply(ours, ON)
    require_few_tokens(plain, ours, IDS, compile)


def test_attention_gets_the_arguments_of_transformers(kernels):
    calls = []

    def attend(module, query, key, value, mask, **options):
        calls.append({name: options[name] for name in ("dropout", "scaling", "sliding_window")})
        return value.repeat_interleave(3, 1).transpose(1, 2), None

    AttentionInterface.register("spied", attend)
    plain, ours = (model_of("mistral", sliding_window=3, attention_dropout=0.25) for _ in range(2))
    kernels.apply(ours, ON)
    for model in (plain, ours):
        model.set_attn_implementation("spied")
        for training in (True, False):
            model.train(training)(input_ids=IDS)
    assert calls[: len(calls) // 2] == calls[len(calls) // 2 :]
    assert {(call["dropout"], call["sliding_window"]) for call in calls} == {(0.25, 3), (0.0, 3)}


def test_disabled_adapters_leave_the_base_model(kernels):
    plain, ours = model_of(), model_of()
    fused_lora.apply(ours, ON)
    kernels.apply(ours, ON)
    with ours.disable_adapter(), plain.disable_adapter(), torch.no_grad():
        torch.testing.assert_close(ours(input_ids=IDS).logits, plain(input_ids=IDS).logits)


def test_one_compiled_graph_serves_all_layers_without_copies(kernels):
    plain, ours = model_of(), model_of()
    fused_lora.apply(ours, ON)
    kernels.apply(ours, ON)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for layer in decoder_layers(ours):
        layer.compile(backend="aot_eager")
    torch.testing.assert_close(learned(ours), learned(plain), atol=1e-6, rtol=1e-5)
    assert compiled.graphs() == 2  # the first layer's input needs no gradient
    assert not torch._dynamo.utils.counters["graph_break"]


def in_8_bits(recipe, *, kernels=True):
    """A model of 16 bits with fused adapters, its base layers multiplied in 8 bits; twice, as bfloat16 wants it."""
    values = {"train": {"precision": "bf16"}, "optimizations": {"fused_lora": True, "triton_kernels": kernels}}
    spec = spec_of(**values)
    spec = spec.model_copy(update={"optimizations": spec.optimizations.model_copy(update={"fp8": recipe})})
    model = model_of(dtype=torch.bfloat16)
    fp8.apply(model, spec)
    fused_lora.apply(model, spec)
    if kernels:
        triton_kernels.apply(model, spec)
    return model


def distance(found, expected):
    """Return the errors of the loss and of all gradients, relative to the largest value."""
    (loss, ours), (other, theirs) = found, expected
    apart = sum((ours[name].double() - theirs[name].double()).square().sum() for name in theirs)
    return max(
        abs(loss - other) / other, (apart / sum(part.double().square().sum() for part in theirs.values())).sqrt()
    )


def learned_in_16_bits(model):
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        return learned(model)


def test_kernels_read_joined_outputs_of_8_bit_products(kernels, monkeypatch):
    """Four products per direction instead of seven, each shared with its adapters, and one graph for all layers."""
    plain, ours = in_8_bits("tensorwise", kernels=False), in_8_bits("tensorwise")
    made = AdaptedProduct
    calls = []
    monkeypatch.setattr(made, "apply", lambda *given, plain=made.apply: calls.append(1) or plain(*given))
    expected = learned_in_16_bits(plain)
    assert not calls
    found = learned_in_16_bits(ours)
    assert distance(found, expected) < 0.2, "16 bits round otherwise, which 8 bits make more of"
    assert len(calls) == 4 * SHAPE["num_hidden_layers"]
    monkeypatch.undo()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for layer in decoder_layers(ours):
        layer.compile(backend="aot_eager")
    assert distance(learned_in_16_bits(ours), found) < 0.2
    assert compiled.graphs() == 2
    assert not torch._dynamo.utils.counters["graph_break"]


def test_an_adapted_product_is_the_sum_of_its_parts():
    model = in_8_bits("tensorwise", kernels=False)
    group = decoder_layers(model)[0].mlp.up_proj.group
    adapter_copies.by_torch(group.copies())
    x, dy = torch.randn(32, 48, device=DEVICE), torch.randn(32, 160, device=DEVICE)
    found = []
    for make in (group.product, lambda x: torch.cat(group.outputs(x), 1)):
        model.zero_grad()
        given = x.to(torch.bfloat16).requires_grad_()
        made = make(given)
        made.backward(dy.to(made.dtype))
        found.append([made, given.grad, *(part.grad.clone() for part in group.adapters())])
    for mine, theirs in zip(*found, strict=True):
        assert (mine.float() - theirs.float()).norm() < 3 * torch.finfo(torch.bfloat16).eps * theirs.float().norm()


@pytest.fixture
def in_torch(monkeypatch):
    """Cast by the last step's maximum, in plain torch."""
    delayed = module("kernels.delayed_cast")

    def cast(x, maxima, dtype):
        maxima.data[1] = torch.maximum(maxima[1], x.abs().amax())
        largest = torch.where(maxima[0] > 0, 2 * maxima[0], maxima[1])
        return fp8.cast(x, dtype, largest)

    monkeypatch.setattr(delayed, "cast_by_last", cast)


def test_fused_8_bit_mlp_learns_the_same_as_its_parts(kernels, in_torch, monkeypatch):
    """Kernels in plain torch, with the same arguments and outputs."""
    gate, cast = module("kernels.adapted_swiglu"), module("kernels.delayed_cast").cast_by_last

    def gated(both):
        gate, up = both.chunk(2, 1)
        return torch.nn.functional.silu(gate) * up

    def forward(base, mid, b, a, maxima, dtype):
        out = gated(torch.addmm(base, mid, b.t()))
        return *cast(out, maxima, dtype), out @ a.t()

    def backward(dout, base, mid, b, thin, a, maxima, dtype):
        with torch.enable_grad():
            both = torch.addmm(base, mid, b.t()).requires_grad_()
            out = gated(both)
            (dy,) = torch.autograd.grad(out, both, torch.addmm(dout, thin, a))
        return *cast(dy, maxima, dtype), dy @ b, dy.t() @ mid, thin.t() @ out.detach()

    monkeypatch.setattr(gate, "gate_and_cast", forward)
    monkeypatch.setattr(gate, "gate_gradients", backward)
    model = in_8_bits("tensorwise-delayed")
    mlp = decoder_layers(model)[0].mlp
    groups = [layer.group for layer in (mlp.up_proj, mlp.down_proj)]
    x, dy, found = *torch.randn(2, 2, 9, 48, device=DEVICE, dtype=torch.bfloat16), []
    for whole in (True, False):
        if not whole:
            monkeypatch.setattr(fused_lora.AdaptersOnlyGroup, "gated", lambda *_: None)
        model.zero_grad()
        for group in groups:
            adapter_copies.by_torch(group.copies())
            group.joined[0].maxima.zero_()
        given = x.clone().requires_grad_()
        made = mlp(given)
        made.backward(dy)
        found.append([made, given.grad, *(part.grad.clone() for group in groups for part in group.adapters())])
        found[-1] += [group.joined[0].maxima.clone() for group in groups]
    for mine, theirs in zip(*found, strict=True):
        assert (mine.float() - theirs.float()).norm() < 0.05 * theirs.float().norm()


@on_gpu
def test_fused_8_bit_mlp_saves_only_gate_and_up(kernels):
    ours, kept = in_8_bits("tensorwise-delayed"), []

    def keep(part):
        kept.append(tuple(part.shape))
        return part

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda part: part), torch.autocast(DEVICE, torch.bfloat16):
        ours(input_ids=IDS, labels=IDS, use_cache=False)
    tokens, inner = IDS.numel(), SHAPE["intermediate_size"]
    assert kept.count((tokens, 2 * inner)) == SHAPE["num_hidden_layers"]
    assert (tokens, inner) not in kept
    mlp = decoder_layers(ours)[0].mlp
    group, down = mlp.up_proj.group, mlp.down_proj.group
    group.a = group.a.new_zeros(33, SHAPE["hidden_size"])
    assert group.gated(torch.randn(2, SHAPE["hidden_size"]), down) is None, "more sums than registers hold"


def maxima_of(model):
    return torch.stack([layer.maxima for layer in model.modules() if type(layer) is fp8.Fp8Linear])


def test_scales_of_the_step_before(kernels, in_torch):
    plain, ours = in_8_bits("tensorwise-fast", kernels=False), in_8_bits("tensorwise-delayed", kernels=False)
    expected = learned_in_16_bits(plain)
    assert distance(learned_in_16_bits(ours), expected) == 0, "the first step takes its own"
    first = maxima_of(ours)
    assert (first[..., 0] == 0).all()
    again = learned_in_16_bits(ours)
    assert torch.equal(maxima_of(ours)[..., 0], first[..., 1])
    assert distance(again, expected) < 1e-3, "half the scale is as good"
    ours.gradient_checkpointing_enable({"use_reentrant": False})
    ours.enable_input_require_grads()
    assert distance(learned_in_16_bits(ours), again) == 0
    assert not any("maxima" in name for name in ours.state_dict())


@on_gpu
def test_delayed_casts_are_part_of_the_one_graph(kernels):
    """The real kernel runs, whose writes to the maxima are hidden from torch. Triton's interpreter rounds
    differently from a GPU, so the learned values are not compared."""
    plain, ours = in_8_bits("tensorwise-delayed"), in_8_bits("tensorwise-delayed")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for layer in decoder_layers(ours):
        layer.compile(backend="aot_eager")
    for model in (plain, ours):
        learned_in_16_bits(model)
        first = maxima_of(model)[..., 1].clone()
        learned_in_16_bits(model)
        assert torch.equal(maxima_of(model)[..., 0], first)
    torch.testing.assert_close(maxima_of(ours), maxima_of(plain), rtol=0.5, atol=0)
    assert (first > 0).sum() == 2 * (4 + 4) - 1, "four products each way, none for the first input's gradient"
    assert compiled.graphs() == 2
    assert not torch._dynamo.utils.counters["graph_break"]


def test_evaluation_does_not_change_the_scales(kernels, in_torch):
    ours = in_8_bits("tensorwise-delayed", kernels=False)
    learned_in_16_bits(ours)
    known = maxima_of(ours)[..., 1].clone()
    with torch.no_grad(), torch.autocast(DEVICE, dtype=torch.bfloat16):
        for layer in decoder_layers(ours.eval()):
            layer.input_layernorm.weight *= 8
        ours(input_ids=IDS)
        ours(input_ids=IDS)
        for layer in decoder_layers(ours.train()):
            layer.input_layernorm.weight /= 8
    learned_in_16_bits(ours)
    assert torch.equal(maxima_of(ours)[..., 0], known)


TRAINING = {
    "train": {"optimizer": "sgd", "learning_rate": 0.5, "max_steps": 2, "batch_size": 2, "precision": "fp32"},
    "dataset": {"samples": 4, "mean_length": 12, "max_length": 16},
    "method": {"name": "lora"},
}


@pytest.mark.skipif(DEVICE == "cuda", reason="tests/gpu trains with them there")
def test_sgd_steps_with_kernels_equal_those_without(kernels, train_here):
    rows = []
    for on in (False, True):
        run = train_here(**TRAINING, optimizations={"triton_kernels": on, "fused_lora": on})
        rows.append([(row.loss, row.grad_norm) for row in read_steps(run.steps)[0]])
        assert ("triton_kernel_modules" in read_json(run.applied)) == on
    assert len(rows[0]) == 2
    for plain, ours in zip(*rows, strict=True):
        assert ours == pytest.approx(plain, rel=1e-5)


PRODUCTS = torch.float32 if DEVICE == "cpu" else torch.bfloat16


@pytest.fixture
def expert_rows(monkeypatch):
    """The kernels of experts, which this fixture also runs on a CPU. Triton's interpreter cannot multiply bfloat16."""
    made = module("kernels.expert_rows")
    monkeypatch.setattr(module("kernels.expert_adapters"), "DTYPES", (PRODUCTS,))
    monkeypatch.setattr(made, "has_kernels", lambda rows, bias=None: bias is None or not bias.requires_grad)
    return made


def routed(tokens, k, width, dtype):
    """Tokens that choose k of 16 experts: hidden, rows, weights, bias, order and slots of the rows sorted by expert,
    and the expert of each row."""
    torch.manual_seed(0)
    shapes = ((tokens, width), (tokens * k, width), (tokens, k), (16, width))
    parts = [torch.randn(shape, dtype=dtype).to(DEVICE) for shape in shapes]
    experts, order = torch.rand(tokens, 16).topk(k).indices.reshape(-1).sort(stable=True)
    return *(part.requires_grad_() for part in parts[:3]), parts[3], order.to(DEVICE), experts.to(DEVICE)


def near(found, expected, dtype, most=2):
    """Check that no error is larger than `most` units of the dtype, relative to the norm."""
    for ours, plain in zip(found, expected, strict=True):
        assert (ours.double() - plain.double()).norm() <= most * torch.finfo(dtype).eps * plain.double().norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tokens", "k", "width"), [(5, 1, 48), (7, 4, 1100), (9, 8, 2050), (1, 8, 1024)])
def test_rows_of_experts_equal_the_plain_formulas(expert_rows, tokens, k, width, dtype):
    hidden, rows, weights, bias, order, experts = routed(tokens, k, width, dtype)
    slots = order.argsort()
    found = [expert_rows.dispatch(hidden, order, slots, k)]
    found += [expert_rows.combine(rows, weights, order, slots, each, experts) for each in (None, bias)]
    shares = weights.float().reshape(-1)[order, None]
    empty, wholes = torch.zeros(tokens, width, device=DEVICE), (rows.float(), rows.float() + bias.float()[experts])
    expected = [hidden.float().repeat_interleave(k, 0)[order]]
    expected += [empty.index_add(0, order // k, whole * shares) for whole in wholes]
    for made in (found, expected):
        gradients = [each.detach().flip(0).to(made[0].dtype) for each in (rows, hidden, 2 * hidden)]
        made += torch.autograd.grad(made, (hidden, rows, weights), gradients)
    assert [part.dtype for part in found] == [dtype] * 6
    near(found, expected, dtype)


CHECKS = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic")


def test_operations_on_rows_of_experts_can_be_compiled(expert_rows):
    hidden, rows, weights, bias, order, experts = (part.detach() for part in routed(5, 4, 48, torch.float32))
    slots = order.argsort().view(5, 4)
    for given in ((weights, bias, experts), (None, None, None)):
        torch.library.opcheck(expert_rows.sum_rows, (rows, slots, *given), test_utils=CHECKS)
    for each in (None, bias):
        given = (hidden, rows, weights, order, each, experts)
        torch.library.opcheck(expert_rows.combine_backward, given, test_utils=CHECKS)


ENDS = (0, 70, 71, 71, 200, 250)  # of the rows of six experts, two of them without rows


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(("rank", "width"), [(8, 72), (24, 264)])
def test_products_with_adapters_of_experts_equal_the_plain_formulas(expert_rows, rank, width, with_bias):
    adapters = module("kernels.expert_adapters")
    torch.manual_seed(0)
    shapes = ((250, 64), (6, 64, width), (6, 64, rank), (6, rank, width), (6, width), (250, width))
    given = [torch.randn(shape, dtype=PRODUCTS).to(DEVICE) for shape in shapes]
    rows, matrices, down, up, bias, dout = given
    ends = torch.tensor(ENDS, dtype=torch.int32, device=DEVICE)
    trained = [part.requires_grad_() for part in (rows, down, up)]
    bias = bias if with_bias else None
    found = adapters.add_adapter(lambda x: adapters.grouped(x, matrices, ends), rows, down, up, ends, bias)
    plain = [part.detach().double().requires_grad_() for part in trained]
    parts = zip(plain[0].tensor_split(ENDS[:-1]), matrices.double(), *plain[1:], given[4].double(), strict=True)
    expected = torch.cat([part @ w + part @ a @ b + with_bias * c for part, w, a, b, c in parts])
    near([found, *torch.autograd.grad(found, trained, dout)],
         [expected, *torch.autograd.grad(expected, plain, dout.double())], PRODUCTS, 4)  # fmt: skip


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gate_of_gpt_oss_equals_transformers(expert_rows, dtype, with_bias):
    """A third of the values is outside of the limit."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    gates = module("kernels.clamped_gate")
    torch.manual_seed(0)
    both = (2 * torch.randn(20, 2100, dtype=dtype)).to(DEVICE).requires_grad_()
    bias, dout = torch.randn(4, 2100, dtype=dtype).to(DEVICE), torch.randn(20, 1050, dtype=dtype).to(DEVICE)
    experts = torch.randint(0, 4, (20,)).sort().values.to(DEVICE)
    given = (bias if with_bias else None, experts, 1.702, 2.0)
    found = gates.clamped_gate(both, *given)
    plain = both.detach().float().requires_grad_()
    layer = SimpleNamespace(alpha=1.702, limit=2.0)
    expected = GptOssExperts._apply_gate(layer, plain + bias.float()[experts] if with_bias else plain)
    near([found, *torch.autograd.grad(found, both, dout)],
         [expected, *torch.autograd.grad(expected, plain, dout.float())], dtype)  # fmt: skip


def test_gate_of_gpt_oss_keeps_nan(expert_rows):
    """A limit must not turn NaN into a number: a NaN loss fails the run."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    both = torch.tensor([[torch.nan, 1.0, 1.0, torch.nan, 9.0, -9.0, 1.0, 1.0]], device=DEVICE)
    layer, experts = SimpleNamespace(alpha=1.702, limit=2.0), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    found, expected = [], []
    for made, gate in ((found, lambda x: module("kernels.clamped_gate").clamped_gate(x, None, experts, 1.702, 2.0)),
                       (expected, lambda x: GptOssExperts._apply_gate(layer, x))):  # fmt: skip
        given = both.clone().requires_grad_()
        made.append(gate(given))
        made += torch.autograd.grad(made[0].sum(), given)
    assert expected[0].isnan().sum() == 2
    torch.testing.assert_close(found, expected, equal_nan=True)


def test_operations_of_experts_can_be_compiled(expert_rows):
    adapters, gates = module("kernels.expert_adapters"), module("kernels.clamped_gate")
    ends = torch.tensor(ENDS, dtype=torch.int32, device=DEVICE)
    shapes = ((250, 72), (250, 8), (6, 8, 72), (6, 72))
    base, small, up, bias = (torch.randn(shape, device=DEVICE) for shape in shapes)
    for each in (None, bias):
        torch.library.opcheck(adapters.add_products, (base, small, up, ends, each), test_utils=CHECKS)
        given = (base, each, torch.zeros(250, dtype=torch.int64, device=DEVICE), 1.702, 2.0)
        torch.library.opcheck(gates.gate_forward, given, test_utils=CHECKS)
        torch.library.opcheck(gates.gate_backward, (base[:, :36], *given), test_utils=CHECKS)


@pytest.mark.parametrize(("family", "adapters"), [("qwen3_moe", False), ("qwen3_moe", True), ("gpt_oss", True)])
def test_layers_with_experts_learn_the_same_as_transformers(expert_rows, family, adapters):
    """With 16 experts and 10 tokens, some experts get no token."""
    experts = {"num_experts": 16, "num_experts_per_tok": 2, "num_local_experts": 16}
    plain, ours = (model_of(family, adapters=adapters, **experts) for _ in range(2))
    fused_lora.apply(ours, ON)
    torch.testing.assert_close(learned(ours), learned(plain), atol=1e-6, rtol=1e-5)
    compiles = model_of(family, torch.bfloat16, adapters, **experts)  # float32 grouped products cannot be compiled
    fused_lora.apply(compiles, ON)
    expected = learned(compiles)
    torch._dynamo.reset()
    for layer in decoder_layers(compiles):
        layer.mlp.experts.compile(backend="aot_eager", fullgraph=True)
    assert distance(learned(compiles), expected) < 0.05


def test_unsupported_layers_are_an_error(kernels):
    with pytest.raises(
        SpecError,
        match=rf"supports layers of {', '.join(FAMILIES)} .* but Gemma2ForCausalLM has other layers or",
    ):
        kernels.apply(model_of("gemma2"), ON)
    with pytest.raises(SpecError, match="LlamaForCausalLM has other layers or another activation: set it to off"):
        kernels.apply(model_of("llama", hidden_act="gelu"), ON)


def test_unsupported_settings_are_errors():
    assert machine_incompatibilities(ON, None) == ["optimizations.triton_kernels needs a GPU: set it to off"]
    assert machine_incompatibilities(ON, (8, 6)) == []
    for changes, words in (
        ({"method": {"name": "full"}}, "method full trains them: use lora or qlora"),
        (
            {"launch": {"gpus": 2, "strategy": "zero3"}},
            "not tested with launch.strategy zero3",
        ),
        (
            {"optimizations": {"triton_kernels": True, "liger": True}},
            "replace the same code: choose one",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            spec_of(**{"optimizations": {"triton_kernels": True}} | changes)
    assert incompatibilities(ON) == []
    assert "fused_lora" in OPTIMIZATIONS["triton_kernels"].after


def test_without_triton_a_run_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(trl, "_installed", lambda name: name != "triton")
    with pytest.raises(MissingError, match=r"training needs triton, .*: pip install 'ftbench\[train\]'"):
        trl.check_installed(ON)


def bench_kernels(*arguments):
    command = [sys.executable, str(ROOT / "scripts/studies/bench-kernels"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_timed_variants_compute_the_same(kernels):
    done = bench_kernels("--check")
    assert done.returncode == 0, done.stderr
    assert [line[:14].strip() for line in done.stdout.splitlines()] == ["swiglu", "norm", "sum and norm", "heads"]

"""Strategies: unsupported models, the optimizer on sharded tensors, and limits of the libraries."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from peft import LoraConfig, get_peft_model
from torch._dynamo.testing import CompileCounter
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations import sdpa_attention, tensor_parallel

from conftest import spec_of
from ftbench.errors import SpecError
from ftbench.spec.experiment import Experiment
from ftbench.worker import optimizer, parallel
from ftbench.worker.data.collate import Collator
from ftbench.worker.model.parts import decoder_layers
from ftbench.worker.optimizations import compile as compiled
from ftbench.worker.optimizations import fused_lora
from ftbench.worker.optimizations.chunked_loss import chunked_loss
from ftbench.worker.parallel.ddp import different_copies


def loading(strategy, gpus, **shape):
    values = {"name": "a", "model": {"id": "a/b"}, "launch": {"gpus": gpus, "strategy": strategy}}
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(**shape))
    return parallel.load(strategy).loading(Experiment.model_validate(values), config)


@pytest.mark.parametrize(
    ("strategy", "shape", "sentence"),
    [
        ("tp", {"num_key_value_heads": 4}, "3 GPUs cannot share the 4 key heads of a/b evenly: "),
        ("tp+fsdp", {"num_key_value_heads": 3}, "launch.tp: 2 GPUs cannot share the 3 key heads of a/b evenly"),
        ("ep", {"num_experts": 8}, "3 GPUs cannot share the 8 experts of a/b evenly: .* 2, 4, 8"),
        ("ep", {"n_routed_experts": 8}, "3 GPUs cannot share the 8 experts of a/b evenly"),
        ("ep", {"moe_num_experts": 8}, "3 GPUs cannot share the 8 experts of a/b evenly"),
        ("ep", {"num_hidden_layers": 2}, "ep needs experts and a/b has none: use fsdp or ddp"),
        ("cp", {"layer_types": ["full_attention", "sliding_attention"]}, "a/b has sliding_attention: use fsdp"),
        ("cp", {"sliding_window": 4096}, "a/b has a sliding window: use fsdp"),
    ],
)
def test_unsupported_model_is_an_error_with_a_fix(strategy, shape, sentence):
    with pytest.raises(SpecError, match=sentence):
        loading(strategy, 4 if strategy == "tp+fsdp" else 3, **shape)


def test_ddp_does_not_copy_gradients_back(one_rank):
    handler = DistributedDataParallelKwargs()
    parallel.load("ddp").attach(SimpleNamespace(accelerator=SimpleNamespace(ddp_handler=handler)), spec_of())
    model = DistributedDataParallel(torch.nn.Linear(4, 4), **handler.to_kwargs())
    model(torch.ones(2, 4)).sum().backward()
    assert model._get_ddp_logging_data()["gradient_as_bucket_view"] == 1


def test_cp_accepts_full_attention():
    assert loading("cp", 2, layer_types=["full_attention"], sliding_window=8) == {}


@pytest.mark.parametrize("strategy", ["tp", "tp+fsdp"])
def test_peft_without_sharded_adapters_is_an_error(monkeypatch, strategy):
    monkeypatch.delattr("peft.tuners.lora.model.get_tp_plan_and_mesh")
    with pytest.raises(SpecError, match=r"needs peft 0.21.2 or newer, .* pip install -U peft, or use fsdp"):
        loading(strategy, 4, num_key_value_heads=4)


@pytest.fixture
def one_rank():
    """Yield the device mesh of a process group with one rank."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_copies_with_nan_are_equal(one_rank):
    """The reason of such a run is its loss."""
    layer = torch.nn.Linear(2, 2)
    layer.weight.data[0, 0] = math.nan
    assert different_copies(layer, torch.distributed.group.WORLD) == []


def test_chunked_loss_shards_the_gradient_of_a_sharded_head(one_rank):
    """Tensor parallelism with `method: full` trains a sharded head."""
    torch.manual_seed(0)
    hidden, labels = torch.randn(1, 6, 4), torch.tensor([[0, 3, 1, 4, 2, 0]])
    head, sharded = torch.nn.Linear(4, 5, bias=False), torch.nn.Linear(4, 5, bias=False)
    sharded.weight = torch.nn.Parameter(distribute_tensor(head.weight.detach(), one_rank, [Shard(0)]))
    for each in (head, sharded):
        chunked_loss(hidden, labels, torch.arange(1, 6), each, size=2).backward()
    assert isinstance(sharded.weight.grad, DTensor)
    torch.testing.assert_close(sharded.weight.grad.full_tensor(), head.weight.grad)


@pytest.mark.parametrize(("kind", "way"), [(torch.optim.SGD, "foreach"), (torch.optim.AdamW, "fused")])
def test_sharded_and_unsharded_parameters_get_separate_groups(one_rank, kind, way):
    """Use the fused and foreach steps, which are torch's defaults on a GPU."""
    sharded, plain = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    sharded = torch.nn.Parameter(distribute_tensor(sharded.detach(), one_rank, [Shard(0)]))
    for each in (sharded, plain):
        each.grad = each.detach().clone()

    def create():
        group = {"params": [sharded, plain], "weight_decay": 0.0}
        return kind([group], lr=0.5, **{way: True})

    with pytest.raises(RuntimeError, match="mixed"):
        create().step()
    trainer = SimpleNamespace(create_optimizer=create)
    parallel.load("ep").attach(trainer, None)
    for each in (sharded, plain):
        each.data.fill_(1.0)
    trainer.create_optimizer().step()
    assert sharded.full_tensor().tolist() == plain.tolist() == pytest.approx([0.5] * 3)


@pytest.mark.parametrize(("dtype", "groups"), [(torch.float32, False), (torch.bfloat16, True)])
def test_ring_attention_repeats_keys_in_32_bits(monkeypatch, dtype, groups):
    monkeypatch.setattr(sdpa_attention, "use_gqa_in_sdpa", sdpa_attention.use_gqa_in_sdpa)
    cp = parallel.load("cp")
    monkeypatch.setattr(cp.ring, "_templated_ring_attention", cp.ring._templated_ring_attention)
    monkeypatch.setattr(cp.fsdp, "prepare", lambda made: None)
    cp.prepare(SimpleNamespace(device=torch.device("cuda")))
    key = torch.ones(1, 2, 4, 8, dtype=dtype)
    assert sdpa_attention.use_gqa_in_sdpa(None, key, key) is groups


@pytest.mark.parametrize(("precision", "length"), [("bf16", 12), ("fp32", 128)])
def test_cp_pads_sequences_to_equal_parts(precision, length):
    values = {"name": "a", "model": {"id": "tiny/qwen3"}, "launch": {"gpus": 2, "strategy": "cp"}}
    spec = Experiment.model_validate(values | {"train": {"precision": precision}})
    batch = Collator(spec, 0, 64, None)([{"input_ids": range(9), "labels": range(9), "lengths": [9]}])
    assert batch["input_ids"].shape == (1, length)


def test_sharded_layers_are_compiled_without_their_hooks(one_rank, monkeypatch):
    """All layers share one graph, and the gradients are those of unsharded layers."""
    torch._dynamo.utils.counters.clear()  # graphs of other tests in this process
    counter, ids = CompileCounter(), torch.arange(12)[None]
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    values = {"launch": {"gpus": 2, "strategy": "fsdp"}, "optimizations": {"compile": True, "fused_lora": True}}
    spec, gradients = spec_of(train={"precision": "fp32"}, **values), []
    for sharded in (False, True):
        torch.manual_seed(0)
        shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=3, **shape))
        model = get_peft_model(
            model, LoraConfig(r=2, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)
        )
        if sharded:
            fused_lora.apply(model, spec)
            compiled.apply(model, spec)
            assert len(compiled.verify(model, spec)) == 1  # nothing was compiled yet
            for layer in decoder_layers(model):
                fully_shard(layer, mesh=one_rank)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        named = ((name, each.grad) for name, each in model.named_parameters() if each.requires_grad)
        gradients.append({name: each.full_tensor() if sharded else each for name, each in named})
    assert counter.frame_count == 2  # the input of the first layer needs no gradient
    assert all(gradients[1][name].allclose(each, rtol=1e-4, atol=1e-6) for name, each in gradients[0].items())


@pytest.mark.parametrize(("kind", "cast"), [("adamw_torch", "bf16"), ("adamw_torchao_bf16", "no")])
def test_weights_that_are_rounded_stochastically_stay_in_16_bits(monkeypatch, kind, cast):
    """If accelerate's state has a precision, accelerate casts trained weights to 32 bits while it shards the model."""
    fsdp, seen, state = parallel.load("fsdp"), [], SimpleNamespace(_mixed_precision="bf16")
    monkeypatch.setattr(
        fsdp.fsdp_utils, "fsdp2_prepare_model", lambda _, model: seen.append(state._mixed_precision) or model
    )
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, num_hidden_layers=1, **shape))
    spec = spec_of(method={"name": "full"}, train={"precision": "bf16", "optimizer": kind})
    fsdp.shard(SimpleNamespace(state=state), model, spec)
    assert (seen, state._mixed_precision) == ([cast], "bf16")


def test_optimizer_kernel_gets_the_share_of_a_rank(one_rank):
    whole = torch.arange(6.0).reshape(3, 2)
    parameter = torch.nn.Parameter(distribute_tensor(whole, one_rank, [Shard(0)]))
    assert type(parameter) is DTensor
    with torch.no_grad():
        optimizer.own_share(parameter).zero_()
    assert parameter.full_tensor().count_nonzero() == 0
    assert optimizer.own_share(whole) is whole


def test_accelerate_needs_a_class_that_transformers_removed():
    """Remove the workaround in tp_fsdp.prepare when the class exists again."""
    assert "ReplicateParallel" in Accelerator._prepare_tp.__code__.co_varnames
    assert not hasattr(tensor_parallel, "ReplicateParallel")

"""Estimates for several GPUs: what each holds, what it computes, what it waits for."""

from __future__ import annotations

import pytest

from ftbench.core.architectures import architectures
from ftbench.core.units import GIB
from ftbench.estimate.memory.phases import MemoryPlan, peak, phases
from ftbench.estimate.workload.batches import BatchShape
from ftbench.estimate.workload.division import Division, division_of, rank_model
from ftbench.estimate.workload.method import Recipe
from ftbench.families import describe
from ftbench.spec.experiment import Launch

SMALL = {
    "model_type": "qwen3", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 768, "vocab_size": 4096,
    "tie_word_embeddings": False,
}  # fmt: skip


def divided(strategy: str, gpus: int, offload: str = "none") -> Division:
    return division_of(Launch.model_construct(gpus=gpus, strategy=strategy, offload=offload))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def tracked():
    """Bytes at the peak of a forward and backward pass of SMALL under fully_shard, by the number of GPUs, as torch's
    own tracker counts them on tensors without memory."""
    torch = pytest.importorskip("torch")
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import AutoModelForCausalLM, Qwen3Config

    def peaks(gpus: int) -> dict[str, int]:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=gpus)
        mesh = init_device_mesh("cpu", (gpus,))
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                model = AutoModelForCausalLM.from_config(Qwen3Config(**SMALL), attn_implementation="sdpa")
                mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
                wrapping = {"mesh": mesh, "mp_policy": mixed}
                for layer in model.model.layers:
                    fully_shard(layer, **wrapping)
                fully_shard(model, **wrapping)
                tracker = FSDPMemTracker(model)
                words = torch.randint(0, 4096, (1, 16))
                with tracker:
                    model(input_ids=words, labels=words).loss.backward()
                (snapshot,) = tracker.get_tracker_snapshot("peak").values()
        finally:
            dist.destroy_process_group()
        return {getattr(name, "name", name): size for name, size in snapshot.items()}

    return {gpus: peaks(gpus) for gpus in (2, 8)}


@pytest.mark.parametrize("gpus", [2, 8])
def test_memory_of_fsdp_is_what_torchs_own_tracker_counts(tracked, gpus: int) -> None:
    plan = MemoryPlan(describe(SMALL), Recipe(full=True), BatchShape(1, 16, 15), division=divided("fsdp", gpus))
    named = phases(plan)
    del named["optimizer step"]
    state = next(iter(named.values()))
    expected = peak({name: parts | {"optimizer state": 0} for name, parts in named.items()})[1]
    assert expected == pytest.approx(tracked[gpus]["Total"], rel=0.1)
    assert state["weights"] == pytest.approx(tracked[gpus]["SHARDED_PARAM"], rel=0.01)


# What deepspeed 0.19.8 prints of Qwen3-8B on four GPUs, GiB of each: estimate_zero2_model_states_mem_needs(8190735360,
# 4, 1, offload) and estimate_zero3_model_states_mem_needs(8190735360, 622329856, 4, 1, offload, params).
DEEPSPEED = {("zero2", "none"): 49.58, ("zero2", "optimizer"): 15.26, ("zero3", "none"): 36.65,
             ("zero3", "optimizer"): 6.13, ("zero3", "params"): 2.32}  # fmt: skip


@pytest.mark.parametrize(("strategy", "offload"), DEEPSPEED)
def test_states_of_zero_are_what_deepspeeds_own_estimator_says(strategy: str, offload: str) -> None:
    """Which takes the largest layer for there at all times, and leaves out a short row's activations and the
    optimizer's own temporary tensor of 4 bytes a parameter that is updated at once."""
    shape = describe(architectures()["Qwen/Qwen3-8B"])
    plan = MemoryPlan(shape, Recipe(full=True), BatchShape(1, 8, 7), division=divided(strategy, 4, offload))
    size = peak(phases(plan))[1] / GIB
    assert DEEPSPEED[strategy, offload] * 0.97 <= size <= 1.1 * DEEPSPEED[strategy, offload] + 0.1


def test_a_gpu_of_tensor_parallelism_holds_its_part_of_each_matrix() -> None:
    whole = describe(SMALL)
    half = rank_model(whole, divided("tp", 2))
    embedding = 4096 * 256
    assert half.parameters["attention"] * 2 == whole.parameters["attention"]
    assert half.parameters["mlp"] * 2 == whole.parameters["mlp"]
    assert half.parameters["head"] * 2 == whole.parameters["head"]
    assert half.parameters["embedding"] == whole.parameters["embedding"] == embedding
    assert half.parameters["norm"] == whole.parameters["norm"]


@pytest.fixture(scope="module")
def sparse():
    return describe(architectures()["Qwen/Qwen3-30B-A3B"])


def test_a_gpu_of_expert_parallelism_holds_its_experts_and_the_whole_router(sparse) -> None:
    part = rank_model(sparse, divided("ep", 4))
    assert part.parameters["experts"] * 4 == sparse.parameters["experts"]
    rest = sparse.total - sparse.parameters["experts"]
    assert part.total - part.parameters["experts"] == rest

"""Compare the memory of two real FSDP2 processes with the estimate for one of two GPUs."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

import warm
from ftbench.estimate.memory import share
from ftbench.estimate.memory.weights import trained
from ftbench.estimate.workload.plan import TrainingPlan
from ftbench.estimate.workload.sharding import Sharding
from ftbench.facts import architectures
from ftbench.families import describe
from waiting import free_ports


def rank(number: int, port: int, config: dict[str, Any]) -> dict[str, int]:
    """Train one step with the FSDP2 setup of accelerate 1.15 for bf16: float32 weights, bfloat16 products.

    Returns:
        The bytes of weights, gradients and optimizer state on this rank.
    """
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": str(number)}
    dist.init_process_group("gloo")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).float()
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.arange(32).reshape(1, 32) + 4
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    weights = list(model.parameters())
    held = {"weights": weights, "gradients": [weight.grad for weight in weights]}
    optimizer.step()
    states = (value for each in optimizer.state.values() for value in each.values())
    held["optimizer"] = [value for value in states if value.numel() > 1]
    dist.barrier()
    dist.destroy_process_group()
    return {part: sum(tensor.to_local().nbytes for tensor in tensors) for part, tensors in held.items()}


@pytest.mark.slow
def test_fsdp2_shards_have_the_estimated_size() -> None:
    config = architectures()["tiny/llama"]
    (port,) = free_ports(1)
    with ThreadPoolExecutor() as pool:
        held, _ = pool.map(lambda number: warm.returned(rank, number, port, config), range(2))

    model, part = describe(config), share.share(Sharding(2, "fsdp", "fsdp"))
    recipe = share.kept_as(TrainingPlan(full=True), part)
    count, width = trained(model, recipe)
    assert held["weights"] == pytest.approx(model.total * recipe.weight * part.weights, rel=0.001)
    assert held["gradients"] == pytest.approx(count * width * part.gradients, rel=0.001)
    assert held["optimizer"] == pytest.approx(share.optimizer_state(model, recipe, part), rel=0.001)

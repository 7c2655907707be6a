"""What two real processes hold under FSDP2, against what the estimate says of one of two GPUs."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="training libraries are not installed")

from ftbench.core.architectures import architectures
from ftbench.estimate.memory import share
from ftbench.estimate.memory.weights import gradients, trained
from ftbench.estimate.workload.method import Recipe
from ftbench.families import describe

# As accelerate 1.15 sets FSDP2 up for bf16: what is trained is float32, gathered and multiplied in bfloat16.
RANK = """
import json, os, sys
import torch, torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM
dist.init_process_group("gloo")
model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**json.loads(sys.argv[1]))).float()
mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
ids = torch.arange(32).reshape(1, 32) + 4
model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
local = lambda tensor: tensor.to_local().nbytes
weights = list(model.parameters())
held = {"weights": sum(map(local, weights)), "gradients": sum(local(weight.grad) for weight in weights)}
optimizer.step()
states = (value for each in optimizer.state.values() for value in each.values() if value.numel() > 1)
held["optimizer"] = sum(local(value) for value in states)
if dist.get_rank() == 0:
    print("HELD " + json.dumps(held))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_hold_under_fsdp2_what_is_estimated_of_one() -> None:
    config = architectures()["tiny/llama"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, json.dumps(config)], text=True, stdout=subprocess.PIPE,
                         stderr=subprocess.PIPE, env={**environment, "RANK": str(rank), "HOME": str(Path.home())})
        for rank in range(2)
    ]  # fmt: skip
    outputs = [rank.communicate(timeout=240) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs[0][1][-2000:]
    (line,) = (line for line in outputs[0][0].splitlines() if line.startswith("HELD "))
    held = json.loads(line.removeprefix("HELD "))

    model, part = describe(config), share.share("fsdp", 2)
    recipe = share.kept_as(Recipe(full=True), part)
    count, width = trained(model, recipe)
    assert held["weights"] == pytest.approx(model.total * recipe.weight * part.weights, rel=0.001)
    assert held["gradients"] == pytest.approx(gradients(count, width) * part.gradients, rel=0.001)
    assert held["optimizer"] == pytest.approx(share.optimizer_state(model, recipe, part), rel=0.001)

"""A mesh of tensor parallelism and FSDP2: `launch.tp` GPUs beside each other share each matrix of a layer, and see one
batch; of what is left of a layer each keeps the share that its row of the mesh has, and gathers it from the others.

transformers shards matrices as it reads them, over one dimension of a mesh that accelerate makes; accelerate shards
what comes of that over the other.
"""

from functools import cache
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from peft.tuners.lora.layer import LoraLayer
from transformers.distributed import DistributedConfig

from ftbench.spec.experiment import Experiment
from ftbench.worker.device import device
from ftbench.worker.parallel import ep, fsdp, tp
from ftbench.worker.parallel.fsdp import applied, correct_plugin, verify

__all__ = ["applied", "arguments", "attach", "loading", "prepare", "verify"]


def _numbers(spec: Experiment) -> tuple[int, int]:
    """Return how many GPUs share a matrix, and how many such groups there are."""
    return spec.launch.ranks // spec.launch.shares, spec.launch.shares


@cache
def _mesh(tensor: int, shares: int) -> ParallelismConfig:
    """Return the one mesh of this process, which loading and training share."""
    mesh = ParallelismConfig(tp_size=tensor, dp_shard_size=shares)
    mesh.get_device_mesh(device().type)
    return mesh


def loading(spec: Experiment, config: Any) -> dict[str, Any]:
    """Return what from_pretrained is told. Raise SpecError for heads that cannot be dealt evenly.

    What is trained beside 16-bit products is read in 32 bits: accelerate would make it so of what is whole alone.
    Adapters are drawn whole: peft takes shares of matrices for matrices where the mesh has names, and draws equal
    halves."""
    tensor, shares = _numbers(spec)
    tp.require_even(spec, config, "launch.tp", tensor)
    tp.require_shared_adapters(spec)
    LoraLayer._get_in_out_features = lambda self, module: (module.in_features, module.out_features)
    distributed = DistributedConfig(tp_size=tensor, fsdp_size=shares)
    full = spec.method.name == "full" and spec.train.precision != "fp32"
    more = {"dtype": torch.float32} if full else {}
    return {"distributed_config": distributed, "device_mesh": _mesh(tensor, shares).device_mesh, **more}


def arguments(spec: Experiment) -> dict[str, Any]:
    """Return what the trainer is told: FSDP2's words, and the mesh. Each rank has read its own shares already."""
    said = fsdp.arguments(spec) | {"parallelism_config": _mesh(*_numbers(spec))}
    said["fsdp_config"]["cpu_ram_efficient_loading"] = False
    return said


def prepare(made: Any) -> None:
    """Let accelerate shard on a CPU, too, and leave what tensor parallelism has not sharded as it is: it would make it
    tensors of the mesh by a class that transformers no longer has."""
    fsdp.prepare(made)
    Accelerator._prepare_tp = lambda self, *objects: objects


def attach(trainer: Any, spec: Experiment) -> None:
    """Correct accelerate as under fsdp, and let the optimizer step apart what is spread over different ranks."""
    correct_plugin(trainer)
    ep.attach(trainer, spec)

"""Tensor parallelism and FSDP2 on one device mesh.

A group of `launch.tp` neighbouring GPUs shares each matrix and processes the same batch. FSDP2 shards the layers across
the groups. accelerate creates the mesh with two dimensions. While loading, transformers shards the matrices over the
GPUs of a group. Then accelerate shards these parts over the groups.
"""

from functools import cache
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig

from ftbench.spec.experiment import Experiment, Launch
from ftbench.worker.device import device
from ftbench.worker.model.loading import trains_in_32_bits
from ftbench.worker.parallel import ep, fsdp, tp
from ftbench.worker.parallel.fsdp import applied, correct_plugin, verify

__all__ = ["applied", "arguments", "attach", "loading", "prepare", "verify"]


@cache
def _mesh(launch: Launch) -> ParallelismConfig:
    """Return accelerate's config with the device mesh. Cache it: loading and training must use the same mesh."""
    mesh = ParallelismConfig(tp_size=launch.tp, dp_shard_size=launch.data_parallel_size)
    mesh.get_device_mesh(device().type)
    return mesh


def loading(spec: Experiment, config: Any) -> dict[str, Any]:
    """Return the arguments of from_pretrained. With 16-bit products, load trained weights in 32 bits, because
    accelerate does not cast sharded weights."""
    more = {"dtype": torch.float32} if trains_in_32_bits(spec) else {}
    return tp.on_mesh(spec, config, lambda: _mesh(spec.launch).device_mesh) | more


def arguments(spec: Experiment) -> dict[str, Any]:
    """Return the arguments of FSDP2 and the device mesh. accelerate loads no weights: each rank has its shards."""
    values = fsdp.arguments(spec) | {"parallelism_config": _mesh(spec.launch)}
    values["fsdp_config"]["cpu_ram_efficient_loading"] = False
    return values


def prepare(config: Any) -> None:
    """Make accelerate shard on a CPU too. Also turn off its conversion of unsharded weights to DTensors, because the
    conversion needs a class that newer versions of transformers do not have."""
    fsdp.prepare(config)
    Accelerator._prepare_tp = lambda self, *objects: objects


def attach(trainer: Any, spec: Experiment) -> None:
    """Correct accelerate's FSDP, split the optimizer's groups by device mesh, and gather weights before saving."""
    correct_plugin(trainer, spec)
    ep.attach(trainer, spec)

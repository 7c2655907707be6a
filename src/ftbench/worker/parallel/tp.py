"""Tensor parallelism through transformers.

Each GPU holds a share of every large matrix and computes its share of each product. All GPUs process the same tokens.
"""

from collections.abc import Callable, Iterator
from typing import Any

import peft
import torch.distributed as dist
from peft.tuners.lora import model as peft_model
from peft.tuners.lora.layer import LoraLayer
from transformers.distributed import DistributedConfig

from ftbench.errors import SpecError
from ftbench.spec.experiment import Experiment
from ftbench.worker.parallel import ep
from ftbench.worker.parallel.ep import applied, arguments, verify

__all__ = ["applied", "arguments", "attach", "loading", "verify"]


def loading(spec: Experiment, config: Any) -> dict[str, Any]:
    """Return the arguments of from_pretrained, which shards the weights while loading. Raise SpecError if the ranks
    cannot share the heads evenly."""
    require_plan(spec, config)
    return {"distributed_config": DistributedConfig(tp_size=spec.launch.gpus)}


def require_plan(spec: Experiment, config: Any) -> None:
    """Raise SpecError if transformers has no plan to split the matrices, if the installed peft version does not split
    their adapters, or if the ranks cannot share the heads evenly."""
    if not getattr(config.get_text_config(), "base_model_tp_plan", True):
        raise SpecError(f"launch.strategy: transformers does not have a tp sharding plan for {spec.model.id}: use fsdp")
    if spec.method.adapters and not hasattr(peft_model, "get_tp_plan_and_mesh"):
        raise SpecError(
            f"launch.strategy: {spec.launch.strategy} with adapters needs peft 0.21.2 or newer, and peft "
            f"{peft.__version__} is installed: pip install -U peft, or use fsdp"
        )
    ep.require_even(spec, config)


def on_mesh(spec: Experiment, config: Any, mesh: Callable[[], Any]) -> dict[str, Any]:
    """Return the arguments of from_pretrained for a device mesh. `launch.tp` ranks share each matrix. The function
    `mesh` creates the device mesh. Raise SpecError if the ranks cannot share the heads evenly.

    Adapters are created with the full shape. On a mesh with named dimensions, peft would create a separate adapter for
    each shard. All these adapters would have the same initial values.
    """
    require_plan(spec, config)
    LoraLayer._get_in_out_features = lambda self, module: (module.in_features, module.out_features)
    tensor = spec.launch.tp or 1
    return {"distributed_config": DistributedConfig(tp_size=tensor, fsdp_size=spec.launch.gpus // tensor),
            "device_mesh": mesh()}  # fmt: skip


def attach(trainer: Any, spec: Experiment) -> None:
    """Sum the gradients of head norms (q_norm, k_norm) over the ranks, and split the optimizer's parameter groups.

    Every rank has all weights of such a norm, but only computes the gradient of its own heads. transformers sums the
    accumulated gradient after each micro-batch. So transformers would add gradients of earlier micro-batches again.
    """
    ep.attach(trainer, spec)
    for parameter in norms_within_heads(trainer.model):
        parameter.register_hook(_summed)


def norms_within_heads(model: Any) -> Iterator[Any]:
    """Yield the trained weights of q_norm and k_norm, and remove transformers' hooks that sum their gradients."""
    for module in model.modules():
        for key, hook in [*module._backward_hooks.items()]:
            if getattr(hook, "__name__", "") == "_all_reduce_grads":
                del module._backward_hooks[key]
                yield from (each for each in module.parameters(recurse=False) if each.requires_grad)


def _summed(gradient: Any) -> Any:
    dist.all_reduce(total := gradient.clone())
    return total

"""Tensor parallelism through transformers: each GPU keeps a share of every large matrix of a layer, and computes its
share of each product, on the same tokens as all others."""

from typing import Any

import peft
import torch.distributed as dist
from peft.tuners.lora import model as peft_model
from transformers.distributed import DistributedConfig

from ftbench.errors import SpecError
from ftbench.spec.experiment import Experiment
from ftbench.worker.parallel import ep
from ftbench.worker.parallel.ep import applied, arguments

__all__ = ["applied", "arguments", "attach", "loading", "verify"]


def loading(spec: Experiment, config: Any) -> dict[str, Any]:
    """Return what from_pretrained is told, which shards the weights as it reads them. Raise SpecError for heads that
    cannot be dealt evenly."""
    require_even(spec, config, "launch.gpus", spec.launch.ranks)
    require_shared_adapters(spec)
    return {"distributed_config": DistributedConfig(tp_size=spec.launch.ranks)}


def require_shared_adapters(spec: Experiment) -> None:
    """Raise SpecError for a peft that would leave adapters whole beside matrices of which a rank has a share."""
    if spec.method.adapters and not hasattr(peft_model, "get_tp_plan_and_mesh"):
        raise SpecError(
            f"launch.strategy: {spec.launch.strategy} with adapters wants peft 0.21.2 or newer, and peft "
            f"{peft.__version__} does not divide them: pip install -U peft, or use fsdp"
        )


def require_even(spec: Experiment, config: Any, key: str, parts: int) -> None:
    """Raise SpecError for layers that transformers has no plan to divide, and for heads that cannot be dealt to so many
    GPUs, which `key` of the spec says."""
    text = config.get_text_config()
    if not getattr(text, "base_model_tp_plan", True):
        raise SpecError(f"launch.strategy: transformers has no plan by which tp divides {spec.model.id}: use fsdp")
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if heads % parts:
        fitting = ", ".join(str(number) for number in range(2, heads + 1) if heads % number == 0)
        raise SpecError(
            f"{key}: tp deals the {heads} heads of keys of {spec.model.id} evenly, and {heads} is no multiple of "
            f"{parts}: set it to one of {fitting or 1}, or use fsdp"
        )


def attach(trainer: Any, spec: Experiment) -> None:
    """Sum the gradients of norms within heads as they are made: every rank has all of their weights and computes its
    heads' part. transformers sums what has accumulated, with each batch again what was summed before. What is spread
    over ranks is stepped apart from what is whole."""
    ep.attach(trainer, spec)
    for module in trainer.model.modules():
        for key, hook in [*module._backward_hooks.items()]:
            if getattr(hook, "__name__", "") == "_all_reduce_grads":
                del module._backward_hooks[key]
                for parameter in module.parameters(recurse=False):
                    if parameter.requires_grad:
                        parameter.register_hook(_summed)


def _summed(gradient: Any) -> Any:
    dist.all_reduce(whole := gradient.clone())
    return whole


def verify(trainer: Any, spec: Experiment) -> list[str]:
    """Return what is not sharded. A library that was told too late multiplies with whole matrices, and says nothing."""
    facts, ranks = applied(trainer), spec.launch.ranks
    if facts["sharded"]:
        return []
    return [f"launch.strategy is tp and no parameter is spread over the {ranks} ranks"]

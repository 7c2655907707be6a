"""DDP: a copy of the model on each GPU, each trained on its share of the batch; gradients are summed as they come."""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ftbench.spec.experiment import Experiment
from ftbench.spec.methods import reads_images


def arguments(spec: Experiment) -> dict[str, Any]:
    """Return what the trainer is told. Layers are compiled one by one, so that no graph is to be cut at a bucket. An
    encoder's last layer may be read by nobody (LLaVA takes the last but one): who trains it looks for it each step."""
    torch._dynamo.config.optimize_ddp = False
    of_images = spec.dataset.may_have_images and reads_images(spec.model)
    unused = of_images and getattr(spec.method, "vision", "full") != "frozen"
    return {"ddp_find_unused_parameters": unused, "ddp_broadcast_buffers": False}


def verify(trainer: Any, spec: Experiment) -> list[str]:
    """Return what is not as DDP has it after a step: the wrapped model, its ranks, the same weights on all of them."""
    wrapped = trainer.model_wrapped
    if not isinstance(wrapped, DistributedDataParallel):
        return [f"launch.strategy is ddp and the trainer trains a {type(wrapped).__name__}, which tells no other rank"]
    if (ranks := wrapped.process_group.size()) != spec.launch.ranks:
        return [f"launch.gpus is {spec.launch.gpus} and gradients are summed over {ranks} ranks"]
    sums = _sums(wrapped)
    of_all = [torch.empty_like(sums) for _ in range(ranks)]
    dist.all_gather(of_all, sums)
    apart = [rank for rank, others in enumerate(of_all) if not torch.equal(others, of_all[0])]
    return [f"launch.strategy is ddp and after the first step rank {apart[0]} trains other weights"] if apart else []


def _sums(model: Any) -> torch.Tensor:
    """Return a sum of each trained parameter."""
    return torch.stack(
        [parameter.detach().double().sum() for parameter in model.parameters() if parameter.requires_grad]
    )


def applied(trainer: Any) -> dict[str, Any]:
    """Return what wraps the model."""
    return {"wrapper": type(trainer.model_wrapped).__name__}

"""DDP. Each GPU has a copy of the model and trains on a share of the batch. The gradients of all GPUs are summed."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ftbench.spec.experiment import Experiment
from ftbench.spec.methods import reads_images


def arguments(spec: Experiment) -> dict[str, Any]:
    """Return the arguments of the trainer. `optimize_ddp` splits compiled graphs at gradient buckets. Turn it off,
    because each layer already has a separate graph. A trained vision encoder needs `find_unused_parameters`, because
    its last layer may be unused (LLaVA reads the second-last layer)."""
    torch._dynamo.config.optimize_ddp = False
    has_images = spec.dataset.may_have_images and reads_images(spec.model)
    unused = has_images and getattr(spec.method, "vision", "full") != "frozen"
    return {"ddp_find_unused_parameters": unused, "ddp_broadcast_buffers": False}


def attach(trainer: Any, spec: Experiment) -> None:
    """Make gradients views of DDP's buckets, so that DDP does not copy gradients back. With a CUDA graph, wrap the
    model on a new stream: autograd writes gradients on this stream, and a graph cannot use the default stream."""
    trainer.accelerator.ddp_handler.gradient_as_bucket_view = True
    if not spec.optimizations.cuda_graph:
        return
    wrap = trainer.accelerator.prepare_model

    def wrap_on_new_stream(*args: Any, **kwargs: Any) -> Any:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            model = wrap(*args, **kwargs)
        torch.cuda.current_stream().wait_stream(stream)
        return model

    trainer.accelerator.prepare_model = wrap_on_new_stream


def verify(trainer: Any, spec: Experiment) -> list[str]:
    """Return [], or one error message: wrong wrapper, wrong number of ranks, or weights that differ between ranks."""
    wrapped = trainer.model_wrapped
    if not isinstance(wrapped, DistributedDataParallel):
        return [f"launch.strategy is ddp, but the trainer has a {type(wrapped).__name__}, which does not sum gradients"]
    if (ranks := wrapped.process_group.size()) != spec.launch.gpus:
        return [f"launch.gpus is {spec.launch.gpus}, but gradients are summed over {ranks} ranks"]
    different = different_copies(wrapped, wrapped.process_group)
    return [f"launch.strategy is ddp, but the weights of rank {different[0]} differ after step 1"] if different else []


def different_copies(model: Any, group: Any) -> list[int]:
    """Return the ranks in `group` with trained weights that differ from the weights of the first rank. Compare only the
    sum of each weight."""
    sums = torch.stack([each.detach().double().sum() for each in model.parameters() if each.requires_grad])
    gathered = [torch.empty_like(sums) for _ in range(group.size())]
    dist.all_gather(gathered, sums, group)
    same = partial(torch.allclose, gathered[0], rtol=0, atol=0, equal_nan=True)
    return [rank for rank, each in enumerate(gathered) if not same(each)]


def applied(trainer: Any) -> dict[str, Any]:
    """Return the class name of the model's wrapper, for applied.json."""
    return {"wrapper": type(trainer.model_wrapped).__name__}

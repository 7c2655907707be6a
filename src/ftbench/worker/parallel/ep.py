"""Expert parallelism through transformers: each GPU keeps a share of the experts, on the same tokens as all others."""

from typing import Any

from accelerate.parallelism_config import ParallelismConfig
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

from ftbench.errors import SpecError
from ftbench.spec.experiment import Experiment
from ftbench.worker.device import device
from ftbench.worker.model.parts import base_model


def loading(spec: Experiment, config: Any) -> dict[str, Any]:
    """Return what from_pretrained is told, which shards the weights as it reads them. Raise SpecError for
    experts that cannot be dealt evenly."""
    ranks, text = spec.launch.ranks, config.get_text_config()
    count = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None)
    if not count:
        raise SpecError(f"launch.strategy: ep deals experts to the GPUs and {spec.model.id} has none: use fsdp or ddp")
    if count % ranks:
        fitting = ", ".join(str(number) for number in range(2, count + 1) if count % number == 0)
        raise SpecError(
            f"launch.gpus: ep deals the {count} experts of {spec.model.id} evenly, and {count} is no multiple of "
            f"{ranks}: set it to one of {fitting}, or use fsdp"
        )
    return {"distributed_config": DistributedConfig(tp_size=ranks, enable_expert_parallel=True)}


def arguments(spec: Experiment) -> dict[str, Any]:
    """Return what the trainer is told: nothing of the strategy, it sees how the model was loaded. accelerate takes such
    a model on GPUs alone; what it does there needs none."""
    if device().type == "cpu":
        ParallelismConfig._validate_accelerator = lambda self, accelerator: None
    return {}


def attach(trainer: Any, spec: Experiment) -> None:
    """Let the optimizer step what is spread over ranks apart from what is whole, or spread otherwise: on a GPU torch
    steps all of a group at once, and takes no mixture."""
    create = trainer.create_optimizer

    def created(*args: Any) -> Any:
        optimizer = create(*args)
        optimizer.param_groups = [part for group in optimizer.param_groups for part in _unmixed(group)]
        return optimizer

    trainer.create_optimizer = created
    save_whole(trainer)


def save_whole(trainer: Any) -> None:
    """Let all ranks gather what rank 0 saves: by itself it would wait for shares that no other one sends."""

    def save_model(folder: str) -> None:
        model, saves = trainer.model, trainer.args.should_save
        trained = {name: each.detach() for name, each in model.named_parameters() if each.requires_grad}
        gathered = ((name, getattr(each, "full_tensor", lambda each=each: each)()) for name, each in trained.items())
        state = {name.replace(_CHECKPOINT_PREFIX, ""): each.cpu() if saves else None for name, each in gathered}
        if saves:
            trainer._save(folder, state_dict=state)
        elif base_model(model) is model:
            model.save_pretrained(folder, state_dict={})  # where transformers waits for all ranks

    trainer.save_model = save_model


def _unmixed(group: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a group of parameters as one for each mesh that some are spread over, and one of what is whole."""
    kinds: dict[Any, list[Any]] = {}
    for parameter in group["params"]:
        kinds.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [group | {"params": kind} for kind in kinds.values()]


def verify(trainer: Any, spec: Experiment) -> list[str]:
    """Return what is not sharded. A library that was told too late multiplies with all experts, and says nothing."""
    if applied(trainer)["sharded"]:
        return []
    return ["launch.strategy is ep and no parameter is spread over the ranks"]


def applied(trainer: Any) -> dict[str, Any]:
    """Return how many parameters are sharded, and how many elements there are and this rank keeps."""
    parameters = list(trainer.model.parameters())
    return {
        "sharded": sum(isinstance(parameter, DTensor) for parameter in parameters),
        "elements": sum(parameter.numel() for parameter in parameters),
        "elements_of_rank": sum(getattr(parameter, "_local_tensor", parameter).numel() for parameter in parameters),
    }

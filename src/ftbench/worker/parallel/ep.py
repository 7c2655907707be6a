"""Expert parallelism through transformers. Each GPU holds a share of the experts. All GPUs process the same tokens."""

from typing import Any

from accelerate.parallelism_config import ParallelismConfig
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

from ftbench.core.stats import grouped_by
from ftbench.errors import SpecError
from ftbench.spec.experiment import Experiment
from ftbench.spec.methods import DIVIDED
from ftbench.spec.strategies import division_problems
from ftbench.worker.device import device
from ftbench.worker.model.parts import base_model


def loading(spec: Experiment, config: Any) -> dict[str, Any]:
    """Return the arguments of from_pretrained, which shards the weights while loading. Raise SpecError if the ranks
    cannot share the experts evenly."""
    require_even(spec, config)
    return {"distributed_config": DistributedConfig(tp_size=spec.launch.gpus, enable_expert_parallel=True)}


def require_even(spec: Experiment, config: Any) -> None:
    """Raise SpecError if the ranks cannot share the layers, heads or experts of the model evenly."""
    text = config.get_text_config()
    known = {name: getattr(text, name, None) for name in DIVIDED}  # gpt2, for example, has other names in its file
    if problems := [*division_problems(spec.model, spec.launch, known)]:
        raise SpecError("; ".join(problems))


def arguments(spec: Experiment) -> dict[str, Any]:
    """Return {}, because the trainer reads the strategy from the model. On a CPU, also turn off a check in accelerate,
    which would reject a sharded model on a CPU without need."""
    if device().type == "cpu":
        ParallelismConfig._validate_accelerator = lambda self, accelerator: None
    return {}


def attach(trainer: Any, spec: Experiment) -> None:
    """Split the optimizer's parameter groups by device mesh, and gather weights before saving. torch's fused and
    foreach steps do not support sharded and unsharded tensors in the same group."""
    split_groups(trainer)
    save_gathered(trainer)


def split_groups(trainer: Any) -> None:
    """Make the trainer split the optimizer's parameter groups by device mesh."""
    create = trainer.create_optimizer

    def created(*args: Any) -> Any:
        optimizer = create(*args)
        optimizer.param_groups = [part for group in optimizer.param_groups for part in _by_mesh(group)]
        return optimizer

    trainer.create_optimizer = created


def save_gathered(trainer: Any) -> None:
    """Make all ranks gather the weights before rank 0 saves them. Otherwise rank 0 would wait forever."""

    def save_model(folder: str) -> None:
        model, saves = trainer.model, trainer.args.should_save
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # an evaluation leaves the head gathered, in 16 bits with precision bf16
        trained = {name: each.detach() for name, each in model.named_parameters() if each.requires_grad}
        gathered = ((name, getattr(each, "full_tensor", lambda each=each: each)()) for name, each in trained.items())
        state = {name.replace(_CHECKPOINT_PREFIX, ""): each.cpu() if saves else None for name, each in gathered}
        if saves:
            trainer._save(folder, state_dict=state)
        elif base_model(model) is model:
            model.save_pretrained(folder, state_dict={})  # contains a barrier that all ranks must reach

    trainer.save_model = save_model


def _by_mesh(group: dict[str, Any]) -> list[dict[str, Any]]:
    """Split a parameter group into one group per device mesh, and one group for unsharded parameters."""
    kinds = grouped_by(group["params"], lambda parameter: getattr(parameter, "device_mesh", None))
    return [group | {"params": kind} for kind in kinds.values()]


def verify(trainer: Any, spec: Experiment) -> list[str]:
    """Return [], or an error message if no parameter is sharded. Each rank would then silently compute everything."""
    if applied(trainer)["sharded"]:
        return []
    return [f"launch.strategy is {spec.launch.strategy}, but the parameters are not sharded"]


def applied(trainer: Any) -> dict[str, Any]:
    """Return three counts: sharded parameters, elements of all parameters, and elements on this rank."""
    parameters = list(trainer.model.parameters())
    return {
        "sharded": sum(isinstance(parameter, DTensor) for parameter in parameters),
        "elements": sum(parameter.numel() for parameter in parameters),
        "elements_of_rank": sum(getattr(parameter, "_local_tensor", parameter).numel() for parameter in parameters),
    }

"""FSDP2: each GPU keeps a share of every weight, gradient and optimizer state, and gathers a layer's weights while it
computes with them.

No GPU ever holds all of them, and one rank's host memory at the most: published weights are read by rank 0, which gives
the others their shares; random ones are drawn there a few layers at a time."""

from dataclasses import replace
from typing import Any

from accelerate import DistributedType, PartialState
from accelerate.utils import fsdp_utils
from peft.tuners import tuners_utils
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ftbench.core.units import listed
from ftbench.spec.experiment import Experiment
from ftbench.worker import parallel
from ftbench.worker.model.parts import base_model, decoder, decoder_layers
from ftbench.worker.model.random_weights import Drawn


def reads(spec: Experiment) -> bool:
    """Return whether this rank reads the weights: all do what is quantised as it is read."""
    return spec.method.quantised or (spec.model.weights == "pretrained" and parallel.is_first())


def attach(trainer: Any, spec: Experiment) -> None:
    """Draw random weights where accelerate takes rank 0's state to share it out, tensor by tensor."""
    correct_plugin(trainer)
    if spec.model.weights == "random" and not reads(spec):
        share_out = fsdp_utils.fsdp2_load_full_state_dict
        fsdp_utils.fsdp2_load_full_state_dict = lambda accelerator, model, state, **more: share_out(
            accelerator, model, Drawn(state, spec.model), **more
        )


def correct_plugin(trainer: Any) -> None:
    """Let accelerate share out what there is, and leave losses and gradients as they are on one GPU."""
    _name_units(trainer)
    _keep_loss(trainer)
    _keep_head_beside_norm(trainer)
    _name_adapters_as_saved()


def _name_units(trainer: Any) -> None:
    """Name the layers to shard that are there: of CLIP transformers also names what its texts alone would have, without
    which accelerate ends."""
    there = {type(module).__name__ for module in trainer.model.modules()}
    plugin = trainer.accelerator.state.fsdp_plugin
    plugin.transformer_cls_names_to_wrap = sorted(there.intersection(trainer.model._no_split_modules or ()))


def _keep_head_beside_norm(trainer: Any) -> None:
    """Let a trained head share its unit with the decoder's last norm, whose forward pass gathers both: losses over
    chunks take the head's weights without its own, and TRL's would gather them in a way that leaves a rank's share
    with the gradient of its own batch alone. accelerate looks for the norm where models that read images have none."""
    if _head(trainer).weight.requires_grad:
        fsdp_utils._find_final_norm = _last_norm


def _name_adapters_as_saved() -> None:
    """Let peft find adapters in a state to be saved: it asks for them by the names of modules, and those of a layer
    that is computed again have a part that a state leaves out; it would save none."""
    if (names := getattr(tuners_utils, "_get_tuner_state_dict_key_prefixes", None)) is not None:  # of peft 0.21.2
        tuners_utils._get_tuner_state_dict_key_prefixes = lambda *args, **kwargs: {
            name.replace(_CHECKPOINT_PREFIX, "") for name in names(*args, **kwargs)
        }


def _head(trainer: Any) -> Any:
    return base_model(trainer.model).get_output_embeddings()


def _last_norm(model: Any) -> Any:
    return [module for module in decoder(model).children() if "Norm" in type(module).__name__][-1]


def _keep_loss(trainer: Any) -> None:
    """Leave the loss in 32 bits: accelerate would round all that a model returns to the bits of its products."""
    plugin = trainer.accelerator.state.fsdp_plugin
    if plugin.mixed_precision_policy:
        plugin.mixed_precision_policy = replace(plugin.mixed_precision_policy, output_dtype=None)


def arguments(spec: Experiment) -> dict[str, Any]:
    """Return what the trainer is told. A layer that is computed again in the backward pass is gathered once for both:
    checkpointing within what is sharded, not the trainer's around it."""
    config = {
        "version": 2,
        "reshard_after_forward": True,
        "activation_checkpointing": bool(spec.optimizations.gradient_checkpointing),
        "cpu_offload": spec.launch.offload == "params",
        "cpu_ram_efficient_loading": True,
    }
    return {"fsdp": True, "fsdp_config": config, "gradient_checkpointing": False}


def prepare(made: Any) -> None:
    """Let accelerate shard on a CPU, too: it takes FSDP for GPUs alone, and falls back to DDP without a word."""
    if made.device.type == "cpu":
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def verify(trainer: Any, spec: Experiment) -> list[str]:
    """Return what is not sharded: every layer is a unit of its own, every parameter is spread over all ranks, of a mesh
    at least over the shares of the batch, and waits where `launch.offload` says."""
    model, launch = trainer.model_wrapped, spec.launch
    if not isinstance(model, FSDPModule):
        return [f"launch.strategy is fsdp and the trainer trains a {type(model).__name__}, which is whole on each rank"]
    whole = [layer for layer in decoder_layers(model) if not isinstance(layer, FSDPModule)]
    if whole:
        return [f"launch.strategy is fsdp and {len(whole)} {type(whole[0]).__name__} are not sharded"]
    parameters = dict(model.named_parameters())
    if plain := [name for name, parameter in parameters.items() if not isinstance(parameter, DTensor)]:
        return [f"launch.strategy is fsdp and whole on each rank: {listed(plain, 1)}"]
    wanted = {launch.ranks, launch.shares} if launch.strategy == "tp+fsdp" else {launch.ranks}
    if (meshes := {parameter.device_mesh.size() for parameter in parameters.values()}) != wanted:
        return [f"launch.gpus is {launch.gpus} and parameters are spread over {meshes} ranks, not {wanted}"]
    head = _head(trainer)
    if head.weight.requires_grad and head._get_fsdp_state() is not _last_norm(model)._get_fsdp_state():
        return ["launch.strategy is fsdp and the head is no unit with the last norm: a share learns of its own batch"]
    if launch.offload == "params" and any(parameter.device.type != "cpu" for parameter in parameters.values()):
        return ["launch.offload is params and shares of them stay on the GPU"]
    return []


def applied(trainer: Any) -> dict[str, Any]:
    """Return how many parameters are sharded, and how many elements there are and this rank keeps."""
    parameters = list(trainer.model_wrapped.parameters())
    return {
        "sharded": sum(isinstance(parameter, DTensor) for parameter in parameters),
        "elements": sum(parameter.numel() for parameter in parameters),
        "elements_of_rank": sum(getattr(parameter, "_local_tensor", parameter).numel() for parameter in parameters),
    }

"""FSDP2: each GPU holds a shard of every weight, gradient and optimizer state. While a layer computes, each GPU gathers
the weights of this layer.

No GPU ever holds all weights. Only rank 0 reads pretrained weights and sends the other ranks their shards. Random
weights are created on rank 0, a few layers at a time.
"""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import accelerate.accelerator
import torch
from accelerate import DistributedType, PartialState
from accelerate.utils import fsdp_utils
from peft.tuners import tuners_utils
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX, checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ftbench.core.units import listed
from ftbench.spec.experiment import Experiment
from ftbench.worker import parallel
from ftbench.worker.model.loading import trains_in_32_bits
from ftbench.worker.model.parts import base_model, decoder, decoder_layers, unwrapped
from ftbench.worker.model.random_weights import RandomStateDict
from ftbench.worker.parallel import ep

applied = ep.applied


def reads(spec: Experiment) -> bool:
    """Return whether this rank reads weight files. Rank 0 reads pretrained weights. If the method quantises weights,
    all ranks read them."""
    return spec.method.quantised or (spec.model.weights == "pretrained" and parallel.is_first())


def attach(trainer: Any, spec: Experiment) -> None:
    """Correct accelerate's settings. If weights are random, rank 0 creates each tensor before accelerate sends it."""
    correct_plugin(trainer, spec)
    if spec.model.weights == "random" and not reads(spec):
        distribute = fsdp_utils.fsdp2_load_full_state_dict
        fsdp_utils.fsdp2_load_full_state_dict = lambda accelerator, model, state, **more: distribute(
            accelerator, model, RandomStateDict(state, spec.model), **more
        )


def shard(accelerator: Any, model: Any, spec: Experiment) -> Any:
    """Return the model, sharded by accelerate. While a layer computes, FSDP2 prefetches the weights of the next layer.
    accelerate casts all trained weights to float32 if products are in 16 bits. For `full` with 16-bit weights, this
    cast is turned off."""
    state, precision = accelerator.state, accelerator.state._mixed_precision
    if spec.method.name == "full" and not trains_in_32_bits(spec):
        state._mixed_precision = "no"  # FSDP2's precision policy already sets the dtype of the products
    for each in (module for module in model.modules() if hasattr(module, "checkpoint_fn")):
        each.checkpoint_fn.keywords["preserve_rng_state"] = True  # else a recomputed layer has another dropout
    model = fsdp_utils.fsdp2_prepare_model(accelerator, model)
    state._mixed_precision = precision
    for layer, following in pairwise(map(unwrapped, decoder_layers(model))):
        layer.set_modules_to_forward_prefetch([following])
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # frees the buffers that received the weights
    return model


def _checkpoint_every_second(accelerator: Any, model: Any) -> Any:
    """Turn on checkpointing in every second layer. accelerate would turn it on in all layers."""
    layers = decoder(model).layers
    for at in range(0, len(layers), 2):
        layers[at] = checkpoint_wrapper(layers[at])
    return model


def correct_plugin(trainer: Any, spec: Experiment) -> None:
    """Change what accelerate and peft get wrong: layer classes, precision, checkpointing, head, and adapter names."""
    accelerate.accelerator.fsdp2_prepare_model = partial(shard, spec=spec)
    if spec.optimizations.gradient_checkpointing == "selective":
        accelerate.accelerator.fsdp2_apply_ac = _checkpoint_every_second
    _set_layer_classes(trainer)
    _keep_loss_in_float32(trainer)
    _shard_head_with_norm(trainer)
    _match_adapter_names()


def _set_layer_classes(trainer: Any) -> None:
    """Make accelerate shard only layer classes that the model has. For CLIP, transformers also lists classes of a text
    model that is missing here, and accelerate would fail."""
    classes = {type(module).__name__ for module in trainer.model.modules()}
    plugin = trainer.accelerator.state.fsdp_plugin
    plugin.transformer_cls_names_to_wrap = sorted(classes.intersection(trainer.model._no_split_modules or ()))


def _shard_head_with_norm(trainer: Any) -> None:
    """Shard a trained head together with the decoder's last norm. The norm's forward pass then gathers both modules. A
    chunked loss uses the weights of the head, but does not call the head's forward pass. If TRL gathers the head, each
    rank only has the head's gradient for its own batch. accelerate does not find the last norm of models with
    images."""
    if _head(trainer).weight.requires_grad:
        fsdp_utils._find_final_norm = _last_norm


def _match_adapter_names() -> None:
    """Make peft find the adapters to save. peft searches the state dict for module names. Module names of checkpointed
    layers have an extra part, and names in the state dict do not. So peft would not save the adapters."""
    if (names := getattr(tuners_utils, "_get_tuner_state_dict_key_prefixes", None)) is not None:  # of peft 0.21.2
        tuners_utils._get_tuner_state_dict_key_prefixes = lambda *args, **kwargs: {
            name.replace(_CHECKPOINT_PREFIX, "") for name in names(*args, **kwargs)
        }


def _head(trainer: Any) -> Any:
    return base_model(trainer.model).get_output_embeddings()


def _last_norm(model: Any) -> Any:
    return [module for module in decoder(model).children() if "Norm" in type(module).__name__][-1]


def _keep_loss_in_float32(trainer: Any) -> None:
    """Keep the loss in float32. accelerate would round all outputs of the model to 16 bits."""
    plugin = trainer.accelerator.state.fsdp_plugin
    if plugin.mixed_precision_policy:
        plugin.mixed_precision_policy = replace(plugin.mixed_precision_policy, output_dtype=None)


def arguments(spec: Experiment) -> dict[str, Any]:
    """Return the arguments of the trainer. accelerate applies checkpointing inside the sharded unit, so FSDP2 gathers a
    layer once in the backward pass. The trainer's checkpointing would gather it twice."""
    config = {
        "version": 2,
        "reshard_after_forward": True,
        "activation_checkpointing": bool(spec.optimizations.gradient_checkpointing),
        "cpu_offload": spec.launch.offload == "params",
        "cpu_ram_efficient_loading": True,
    }
    return {"fsdp": True, "fsdp_config": config, "gradient_checkpointing": False}


def prepare(config: Any) -> None:
    """Make accelerate use FSDP2 on a CPU. By default, accelerate silently uses DDP on a CPU."""
    if config.device.type == "cpu":
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def verify(trainer: Any, spec: Experiment) -> list[str]:
    """Return [], or one error message: a layer or parameter is not sharded, the number of ranks is wrong, the head is
    not sharded with the last norm, or shards are on the GPU despite `offload: params`."""
    model, launch = trainer.model_wrapped, spec.launch
    if not isinstance(model, FSDPModule):
        return [f"launch.strategy is fsdp, but the trainer has a {type(model).__name__}, which is not sharded"]
    unsharded = [layer for layer in decoder_layers(model) if not isinstance(layer, FSDPModule)]
    if unsharded:
        return [f"launch.strategy is fsdp, but {len(unsharded)} {type(unsharded[0]).__name__} are not sharded"]
    parameters = dict(model.named_parameters())
    if plain := [name for name, parameter in parameters.items() if not isinstance(parameter, DTensor)]:
        return [f"launch.strategy is fsdp, but these are not sharded: {listed(plain, 1)}"]
    wanted = {launch.gpus, launch.data_parallel_size} if launch.strategy == "tp+fsdp" else {launch.gpus}
    if (meshes := {parameter.device_mesh.size() for parameter in parameters.values()}) != wanted:
        return [f"launch.gpus is {launch.gpus}, but parameters are sharded over {meshes} ranks, not {wanted}"]
    head = _head(trainer)
    if head.weight.requires_grad and head._get_fsdp_state() is not _last_norm(model)._get_fsdp_state():
        return ["launch.strategy is fsdp, but the head is not sharded with the last norm: its gradients are not summed"]
    if launch.offload == "params" and any(parameter.device.type != "cpu" for parameter in parameters.values()):
        return ["launch.offload is params, but the shards stay on the GPU"]
    return []

"""ZeRO through DeepSpeed. Stage 1 shards the optimizer state, stage 2 also gradients, and stage 3 also weights.

Unlike FSDP2, DeepSpeed casts all trained weights to bfloat16 for 16-bit products, and keeps a 32-bit copy.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch

from ftbench.spec.experiment import Experiment
from ftbench.worker.model.parts import base_model, decoder_layers

_FILLED_IN = (
    "gradient_accumulation_steps", "train_micro_batch_size_per_gpu", "train_batch_size", "gradient_clipping",
)  # fmt: skip
AHEAD = 2  # layers by which the CPU may be ahead of the GPU
# Attributes of DeepSpeed's optimizers that contain this rank's share of the 32-bit copy.
_UPDATED = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", "fp32_groups_flat_partition")


def arguments(spec: Experiment) -> dict[str, Any]:
    """Return DeepSpeed's configuration. The trainer replaces the values `auto`. torch's optimizer updates offloaded
    states, because DeepSpeed's own CPU optimizer needs a compiler."""
    stage, offload = int(spec.launch.strategy.removeprefix("zero")), spec.launch.offload
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": "auto"}
    if stage == 3:
        zero |= dict.fromkeys(("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"), "auto")
        zero["stage3_gather_16bit_weights_on_model_save"] = True
        # DeepSpeed's linear reads the ID of each weight, so torch 2.11 compiles each layer again, and at most eight.
        # Without checkpoints, torch's linear would keep the gathered weights until the backward pass.
        zero["memory_efficient_linear"] = not (spec.optimizations.compile and spec.optimizations.gradient_checkpointing)
    host = {"device": "cpu", "pin_memory": True}
    if offload != "none":
        zero["offload_optimizer"] = host
    if offload == "params":
        zero["offload_param"] = host
    config = {"zero_optimization": zero, "zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
    precision = {name: {"enabled": spec.train.precision == name} for name in ("bf16", "fp16")}
    return {"deepspeed": config | precision | dict.fromkeys(_FILLED_IN, "auto")}


def prepare(config: Any) -> None:
    """Make DeepSpeed use gloo on a CPU, because its own shared-memory communication needs a compiler."""
    from deepspeed import ops

    ops.__compatible_ops__["deepspeed_shm_comm"] = False


def attach(trainer: Any, spec: Experiment) -> None:
    """Set up gradient checkpointing with ZeRO-3.

    Use non-reentrant checkpoints. TRL would use reentrant checkpoints with adapters, and DeepSpeed would then keep all
    frozen weights gathered until the end of the step. All weights of a checkpointed layer are gathered at once while
    the previous layer computes. Separate gathers would make the GPUs wait for Python. Without checkpoints, each weight
    is gathered separately, because DeepSpeed 0.19 would otherwise miss weights in the backward pass.
    """
    if spec.launch.strategy == "zero3" and trainer.args.gradient_checkpointing:
        from deepspeed.utils import set_z3_leaf_modules

        trainer.args.gradient_checkpointing_kwargs = {"use_reentrant": False}
        set_z3_leaf_modules(trainer.model, list({type(layer) for layer in decoder_layers(trainer.model)}))
        trainer.args.hf_deepspeed_config.config["zero_optimization"] |= _prefetch_one_layer(trainer.model)
        if torch.cuda.is_available():
            _limit_gathered(decoder_layers(trainer.model))


def _limit_gathered(layers: Iterable[Any]) -> None:
    """Make the CPU wait if it is more than AHEAD layers ahead of the GPU, as in FSDP1 (limit_all_gathers). DeepSpeed
    gathers weights in a separate stream, which does not wait for the computation. The memory of a released layer is
    free only after the GPU has computed the layer. Without a limit, a run reserved 11.8 GiB more than its tensors."""
    events = deque[Any]()

    def wait(*_: Any) -> None:
        events.append(torch.cuda.Event())
        events[-1].record()
        if len(events) > AHEAD:
            events.popleft().synchronize()

    for layer in layers:
        layer.register_forward_pre_hook(wait)


def _prefetch_one_layer(model: Any) -> dict[str, int]:
    """Return the DeepSpeed settings that prefetch one layer and keep no other layer gathered.

    By default, DeepSpeed stops prefetching when 10^9 elements are gathered (partitioned_param_coordinator.py). The head
    (gathered first, by TRL's loss), the embedding and one layer of a 14B model have more elements. By default, a weight
    also stays gathered if it is needed again within the next 10^9 elements. Layers are leaf modules and count as zero
    elements, so the embedding would stay gathered. Small weights are not sharded, as in transformers.
    """
    small = 10 * base_model(model).config.get_text_config().hidden_size
    sizes = [[_elements(parameter) for parameter in layer.parameters()] for layer in decoder_layers(model)]
    layer = max(sum(size for size in each if size > small) for each in sizes)
    live = _elements(base_model(model).get_output_embeddings().weight) + 2 * layer
    return {"stage3_param_persistence_threshold": small, "stage3_prefetch_bucket_size": layer,
            "stage3_max_live_parameters": live, "stage3_max_reuse_distance": 0}  # fmt: skip


def verify(trainer: Any, spec: Experiment) -> list[str]:
    """Return error messages if DeepSpeed does not run the requested ZeRO stage or does not shard the weights."""
    engine, name, ranks = trainer.model_wrapped, spec.launch.strategy, spec.launch.gpus
    if type(engine).__name__ != "DeepSpeedEngine":
        return [f"launch.strategy is {name}, but the trainer has a {type(engine).__name__}"]
    if f"zero{engine.zero_optimization_stage()}" != name or engine.dp_world_size != ranks:
        return [f"launch.strategy is {name}, but DeepSpeed runs stage {engine.zero_optimization_stage()} over "
                f"{engine.dp_world_size} ranks"]  # fmt: skip
    facts, share = applied(trainer), 1.05 / ranks  # 5 % for the padding of the shares
    problems = []
    if facts["optimizer_elements_of_rank"] > facts["trained_elements"] * share + 4096:
        problems.append(f"launch.strategy is {name}, but each rank has the optimizer state of all trained parameters")
    if name == "zero3" and facts["elements_of_rank"] > facts["elements"] * share + 4096:
        problems.append("launch.strategy is zero3, but each rank has more than its share of the weights")
    return problems


def applied(trainer: Any) -> dict[str, Any]:
    """Return AHEAD, the number of sharded weights, and element counts of weights and of the optimizer's 32-bit copy."""
    engine = trainer.deepspeed
    if engine is None:  # before training begins
        return {}
    parameters = list(engine.module.parameters())
    updated = next(filter(None, (getattr(engine.optimizer, name, None) for name in _UPDATED)), ())
    return {
        "sharded": sum(hasattr(parameter, "ds_tensor") for parameter in parameters),
        "layers_ahead": AHEAD,
        "elements": sum(_elements(parameter) for parameter in parameters),
        "trained_elements": sum(_elements(parameter) for parameter in parameters if parameter.requires_grad),
        "elements_of_rank": sum(getattr(parameter, "ds_tensor", parameter).numel() for parameter in parameters),
        "optimizer_elements_of_rank": sum(each.numel() for each in updated),
    }


def _elements(parameter: Any) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))

"""ZeRO through DeepSpeed: the optimizer's states are dealt to the ranks (1), gradients too (2), weights too (3).

Another recipe than FSDP2's in 16 bits: DeepSpeed casts all that is trained to bfloat16 and keeps a copy in 32 bits.
"""

from typing import Any

from ftbench.spec.experiment import Experiment
from ftbench.worker.model.parts import base_model, decoder_layers

_FILLED_IN = (
    "gradient_accumulation_steps", "train_micro_batch_size_per_gpu", "train_batch_size", "gradient_clipping",
)  # fmt: skip
# The rank's share of the 32-bit copy, by the name that it has in each of DeepSpeed's optimizers.
_UPDATED = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", "fp32_groups_flat_partition")


def arguments(spec: Experiment) -> dict[str, Any]:
    """Return what the trainer is told: DeepSpeed's configuration, in which it fills in what is `auto`. States in the
    host's memory are updated by torch's own optimizer, which needs no compiler."""
    stage, offload = int(spec.launch.strategy.removeprefix("zero")), spec.launch.offload
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": "auto"}
    if stage == 3:
        zero |= dict.fromkeys(("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"), "auto")
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    host = {"device": "cpu", "pin_memory": True}
    if offload != "none":
        zero["offload_optimizer"] = host
    if offload == "params":
        zero["offload_param"] = host
    config = {"zero_optimization": zero, "zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
    precision = {name: {"enabled": spec.train.precision == name} for name in ("bf16", "fp16")}
    return {"deepspeed": config | precision | dict.fromkeys(_FILLED_IN, "auto")}


def prepare(made: Any) -> None:
    """Let DeepSpeed sum through gloo on a CPU: its own sums in shared memory would have to be compiled first. Let it
    count the weights that are still gathered as a backward pass ends, before it releases all."""
    from deepspeed import ops
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload as Gathering

    ops.__compatible_ops__["deepspeed_shm_comm"] = False
    release = Gathering.release_backward_leftovers

    def count_and_release(gathering: Any) -> None:
        parameters = (parameter for parameter in gathering.module.parameters() if not parameter.ds_persist)
        gathering.kept = sum(bool(parameter.numel()) for parameter in parameters)
        release(gathering)

    Gathering.release_backward_leftovers = count_and_release


def attach(trainer: Any, spec: Experiment) -> None:
    """Let a layer's activations be made again within the model's backward pass: by one of its own, which TRL asks for
    beside adapters, DeepSpeed would keep all frozen weights gathered until the model's has ended. Let it gather the
    weights of such a layer at once, beside the work of the layer before: one at a time the GPUs wait for Python (of
    other layers DeepSpeed 0.19 lacks them in the backward pass then)."""
    if spec.launch.strategy == "zero3" and trainer.args.gradient_checkpointing:
        from deepspeed.utils import set_z3_leaf_modules

        trainer.args.gradient_checkpointing_kwargs = {"use_reentrant": False}
        set_z3_leaf_modules(trainer.model, list({type(layer) for layer in decoder_layers(trainer.model)}))
        trainer.args.hf_deepspeed_config.config["zero_optimization"] |= _a_layer_ahead(trainer.model)


def _a_layer_ahead(model: Any) -> dict[str, int]:
    """Return settings by which DeepSpeed (partitioned_param_coordinator.py) fetches the next of such layers while one
    computes, and keeps no more of them. By what it takes for itself it fetches nothing ahead beside 10^9 elements that
    are there, which a head, an embedding and a layer of a model of 14B parameters are (TRL's loss gathers the head
    before the layers); keeps layers of as many from one pass to the next; and with them the embedding, since it counts
    the elements between two uses of it as if these layers had none. What is small stays whole, as transformers has
    it."""
    whole = 10 * base_model(model).config.get_text_config().hidden_size
    sizes = [[_elements(parameter) for parameter in layer.parameters()] for layer in decoder_layers(model)]
    layer = max(sum(size for size in each if size > whole) for each in sizes)
    there = _elements(base_model(model).get_output_embeddings().weight) + 2 * layer
    return {"stage3_param_persistence_threshold": whole, "stage3_prefetch_bucket_size": layer,
            "stage3_max_live_parameters": there, "stage3_max_reuse_distance": 0}  # fmt: skip


def verify(trainer: Any, spec: Experiment) -> list[str]:
    """Return what is not dealt to the ranks as the stage asked for has it, read from DeepSpeed's engine."""
    engine, name, ranks = trainer.model_wrapped, spec.launch.strategy, spec.launch.ranks
    if type(engine).__name__ != "DeepSpeedEngine":
        return [f"launch.strategy is {name} and the trainer trains a {type(engine).__name__}"]
    if f"zero{engine.zero_optimization_stage()}" != name or engine.dp_world_size != ranks:
        return [f"launch.strategy is {name} and DeepSpeed runs stage {engine.zero_optimization_stage()} over "
                f"{engine.dp_world_size} ranks"]  # fmt: skip
    facts, share = applied(trainer), 1.05 / ranks  # with what fills the shares up
    sentences = []
    if facts["optimizer_elements_of_rank"] > facts["trained_elements"] * share + 4096:
        sentences.append(f"launch.strategy is {name} and each rank keeps the optimizer's states of all that is trained")
    if name == "zero3" and facts["elements_of_rank"] > facts["elements"] * share + 4096:
        sentences.append("launch.strategy is zero3 and each rank keeps more than its share of the weights")
    if facts["kept"] * 2 > facts["released"] > 0:
        sentences.append(f"launch.strategy is zero3 and of {facts['released']} weights {facts['kept']} stay gathered "
                         f"until the backward pass ends")  # fmt: skip
    return sentences


def applied(trainer: Any) -> dict[str, Any]:
    """Return how many elements there are, are trained, and this rank keeps: of the weights, and of the 32-bit copy
    that the optimizer updates. Between two steps a weight that is dealt to the ranks holds none itself; `kept` of
    them were gathered until the backward pass ended; of `gathered_whole` layers the weights come at once, and as many
    elements as `fetched_ahead` beside the work before (estimates ask for it: `estimate/recorded.py`)."""
    engine = trainer.deepspeed
    if engine is None:  # before training begins
        return {}
    parameters = list(engine.module.parameters())
    updated = next(filter(None, (getattr(engine.optimizer, name, None) for name in _UPDATED)), ())
    return {
        "sharded": sum(hasattr(parameter, "ds_tensor") for parameter in parameters),
        "released": sum(hasattr(parameter, "ds_tensor") and not parameter.numel() for parameter in parameters),
        "kept": getattr(getattr(engine.optimizer, "parameter_offload", None), "kept", 0),
        "gathered_whole": sum(getattr(module, "_z3_leaf", False) for module in engine.module.modules()),
        "fetched_ahead": engine.zero_prefetch_bucket_size() if engine.zero_optimization_stage() == 3 else 0,
        "elements": sum(_elements(parameter) for parameter in parameters),
        "trained_elements": sum(_elements(parameter) for parameter in parameters if parameter.requires_grad),
        "elements_of_rank": sum(getattr(parameter, "ds_tensor", parameter).numel() for parameter in parameters),
        "optimizer_elements_of_rank": sum(each.numel() for each in updated),
    }


def _elements(parameter: Any) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))

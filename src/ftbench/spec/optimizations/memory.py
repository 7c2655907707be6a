"""Declare the optimizations that trade speed for GPU memory, form batches, or process images."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from ftbench.spec.base import Experiment, Int, Optimization, Switch
from ftbench.spec.methods import Qlora


def _gradient_checkpointing(spec: Experiment) -> Iterator[str]:
    setting, strategy = spec.optimizations.gradient_checkpointing, spec.launch.strategy
    key = f"optimizations.gradient_checkpointing {setting}"
    if setting in (True, False):
        return
    if strategy in ("fsdp", "tp+fsdp", "cp") and setting == "offload":
        yield f"{key}: {strategy} keeps the inputs of layers on the GPU: use on, selective or off"
    if spec.objective.name != "sft":
        yield (
            f"{key} with objective {spec.objective.name}: trl switches checkpointing of all layers off and on around "
            "the reference model: use on or off"
        )


def _weight_offload(spec: Experiment) -> Iterator[str]:
    name, method = "optimizations.weight_offload", spec.method
    if method.name == "full" and not spec.optimizations.optimizer_in_backward:
        yield (
            f"{name} with method full updates weights while they are on the GPU: set "
            "optimizations.optimizer_in_backward to on or offload, or use lora or qlora"
        )
    if method.name == "full" and (spec.measure.save_adapter or spec.measure.keep_weights):
        yield f"{name} cannot save a model: set measure.save_adapter and keep_weights to off"
    if method.mxfp4:
        yield f"{name} does not support experts in MXFP4: set it to off"
    if isinstance(method, Qlora) and method.upcast and not method.mxfp4:
        yield f"{name} keeps embedding and head in the dtype they were loaded in: set method.upcast to off"
    if spec.optimizations.gradient_checkpointing not in (True, "offload"):
        yield (
            f"{name} loads a layer's weights again to recompute its activations: set "
            "optimizations.gradient_checkpointing to on or offload"
        )
    if spec.objective.name != "sft":
        yield f"{name} was not tested with objective {spec.objective.name}: set it to off"
    if spec.launch.gpus > 1:
        yield f"{name} is for one GPU: set it to off, or use launch.strategy zero3 with launch.offload params"


def _optimizer_in_backward(spec: Experiment) -> Iterator[str]:
    name, train = "optimizations.optimizer_in_backward", spec.train
    if train.max_grad_norm:
        yield f"{name} cannot clip, because the norm of all gradients is not known yet: set train.max_grad_norm to 0"
    if train.gradient_accumulation_steps > 1:
        yield f"{name} cannot accumulate gradients: set train.gradient_accumulation_steps to 1"
    if train.precision == "fp16":
        yield f"{name} cannot check scaled gradients before the step: set train.precision to bf16 or fp32"
    if spec.objective.name != "sft":
        yield f"{name} supports only objective sft: set it to off"
    if spec.launch.gpus > 1:
        yield f"{name} is for one GPU: set it to off"
    if spec.measure.gradients:
        yield f"{name} keeps no gradients: set measure.gradients to 0"
    if spec.optimizations.optimizer_in_backward == "offload":
        if train.optimizer.startswith("paged"):
            yield f"{name} offload: {train.optimizer} already pages its state: set it to on, or use adamw_bnb_8bit"
        if train.optimizer == "sgd":
            yield f"{name} offload: sgd has no state: set it to on"


OPTIMIZATIONS = {
    "gradient_checkpointing": Optimization(
        type=Switch | Literal["selective", "offload"],
        description="keep only the input of each layer and recompute the rest in the backward pass: less memory, "
        "slower; selective: every second layer; offload: keep the inputs in host memory",
        not_with_dpo=None,
        not_with_unsloth="set method.use_gradient_checkpointing instead",
        incompatibilities=_gradient_checkpointing,
    ),
    "activation_offload": Optimization(
        description="keep the activations for the backward pass in host memory (trl): less device memory, slower",
        not_with_unsloth="use method.use_gradient_checkpointing: unsloth",
        excludes={
            "optimizations.gradient_checkpointing": "optimizations.activation_offload and gradient_checkpointing save "
            "the same memory: choose one"
        },
        needs_gpu=True,
    ),
    "weight_offload": Optimization(
        description="keep base weights in pinned host memory; the weights of a layer are copied to the GPU while the "
        "previous layer computes",
        not_with_unsloth="unsloth manages its weights itself: set it to off",
        excludes={
            "optimizations.fp8": "optimizations.weight_offload copies weights as loaded, and fp8 casts them first: "
            "choose one"
        },
        incompatibilities=_weight_offload,
        needs_gpu=True,
        after=("compile", "fused_lora"),  # it wraps layers that all other optimizations have changed
        ablate_with={True: {"optimizations.gradient_checkpointing": True}},
    ),
    "optimizer_in_backward": Optimization(
        type=Switch | Literal["offload"],
        description="update each parameter as soon as its gradient is complete, then free the gradient; offload: keep "
        "the optimizer state in host memory",
        not_with_unsloth="unsloth trains adapters, whose gradients are small: set it to off",
        excludes={
            "optimizations.cuda_graph": "optimizations.optimizer_in_backward needs a hook per gradient, which a "
            "replayed graph does not call: set it or cuda_graph to off"
        },
        incompatibilities=_optimizer_in_backward,
        not_ablated=(True, "offload"),  # it works only without clipping, as in `recipe: smallest-full`
    ),
    "packing": Optimization(
        description="fill rows of max_length with several samples; each sample attends only to itself; batch_size "
        "counts rows",
        not_with_dpo="the two answers of a pair need separate rows: set it to off",
        excludes={
            "optimizations.padding_free": "optimizations.packing already removes the padding: set padding_free to off",
            "dataset.longest_first": "optimizations.packing fills every row, so dataset.longest_first has no effect: "
            "set it to off",
        },
    ),
    "padding_free": Optimization(
        description="concatenate the samples of a batch in one row instead of padding them",
        not_with_dpo="trl pads pairs (its padding_free is currently switched off): set it to off",
    ),
    "fixed_shape": Optimization(
        description="pad every batch to the longest sample of the dataset: one shape, one compiled graph",
        not_with_dpo="an incomplete batch would be filled with pairs that do not exist: set it to off",
        excludes={
            "optimizations.padding_free": "optimizations.fixed_shape pads and padding_free does not: choose one, or "
            "packing"
        },
        ablate_with={True: {"optimizations.compile": True}},
    ),
    "length_grouping": Optimization(
        description="batch samples of similar length: less padding, a different sample order",
        not_with_dpo=None,
        excludes={
            **dict.fromkeys(
                ("optimizations.packing", "optimizations.fixed_shape"),
                "optimizations.length_grouping has no effect with packing or fixed_shape: choose one",
            ),
            "dataset.longest_first": "optimizations.length_grouping and dataset.longest_first both order the samples: "
            "choose one",
        },
    ),
    "loader_processes": Optimization(
        type=Switch | Annotated[Int, Field(ge=1, le=64)],
        description="prepare batches and images in worker processes; each process prepares two batches in advance; a "
        "number is the number of processes, `on` means 4",
        not_with_dpo=None,
    ),
    "image_cache": Optimization(
        description="process images once before training and keep the results on disk; steps do not wait for images",
        needs_images=True,
    ),
    "image_size": Optimization(
        type=Literal[False] | Annotated[Int, Field(ge=28, le=8192)],
        description="scale images down until the longest side has this many pixels, and do not split larger ones into "
        "tiles: fewer tokens, less detail",
        needs_images=True,
    ),
}

"""Optimizations that fuse, compile or record operations."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from ftbench.spec.base import Experiment
from ftbench.spec.optimizations.declaration import (
    OWN_KERNELS,
    OWN_LOSS,
    ROUNDING,
    Optimization,
    Tolerance,
    or_number,
    or_words,
)


def _cuda_graph(spec: Experiment) -> Iterator[str]:
    name, on, train = "optimizations.cuda_graph", spec.optimizations, spec.train
    if not (on.packing and on.fixed_shape):
        yield f"{name} replays one batch shape in every step: set packing and fixed_shape to on"
    if not on.chunked_loss:
        yield f"{name}: the losses of trl and Liger synchronize with the device: set chunked_loss to on"
    if train.gradient_accumulation_steps > 1:
        yield f"{name} overwrites gradients in each pass: set train.gradient_accumulation_steps to 1"
    if train.precision == "fp16":
        yield f"{name}: train.precision fp16 scales gradients on the host: set it to bf16"
    if spec.launch.ranks > 1:
        yield f"{name} records one GPU: set launch.gpus to 1, or {name} to off"
    if spec.dataset.has_images:
        yield f"{name}: images change the batch shape: set it to off"


def _fused_lora(spec: Experiment) -> Iterator[str]:
    method: Any = spec.method
    name, strategy = "optimizations.fused_lora", spec.launch.strategy
    if not method.adapters:
        yield f"{name} needs adapters and method {method.name} has none: use lora or qlora"
    if not method.adapters or method.name == "unsloth":
        return
    if method.dropout:
        yield f"{name} reads one input for all adapters, and dropout gives each its own: set method.dropout to 0"
    if method.bias != "none":
        yield f"{name} does not train biases: set method.bias to none"
    if spec.launch.sharded:
        yield f"{name} needs unsharded weight matrices, and {strategy} shards them: set it to off, or use ddp"
    if spec.objective.name == "dpo" and spec.objective.in_step:
        yield (
            f"{name} overwrites its adapter buffers in the forward pass of the reference model: set "
            "objective.precompute_ref_log_probs to on"
        )
    if spec.train.precision == "fp16":
        yield f"{name} supports train.precision bf16 or fp32: set one of them"


OPTIMIZATIONS = {
    "chunked_loss": Optimization(
        type=Annotated[bool | int, or_number("the label tokens per chunk", 16, 1 << 20)],
        description="compute the loss and its gradient in chunks of label tokens, without trl's metrics and "
        "synchronizations; a number sets the tokens per chunk (on: 2048), fewer need less memory",
        verified="the model's forward method is replaced by ours",
        tolerance=Tolerance(ROUNDING),
        not_with_dpo="it computes only the sft loss: set it to off",
        not_with_unsloth=OWN_LOSS,
    ),
    "liger": Optimization(
        description="Liger's Triton kernels: norms, rotary embedding, SwiGLU, fused loss",
        verified="modules with a Liger function are counted",
        tolerance=Tolerance(ROUNDING),
        not_with_dpo="it computes only the sft loss: set it to off",
        not_with_unsloth=OWN_KERNELS,
        needs_gpu=True,
        after=("chunked_loss",),  # if chunked_loss is on, Liger does not replace the loss
    ),
    "compile": Optimization(
        type=Annotated[bool | Literal["dynamic", "lean"], or_words("dynamic", "lean")],
        description="torch.compile each decoder layer and the vision encoder: faster steps, a slow start, and a new "
        "compilation for each new shape; dynamic: compile once for all lengths; lean: recompute norms and MLP "
        "activations in the backward pass instead of keeping them",
        verified="every layer is compiled, and compiled graphs were counted",
        tolerance=Tolerance(ROUNDING),
        not_with_dpo=None,
        not_with_unsloth="unsloth compiles its own code: set it to off",
        after=("liger",),  # compile the layer that Liger has changed
        not_ablated=("lean",),  # saves memory and is not faster
    ),
    "fused_lora": Optimization(
        description="compute the adapters' products together with the base product, for all layers that share an "
        "input: fewer passes over the activations",
        verified="every layer with an adapter uses the fused product",
        tolerance=Tolerance(ROUNDING),
        not_with_dpo=None,
        not_with_unsloth="unsloth fuses adapters itself: set it to off",
        incompatibilities=_fused_lora,
        after=("fp8",),  # the type of the base layer decides how its adapters are multiplied
        ablate_with={True: {"optimizations.compile": True}},
    ),
    "cuda_graph": Optimization(
        description="record forward and backward pass as one CUDA graph and replay it in every step: no Python and no "
        "kernel launches, which limit small models and batches; the optimizer step stays outside",
        verified="the first step was a replay; a batch of another shape ends the run",
        tolerance=Tolerance(ROUNDING),
        not_with_unsloth="unsloth's functions synchronize with the device: set it to off",
        excludes={
            "optimizations.gradient_checkpointing": "optimizations.cuda_graph: gradient_checkpointing reads the state "
            "of the random number generator from the device, which a graph cannot: set one to off",
            "optimizations.activation_offload": "optimizations.cuda_graph: activation_offload needs the host in each "
            "step: set one to off",
        },
        incompatibilities=_cuda_graph,
        needs_gpu=True,
        after=("compile", "fused_lora"),
        not_ablated=(True,),  # needs several others; `recipe: fastest-small` has them all
    ),
}

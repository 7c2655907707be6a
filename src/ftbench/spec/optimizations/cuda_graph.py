"""Forward and backward pass as one CUDA graph."""

from collections.abc import Iterator

from ftbench.spec.base import Experiment
from ftbench.spec.optimizations.declaration import ROUNDING, Optimization, Tolerance


def _refusals(spec: Experiment) -> Iterator[str]:
    """Yield what a graph cannot hold: another shape, a wait for the device, gradients that add up."""
    name, on, train = "optimizations.cuda_graph", spec.optimizations, spec.train
    if not (on.packing and on.fixed_shape):
        yield f"{name} replays one shape in every step: set packing and fixed_shape to on"
    if not on.chunked_loss:
        yield f"{name}: the losses of trl and Liger wait for the device, which a graph cannot: set chunked_loss to on"
    if train.gradient_accumulation_steps > 1:
        yield f"{name} writes gradients anew in each pass: set train.gradient_accumulation_steps to 1"
    if train.precision == "fp16":
        yield f"{name}: train.precision fp16 scales gradients by what the host reads: set it to bf16"
    if spec.launch.ranks > 1:
        yield f"{name} records one GPU's work: set launch.gpus to 1, or {name} to off"
    if spec.dataset.has_images:
        yield f"{name}: images give each batch another shape: set it to off"


OPTIMIZATION = Optimization(
    description="record forward and backward pass once and replay them in every step as one CUDA graph: no Python and "
    "no launches between kernels, which small models and batches wait for; the optimizer's step stays outside",
    verified="the first step was a replay; a batch of another shape ends the run",
    tolerance=Tolerance(ROUNDING),
    unsloth="its functions read the device from the host: leave it off",
    excludes={
        "optimizations.gradient_checkpointing": "optimizations.cuda_graph: gradient_checkpointing reads the state of "
        "the random numbers from the device, which a graph cannot: set one to off",
        "optimizations.activation_offload": "optimizations.cuda_graph: activation_offload moves tensors by the host: "
        "set one to off",
    },
    refusals=_refusals,
    needs_gpu=True,
    after=("compile", "fused_lora"),
    not_ablated=(True,),  # it needs several others beside it: `recipe: fastest-small` has them all
)

"""The optimizer's step within the backward pass."""

from collections.abc import Iterator
from typing import Annotated, Literal

from ftbench.spec.base import Experiment
from ftbench.spec.optimizations.declaration import EXACT, Optimization, Tolerance, offload_needs_gpu, or_words


def _refusals(spec: Experiment) -> Iterator[str]:
    name, train = "optimizations.optimizer_in_backward", spec.train
    if train.max_grad_norm:
        yield f"{name} steps before the norm of all gradients is known, so it clips none: set train.max_grad_norm to 0"
    if train.gradient_accumulation_steps > 1:
        yield f"{name} keeps no gradient to add the next one to: set train.gradient_accumulation_steps to 1"
    if train.precision == "fp16":
        yield f"{name} steps before scaled gradients are checked: set train.precision to bf16 or fp32"
    if spec.objective.name != "sft":
        yield f"{name} is made for the trainer of objective sft: set it to off"
    if spec.launch.gpus > 1:
        yield f"{name} is for one GPU: set it to off"
    if spec.measure.gradients or spec.measure.control == "reversed_gradient":
        yield f"{name} leaves no gradient to look at: set measure.gradients to 0 and measure.control to off"
    if spec.optimizations.optimizer_in_backward == "offload":
        if train.optimizer.startswith("paged"):
            yield f"{name} offload: {train.optimizer} moves its states itself: set it to on, or take adamw_bnb_8bit"
        if train.optimizer == "sgd":
            yield f"{name} offload: sgd keeps no states: set it to on"


OPTIMIZATION = Optimization(
    type=Annotated[bool | Literal["offload"], or_words("offload")],
    description="step each parameter as soon as its gradient is whole, and free that at once: no two layers' gradients "
    "are there together; offload keeps the optimizer's states in host memory",
    verified="every parameter was stepped while the backward pass ran, and few gradients were there at once",
    tolerance=Tolerance(EXACT),
    unsloth="it trains adapters, whose gradients are small: leave it off",
    excludes={
        "optimizations.cuda_graph": "optimizations.optimizer_in_backward steps as gradients come, which a replayed "
        "graph does not tell: set it or cuda_graph to off"
    },
    refusals=_refusals,
    refusals_on=offload_needs_gpu("optimizer_in_backward"),
    not_ablated=(True, "offload"),  # it needs a recipe that does not clip: `recipe: smallest-full` has one
)

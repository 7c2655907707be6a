"""Frozen weights in host memory, copied to the GPU for their layer's turn."""

from collections.abc import Iterator

from ftbench.spec.base import Experiment
from ftbench.spec.methods import Qlora
from ftbench.spec.optimizations.declaration import EXACT, Optimization, Tolerance


def _refusals(spec: Experiment) -> Iterator[str]:
    name, method = "optimizations.weight_offload", spec.method
    if method.name == "full":
        yield f"{name} keeps weights in host memory that nobody trains, and method full trains all: use lora or qlora"
    if method.mxfp4:
        yield f"{name} does not know experts in MXFP4: set it to off"
    if isinstance(method, Qlora) and method.upcast and not method.mxfp4:
        yield f"{name} leaves embedding and head in host memory as they were loaded: set method.upcast to off"
    if spec.optimizations.gradient_checkpointing not in (True, "offload"):
        yield (
            f"{name} has a layer's weights there while its activations are made again: set "
            "optimizations.gradient_checkpointing to on or offload"
        )
    if spec.objective.name != "sft":
        yield f"{name} was not tried with objective {spec.objective.name}: set it to off"
    if spec.launch.gpus > 1:
        yield f"{name} is for one GPU: set it to off, or launch.strategy to zero3 with launch.offload params"


OPTIMIZATION = Optimization(
    description="keep frozen weights in pinned host memory: a layer's are copied to the GPU while the one before it "
    "computes, the rows of the embedding that a batch needs are read, and with chunked_loss the head is copied for the "
    "loss",
    verified="the layers' matrices share two buffers on the GPU, and every layer had its turn forward and backward",
    tolerance=Tolerance(EXACT),
    unsloth="it holds its weights itself: leave it off",
    excludes={
        "optimizations.fp8": "optimizations.weight_offload copies weights as they are loaded, and fp8 casts them "
        "before: choose one"
    },
    refusals=_refusals,
    needs_gpu=True,
    after=("compile", "fused_lora"),  # around a layer as all others made it
    beside={True: {"optimizations.gradient_checkpointing": True}},
)

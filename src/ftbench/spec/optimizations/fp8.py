"""Matrix products in 8-bit floats."""

from collections.abc import Iterator
from typing import Annotated, Literal

from ftbench.core.hardware import supports_fp8
from ftbench.errors import SpecError
from ftbench.spec.base import Experiment, Word
from ftbench.spec.optimizations.declaration import COARSE, OWN_LOSS, Capability, Optimization, Tolerance

DELAYED = "tensorwise-delayed"
COMPILED = ("tensorwise", "tensorwise-fast", DELAYED, "rowwise")
TRANSFORMER_ENGINE = ("te-current", "te-delayed", "te-mxfp8")
BLACKWELL = (10, 0)


def in_8_bits(setting: str) -> bool:
    """Return whether an estimate counts products in 8 bits. Raise SpecError for Transformer Engine's settings."""
    if setting in TRANSFORMER_ENGINE:
        raise SpecError(f"optimizations.fp8 {setting} cannot be estimated before it runs: estimate with tensorwise")
    return setting != "off"


def _fp8(spec: Experiment) -> Iterator[str]:
    if spec.method.quantised:
        yield f"optimizations.fp8 needs 16-bit base weights and method {spec.method.name} stores 4-bit ones: use lora"
    if spec.method.name == "full":
        yield "optimizations.fp8 converts frozen base layers and method full has none: use lora"
    if spec.train.precision not in ("auto", "bf16"):
        yield f"optimizations.fp8 needs train.precision bf16, not {spec.train.precision}"
    if spec.optimizations.fp8 == "te-delayed" and spec.optimizations.gradient_checkpointing:
        yield (
            "optimizations.fp8 te-delayed scales by earlier products, and gradient_checkpointing computes them twice: "
            "use te-current"
        )
    if spec.launch.sharded:
        strategy = spec.launch.strategy
        yield f"optimizations.fp8 needs unsharded matrices, and {strategy} shards them: set it to off, or use ddp"


def _fp8_on_machine(spec: Experiment, capability: Capability) -> Iterator[str]:
    if capability is None or not supports_fp8(capability):
        have = "this machine has no GPU" if capability is None else f"this GPU has {capability[0]}.{capability[1]}"
        yield f"optimizations.fp8 needs a GPU of compute capability 8.9 or higher and {have}: set it to off"
    elif spec.optimizations.fp8 == "te-mxfp8" and capability < BLACKWELL:
        yield "optimizations.fp8 te-mxfp8 needs compute capability 10.0 or higher: use te-current"


def _fp8_head(spec: Experiment) -> Iterator[str]:
    on = spec.optimizations
    if on.fp8 == "off" or not on.chunked_loss:
        yield "optimizations.fp8_head needs fp8 and chunked_loss: set both, or set it to off"
    if on.weight_offload:
        yield "optimizations.fp8_head keeps a copy of the head on the GPU, and weight_offload does not: set it to off"


OPTIMIZATIONS = {
    "fp8": Optimization(
        type=Annotated[Literal["off", *COMPILED, *TRANSFORMER_ENGINE], Word],
        default="off",
        description="multiply with the frozen base layers in 8-bit floats: faster if compiled; tensorwise-fast also "
        "accumulates the backward pass in fewer bits; tensorwise-delayed is tensorwise-fast with scales from the "
        "previous step; te-current, te-delayed and te-mxfp8 are Transformer Engine's scalings; tensorwise-fast and the "
        "te- values are not tested on a GPU yet",
        verified="no suitable frozen layer still multiplies in 16 bits",
        tolerance=Tolerance(COARSE),
        not_with_unsloth="unsloth's fused functions multiply in 16 bits: set it to off, or use method lora",
        incompatibilities=_fp8,
        machine_incompatibilities=_fp8_on_machine,
        after=("liger",),  # Liger finds layers by their class
        ablate_with={name: {"optimizations.compile": True} for name in COMPILED},
        not_ablated=(DELAYED, *TRANSFORMER_ENGINE),
    ),
    "fp8_head": Optimization(
        description="compute the gradient of the loss in 8-bit floats, with an 8-bit copy of the frozen output head; "
        "logits and loss do not change; not tested on a GPU yet",
        verified="the head is frozen and has an 8-bit copy",
        tolerance=Tolerance(COARSE),
        not_with_unsloth=OWN_LOSS,
        incompatibilities=_fp8_head,
        not_ablated=(True,),  # needs two others, and no shipped recipe has it
    ),
}

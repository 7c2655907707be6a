"""Products with the frozen layers in 8-bit floats."""

from collections.abc import Iterator
from typing import Annotated, Literal

from ftbench.core.hardware import supports_fp8
from ftbench.errors import SpecError
from ftbench.spec.base import Experiment, Word
from ftbench.spec.optimizations.declaration import COARSE, Capability, Optimization, Tolerance

DELAYED = "tensorwise-delayed"
TRANSFORMER_ENGINE = ("te-current", "te-delayed", "te-mxfp8")
BLACKWELL = (10, 0)


def _refusals(spec: Experiment) -> Iterator[str]:
    if spec.method.quantised:
        yield f"optimizations.fp8 needs 16-bit base weights and method {spec.method.name} stores 4-bit ones: use lora"
    if spec.method.name == "full":
        yield "optimizations.fp8 converts frozen base layers and method full has none: use lora"
    if spec.train.precision not in ("auto", "bf16"):
        yield f"optimizations.fp8 goes with train.precision bf16, not {spec.train.precision}"
    if spec.optimizations.fp8 == "te-delayed" and spec.optimizations.gradient_checkpointing:
        yield (
            "optimizations.fp8 te-delayed scales by the products before, and gradient_checkpointing makes them twice: "
            "use te-current"
        )
    if spec.launch.sharded:
        yield (
            f"optimizations.fp8 keeps whole matrices in 8 bits on each GPU, which {spec.launch.strategy} would spread: "
            "set it to off, or use ddp"
        )


def _refusals_on(spec: Experiment, capability: Capability) -> Iterator[str]:
    if capability is None or not supports_fp8(capability):
        have = "this machine has no GPU" if capability is None else f"this GPU has {capability[0]}.{capability[1]}"
        yield f"optimizations.fp8 needs a GPU of compute capability 8.9 or higher and {have}: set it to off"
    elif spec.optimizations.fp8 == "te-mxfp8" and capability < BLACKWELL:
        yield "optimizations.fp8 te-mxfp8 needs compute capability 10.0 or higher: use te-current"


def in_8_bits(setting: str) -> bool:
    """Return whether products are in 8 bits, as estimates know them. Raises SpecError for Transformer Engine's."""
    if setting in TRANSFORMER_ENGINE:
        raise SpecError(f"what optimizations.fp8 {setting} takes is not known before it runs: estimate with tensorwise")
    return setting != "off"


OPTIMIZATION = Optimization(
    type=Annotated[
        Literal[
            "off",
            "tensorwise",
            "tensorwise-fast",
            "tensorwise-delayed",
            "rowwise",
            "te-current",
            "te-delayed",
            "te-mxfp8",
        ],
        Word,
    ],
    default="off",
    description="products with the frozen base layers in 8-bit floats cast once: faster where compiled; "
    "tensorwise-fast adds up in fewer bits in the backward pass, too, tensorwise-delayed is that with each cast scaled "
    "by the step before; te-current, te-delayed and te-mxfp8 are Transformer Engine's scalings; tensorwise-fast and "
    "these three were not tried on a GPU so far",
    verified="no frozen layer that fits still multiplies in 16 bits",
    tolerance=Tolerance(COARSE),
    unsloth="its fused functions multiply in 16 bits: leave it off, or use method lora",
    refusals=_refusals,
    refusals_on=_refusals_on,
    after=("liger",),  # which knows layers by their class
    beside={name: {"optimizations.compile": True} for name in ("tensorwise", "tensorwise-fast", DELAYED, "rowwise")},
    not_ablated=(DELAYED, *TRANSFORMER_ENGINE),
)

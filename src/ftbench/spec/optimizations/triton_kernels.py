"""Our own Triton kernels between the products."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ftbench.spec.methods import family
from ftbench.spec.optimizations.declaration import ROUNDING, Capability, Optimization, Tolerance, or_words
from ftbench.spec.optimizations.fp8 import DELAYED

if TYPE_CHECKING:
    from ftbench.spec.experiment import Experiment

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")  # whose layers' code the kernels were written after
MEASURED = (9, 0)  # compute capability of the GPUs on which they were found faster


def left_out(spec: Experiment, capability: Capability) -> str | None:
    """Return why `auto` is off here, in a sentence; None where it is on, or not asked for."""
    if spec.optimizations.triton_kernels != "auto":
        return None
    why = [reason.partition(": ")[0] for reason in _refusals(spec)]
    if capability != MEASURED:
        why.append(f"the kernels were measured on GPUs of compute capability {'.'.join(map(str, MEASURED))} alone")
    if spec.optimizations.liger or spec.method.name == "unsloth":
        why.append("liger and unsloth have kernels of their own")
    if (kind := family(spec.model)) not in FAMILIES:
        why.append(f"they know no layers of {kind or spec.model.id}")
    return f"optimizations.triton_kernels auto is off: {'; '.join(why)}" if why else None


def ends(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what `auto` may make of the values of `optimizations:`, on or off: where the kernels are left out, so is
    the cast of theirs."""
    if values.get("triton_kernels") != "auto":
        return [dict(values)]
    fp8 = "tensorwise" if values["fp8"] == DELAYED else values["fp8"]
    return [{**values, "triton_kernels": True}, {**values, "triton_kernels": False, "fp8": fp8}]


def decided(spec: Experiment, capability: Capability) -> dict[str, Any]:
    """Return the changes that `auto` makes on a machine of this compute capability."""
    if spec.optimizations.triton_kernels != "auto":
        return {}
    on, off = ends({name: getattr(spec.optimizations, name) for name in ("triton_kernels", "fp8")})
    return on if left_out(spec, capability) is None else off


def _refusals(spec: Experiment) -> Iterator[str]:
    name = "optimizations.triton_kernels"
    if not spec.method.adapters:
        yield f"{name} takes norms for frozen and method {spec.method.name} trains them: use lora or qlora"
    if spec.launch.strategy not in ("none", "ddp"):
        yield f"{name} was not tried with launch.strategy {spec.launch.strategy}: set it to off, or use ddp"


OPTIMIZATION = Optimization(
    type=Annotated[bool | Literal["auto"], or_words("auto")],
    description="our own kernels for norms with the sums before them, for heads with their norms and rotation, and for "
    "the gradient of the MLP's gate, which write what a product of fused_lora reads; auto is on for models that they "
    "know, on GPUs that they were measured on, and else off, with fp8 tensorwise for tensorwise-delayed",
    verified="every layer of the decoder computes by them",
    tolerance=Tolerance(ROUNDING),
    unsloth="it has kernels of its own: leave it off",
    excludes={"optimizations.liger": "optimizations.triton_kernels takes the place of liger's: set one of them to off"},
    refusals=_refusals,
    needs_gpu=True,
    after=("fused_lora", "liger"),  # whose products its buffers are for
    beside={True: {"optimizations.compile": True, "optimizations.fused_lora": True}},
)

"""Our own Triton kernels, and what `auto` decides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ftbench.spec.methods import family
from ftbench.spec.optimizations.declaration import OWN_KERNELS, ROUNDING, Capability, Optimization, Tolerance, or_words
from ftbench.spec.optimizations.fp8 import DELAYED

if TYPE_CHECKING:
    from ftbench.spec.experiment import Experiment

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")  # families whose layers the kernels implement
MEASURED = (9, 0)  # compute capability of the GPUs where they were measured to be faster


def left_out(spec: Experiment, capability: Capability) -> str | None:
    """Return why `auto` is off; None if it is on, or if the setting is not auto."""
    if spec.optimizations.triton_kernels != "auto":
        return None
    why = [reason.partition(": ")[0] for reason in _incompatibilities(spec)]
    if capability != MEASURED:
        why.append(f"the kernels were measured only on compute capability {'.'.join(map(str, MEASURED))}")
    if spec.optimizations.liger or spec.method.name == "unsloth":
        why.append("liger and unsloth have their own kernels")
    if (kind := family(spec.model)) not in FAMILIES:
        why.append(f"they do not support the layers of {kind or spec.model.id}")
    return f"optimizations.triton_kernels auto is off: {'; '.join(why)}" if why else None


def ends(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the two possible results of `auto`, on and off. Without the kernels there is no delayed fp8 scaling."""
    if values.get("triton_kernels") != "auto":
        return [dict(values)]
    fp8 = "tensorwise" if values["fp8"] == DELAYED else values["fp8"]
    return [{**values, "triton_kernels": True}, {**values, "triton_kernels": False, "fp8": fp8}]


def decided(spec: Experiment, capability: Capability) -> dict[str, Any]:
    """Return the changes of `auto` on a machine with this compute capability."""
    if spec.optimizations.triton_kernels != "auto":
        return {}
    on, off = ends({name: getattr(spec.optimizations, name) for name in ("triton_kernels", "fp8")})
    return on if left_out(spec, capability) is None else off


def _incompatibilities(spec: Experiment) -> Iterator[str]:
    name = "optimizations.triton_kernels"
    if not spec.method.adapters:
        yield f"{name} needs frozen norms, and method {spec.method.name} trains them: use lora or qlora"
    if spec.launch.strategy not in ("none", "ddp"):
        yield f"{name} was not tested with launch.strategy {spec.launch.strategy}: set it to off, or use ddp"


OPTIMIZATIONS = {
    "triton_kernels": Optimization(
        type=Annotated[bool | Literal["auto"], or_words("auto")],
        description="our own kernels for norms with the sums before them, for heads with their norms and rotary "
        "embedding, and for the gradient of the MLP's gate; auto: on for supported models on GPUs where they were "
        "measured to be faster, else off with fp8 tensorwise instead of tensorwise-delayed",
        verified="every decoder layer uses them",
        tolerance=Tolerance(ROUNDING),
        not_with_unsloth=OWN_KERNELS,
        excludes={"optimizations.liger": "optimizations.triton_kernels and liger replace the same code: choose one"},
        incompatibilities=_incompatibilities,
        needs_gpu=True,
        after=("fused_lora", "liger"),  # it writes into the buffers of fused_lora
        ablate_with={True: {"optimizations.compile": True, "optimizations.fused_lora": True}},
    )
}

"""Decide every `auto` of a spec for a machine, with the reason, and check that a recipe keeps its published kernels."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ftbench.errors import MissingError
from ftbench.spec.base import Part
from ftbench.spec.optimizations import triton_kernels
from ftbench.spec.optimizations.declaration import Capability

if TYPE_CHECKING:
    from ftbench.spec.experiment import Experiment

KERNELS = "optimizations.triton_kernels"


def resolve(spec: Experiment, capability: Capability) -> Experiment:
    """Return the spec with every `auto` that depends on the machine decided; None is a machine without a GPU."""
    changes = decisions(spec, capability)
    if not changes:
        return spec
    sections: dict[str, Part] = {}
    for key, (value, _) in changes.items():
        section, name = key.split(".")
        sections[section] = _with(sections.get(section, getattr(spec, section)), name, value)
    decided = spec.model_copy(update=sections)
    made = {key: {"value": value, "reason": reason} for key, (value, reason) in changes.items()}
    decided.__dict__["_resolved"] = {**spec.resolved, **made}  # like a cached property: equality ignores it
    return decided


@lru_cache(maxsize=1 << 14)  # the cells of a sweep share most of their sections
def _with(section: Part, key: str, value: object) -> Part:
    return section.model_copy(update={key: value})


def decisions(spec: Experiment, capability: Capability) -> dict[str, tuple[Any, str]]:
    """Return dotted key → value and reason for each setting that depends on the machine.

    bfloat16 products need compute capability 8.0 to be fast. A CPU without instructions for bfloat16 computes it many
    times slower than float32."""
    half = capability is not None and capability >= (8, 0)
    if capability is None:
        where = "no GPU on this machine"
    else:
        where = f"compute capability {'.'.join(map(str, capability))} is {'at least' if half else 'below'} 8.0"
    dtype = "bfloat16" if half else "float32"
    made: dict[str, tuple[Any, str]] = {}
    if spec.model.dtype == "auto":
        made["model.dtype"] = dtype, where
    if spec.train.precision == "auto":
        made["train.precision"] = "bf16" if half else "fp32", where
    if getattr(spec.method, "compute_dtype", None) == "auto":
        made["method.compute_dtype"] = dtype, where
    why = triton_kernels.left_out(spec, capability)
    why = why.partition("is off: ")[2] if why else "the model family and the GPU are supported"
    for name, value in triton_kernels.decided(spec, capability).items():
        if value != getattr(spec.optimizations, name):
            made[f"optimizations.{name}"] = value, why
    return made


def require_published(spec: Experiment, capability: Capability) -> None:
    """Raise MissingError for a spec whose recipe leaves its kernels to `auto` if this machine turns them off: the
    recipe's published speed and verdict do not hold without them. A spec that sets the key itself passes."""
    if why := triton_kernels.left_out(spec, capability):
        reason = why.partition("is off: ")[2]
        raise MissingError(
            f"{spec.name}: the recipe is published with {KERNELS} on, and here it is off: {reason}. To run the recipe "
            f"without the kernels, set {KERNELS}=off"
        )

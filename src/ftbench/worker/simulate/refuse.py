"""What cannot run without a GPU, not even in appearance: a sentence each."""

from __future__ import annotations

from ftbench.errors import SpecError
from ftbench.spec.experiment import Experiment


def refuse(spec: Experiment) -> None:
    """Raises SpecError for a spec whose own kernels torch cannot trace."""
    on = spec.optimizations
    found = []
    if spec.method.name == "unsloth":
        found.append("method unsloth: its kernels are Triton's and its import asks for a GPU")
    if on.liger:
        found.append("optimizations.liger: its kernels are Triton's")
    if on.attention in ("flash_attention_2", "flash_attention_3", "flex_attention"):
        found.append(f"optimizations.attention {on.attention}: its kernel is no operation of torch's own")
    if on.activation_offload:
        found.append("optimizations.activation_offload: it moves tensors by streams that only a GPU has")
    if found:
        raise SpecError(*(f"{one}, which a simulation cannot trace: leave it out, or estimate without --simulate" for one in found))

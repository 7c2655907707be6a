"""What cannot be simulated: a sentence each. Silence would be a figure of another run: torch runs a compiled layer as
it is where tensors are fake."""

from __future__ import annotations

from ftbench.errors import SpecError
from ftbench.spec.experiment import Experiment


def refuse(spec: Experiment) -> None:
    """Raises SpecError for a spec that a simulation would get wrong."""
    on = spec.optimizations
    found = []
    if spec.method.name == "unsloth":
        found.append("method unsloth: its kernels are Triton's and its import asks for a GPU")
    if on.liger:
        found.append("optimizations.liger: its kernels are Triton's")
    if on.compile:
        found.append("optimizations.compile: the compiler chooses what is kept for the backward pass")
    if spec.train.optimizer.startswith("paged"):
        found.append("train.optimizer paged: bitsandbytes takes its state from the driver, past torch's allocator")
    if on.fp8 != "off":
        found.append("optimizations.fp8: it is made for compiled layers")
    if on.attention in ("flash_attention_2", "flash_attention_3", "flex_attention"):
        found.append(f"optimizations.attention {on.attention}: its kernel is no operation of torch's own")
    if on.gradient_checkpointing == "offload":
        found.append("optimizations.gradient_checkpointing offload: it moves tensors by streams that only a GPU has")
    if spec.method.mxfp4:
        found.append("method.quant_type mxfp4: its experts are made in the memory of a GPU")
    if on.activation_offload:
        found.append("optimizations.activation_offload: it moves tensors by streams that only a GPU has")
    if found:
        way_out = "which a simulation does not follow: leave it out, or estimate without --simulate"
        raise SpecError(*(f"{one}, {way_out}" for one in found))

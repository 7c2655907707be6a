"""What cannot be simulated: a sentence each. Silence would be a figure of another run: torch runs a compiled layer as
it is where tensors are fake."""

from __future__ import annotations

from ftbench.errors import SpecError
from ftbench.families import FAMILIES
from ftbench.spec.experiment import Experiment

OTHERWISE = f"estimate without --simulate, which knows {', '.join(FAMILIES)}"


def refuse(spec: Experiment) -> None:
    """Raises SpecError for a spec that a simulation would get wrong."""
    on = spec.optimizations
    found = []
    if spec.method.name == "unsloth":
        found.append(("method unsloth: its kernels are Triton's and its import asks for a GPU", "method=lora"))
    if on.liger:
        found.append(("optimizations.liger: its kernels are Triton's", "optimizations.liger=off"))
    if on.compile:
        why = "the compiler chooses what is kept for the backward pass"
        found.append((f"optimizations.compile: {why}", "optimizations.compile=off"))
    if spec.train.optimizer.startswith("paged"):
        why = "bitsandbytes takes its state from the driver, past torch's allocator"
        found.append((f"train.optimizer {spec.train.optimizer}: {why}", "train.optimizer=adamw_bnb_8bit"))
    if on.fp8 != "off":
        found.append(("optimizations.fp8: it is made for compiled layers", "optimizations.fp8=off"))
    if on.attention in ("flash_attention_2", "flash_attention_3", "flex_attention"):
        why = f"optimizations.attention {on.attention}: its kernel is no operation of torch's own"
        flat = on.packing or on.padding_free
        found.append((why, f"optimizations.attention={'varlen' if flat else 'auto'}"))
    if on.gradient_checkpointing == "offload":
        why = "optimizations.gradient_checkpointing offload: it moves tensors by streams that only a GPU has"
        found.append((why, "optimizations.gradient_checkpointing=on"))
    if spec.method.mxfp4:
        why = "method.quant_type mxfp4: its experts are made in the memory of a GPU"
        found.append((why, "method=lora"))
    if on.activation_offload:
        why = "optimizations.activation_offload: it moves tensors by streams that only a GPU has"
        found.append((why, "optimizations.activation_offload=off"))
    if found:
        raise SpecError(
            *(f"{why}, which a simulation does not follow: --set {change}, or {OTHERWISE}" for why, change in found)
        )

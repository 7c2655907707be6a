"""The attention implementation."""

from collections.abc import Iterator
from typing import Literal

from ftbench.spec.base import Experiment
from ftbench.spec.methods import GPT_OSS, family
from ftbench.spec.optimizations.declaration import ROUNDING, Capability, Optimization, Tolerance

_FLASH = ("flash_attention_2", "flash_attention_3", "flex_attention")


def _incompatibilities(spec: Experiment) -> Iterator[str]:
    kernel, precision = spec.optimizations.attention, spec.train.precision
    name = f"optimizations.attention {kernel}"
    if family(spec.model) == GPT_OSS and kernel in ("sdpa", "cudnn"):
        yield f"{name} does not support the attention sinks of gpt-oss: use auto, or varlen with packing"
    if kernel == "varlen" and not _unpadded(spec):
        yield f"{name} needs rows without padding: set packing or padding_free to on, or use attention sdpa"
    if kernel == "varlen" and precision == "fp32":
        yield f"{name} computes in 16 bits: set train.precision to bf16"
    if (objective := spec.objective.name) != "sft" and kernel not in ("auto", "eager", "sdpa"):
        yield f"{name} with objective {objective}: only eager and sdpa are tested: use one of them"
    if kernel == "cudnn" and precision == "fp32":
        yield f"{name} computes in 16 bits: set train.precision to bf16, or use attention sdpa"


def _unpadded(spec: Experiment) -> bool:
    return bool(spec.optimizations.packing or spec.optimizations.padding_free)


def _machine_incompatibilities(spec: Experiment, capability: Capability) -> Iterator[str]:
    kernel = spec.optimizations.attention
    if kernel in (*_FLASH, "varlen", "cudnn") and capability is None:
        yield f"optimizations.attention {kernel} needs a GPU: set it to sdpa"
    elif capability is not None and kernel in ("flash_attention_2", "cudnn") and capability < (8, 0):
        yield f"optimizations.attention {kernel} needs compute capability 8.0: set it to sdpa"
    elif capability is not None and kernel == "flash_attention_3" and capability != (9, 0):
        yield "optimizations.attention flash_attention_3 is for Hopper GPUs (9.0): set it to sdpa or flash_attention_2"


OPTIMIZATIONS = {
    "attention": Optimization(
        type=Literal[
            "auto", "eager", "sdpa", "cudnn", "varlen", "flash_attention_2", "flash_attention_3", "flex_attention"
        ],
        default="auto",
        description="attention implementation; auto: the library's choice for the model; cudnn: sdpa with cuDNN's "
        "kernels; varlen: torch's kernel for rows without padding",
        verified="the model's own setting is read",
        tolerance=Tolerance(ROUNDING),
        not_with_dpo=None,
        not_with_unsloth="unsloth chooses the attention itself: set it to auto",
        incompatibilities=_incompatibilities,
        machine_incompatibilities=_machine_incompatibilities,
        ablate_with={"varlen": {"optimizations.padding_free": True}},
        not_ablated=("sdpa", "eager"),  # auto already takes sdpa; eager keeps all attention scores in memory
    )
}

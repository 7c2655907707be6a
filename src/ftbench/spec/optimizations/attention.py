"""The attention implementation."""

from collections.abc import Iterator
from typing import Literal

from ftbench.spec.base import Experiment
from ftbench.spec.methods import GPT_OSS, family
from ftbench.spec.optimizations.declaration import ROUNDING, Capability, Optimization, Tolerance

_FLASH = ("flash_attention_2", "flash_attention_3", "flex_attention")


def _refusals(spec: Experiment) -> Iterator[str]:
    kernel, precision = spec.optimizations.attention, spec.train.precision
    if family(spec.model) == GPT_OSS and kernel in ("sdpa", "cudnn"):
        yield (
            f"optimizations.attention {kernel} does not compute the attention sinks of gpt-oss: leave it auto, or take "
            "varlen with packing"
        )
    if kernel == "varlen" and not _flat(spec):
        yield (
            "optimizations.attention varlen is for rows without padding: set packing or padding_free, or attention sdpa"
        )
    if kernel == "varlen" and precision == "fp32":
        yield "optimizations.attention varlen computes in 16 bits: set train.precision to bf16"
    if (objective := spec.objective.name) != "sft" and kernel not in ("auto", "eager", "sdpa"):
        yield f"optimizations.attention {kernel} with objective {objective}: only eager and sdpa were tried so far"
    if kernel == "cudnn" and precision == "fp32":
        yield "optimizations.attention cudnn computes in 16 bits: set train.precision to bf16, or attention sdpa"


def _flat(spec: Experiment) -> bool:
    return bool(spec.optimizations.packing or spec.optimizations.padding_free)


def _refusals_on(spec: Experiment, capability: Capability) -> Iterator[str]:
    kernel = spec.optimizations.attention
    if kernel in (*_FLASH, "varlen", "cudnn") and capability is None:
        yield f"optimizations.attention {kernel} needs a GPU: set it to sdpa"


OPTIMIZATION = Optimization(
    type=Literal[
        "auto", "eager", "sdpa", "cudnn", "varlen", "flash_attention_2", "flash_attention_3", "flex_attention"
    ],
    default="auto",
    description="attention implementation; auto is the library's choice for the model; cudnn is sdpa with cuDNN's "
    "kernels; varlen is torch's own for rows without padding",
    verified="the model's own setting is read",
    tolerance=Tolerance(ROUNDING),
    pairs=None,
    unsloth="it chooses the attention itself: leave it auto",
    refusals=_refusals,
    refusals_on=_refusals_on,
    beside={"varlen": {"optimizations.padding_free": True}},
    not_ablated=("sdpa", "eager"),  # what auto takes already; what keeps every score
)

"""A spec → the recipe that the terms of `core.memory` are written for."""

from __future__ import annotations

from typing import Literal

from ftbench.estimate.memory.model import ModelShape
from ftbench.estimate.memory.recipe import Attention, Checkpointing, Fused, Loss, Recipe
from ftbench.spec.experiment import Experiment
from ftbench.spec.methods import Full, Lora, Qlora, Unsloth

CHUNK = 2048  # label tokens (worker/optimizations/chunked_loss.py)
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_PROJECTIONS = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o",
                "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}  # fmt: skip
_MLP = frozenset(("gate", "up", "down"))


def recipe_of(spec: Experiment, model: ModelShape, padded: bool, whole: bool) -> Recipe:
    """The recipe of a resolved spec. `padded` says that some batch holds padding, or rows of several samples, `whole`
    that every sample has max_length tokens."""
    method, on = spec.method, spec.optimizations
    weight = _BYTES[spec.model.dtype]
    autocast = spec.train.precision != "fp32"
    unsloth = isinstance(method, Unsloth)
    compute = 2 if autocast or weight == 2 else 4
    return Recipe(
        full=isinstance(method, Full),
        quantised=method.quantised,
        mxfp4=method.mxfp4,
        unsloth=unsloth,
        weight=weight,
        upcast=4 if is_upcast(method, model) else weight,
        compute=_BYTES[method.compute_dtype] if isinstance(method, Qlora) else compute,
        autocast=autocast,
        adapter=_adapter(method),
        rank=0 if isinstance(method, Full) else method.rank,
        targets=targets(method, model),
        double_quant=method.double_quant if isinstance(method, Qlora) else True,
        optimizer=spec.train.optimizer,
        checkpointing=_checkpointing(spec),
        offload=on.activation_offload,
        attention=_attention(spec, model, padded, whole),
        loss=_loss(spec),
        liger=on.liger,
        compiled=bool(on.compile),
        fp8=on.fp8 != "off",
        chunk=CHUNK if on.chunked_loss is True else on.chunked_loss or CHUNK,
        fused=fused(spec),
    )


def _adapter(method: Full | Lora | Qlora | Unsloth) -> int:
    """peft keeps adapters in float32; trl casts those of a model quantised by bitsandbytes to bfloat16."""
    return 0 if isinstance(method, Full) else 2 if isinstance(method, Qlora) and not method.mxfp4 else 4


def is_upcast(method: Full | Lora | Qlora | Unsloth, model: ModelShape) -> bool:
    """Whether what is not quantised is cast to float32 (worker/methods/qlora.py, `adapt`)."""
    return isinstance(method, Qlora) and method.upcast and not model.experts


def fused(spec: Experiment) -> Fused:
    """fused_lora takes adapters into the base product where that is a plain one of the type products are made in."""
    if not spec.optimizations.fused_lora:
        return "off"
    other = spec.optimizations.fp8 != "off" or (spec.method.quantised and not spec.method.mxfp4)
    products = "bfloat16" if spec.train.precision == "bf16" else "float32"
    return "beside" if other or spec.model.dtype != products else "augmented"


def targets(method: Full | Lora | Qlora | Unsloth, model: ModelShape) -> frozenset[str]:
    """What gets adapters. Names that the model has not (gate_proj on gpt_oss) get none; on qwen3_moe peft puts those of
    the MLP on the fused experts; all-linear means `nn.Linear`, which fused experts are not."""
    if isinstance(method, Full):
        return frozenset()
    if method.targets == "all-linear":
        named = frozenset(_PROJECTIONS.values()) - (_MLP if model.experts else frozenset())
    else:
        last = (name.rsplit(".", 1)[-1] for name in method.targets)
        named = frozenset(_PROJECTIONS[name] for name in last if name in _PROJECTIONS)
    if not model.experts:
        return named
    converted = model.family == "qwen3_moe" and bool(named & _MLP) and not method.quantised
    return named - _MLP | (frozenset(("experts",)) if method.experts or converted else frozenset())


def _checkpointing(spec: Experiment) -> Checkpointing:
    if isinstance(spec.method, Unsloth):
        own = spec.method.use_gradient_checkpointing
        return "full" if own == "on" else own
    asked: bool | Literal["selective", "offload"] = spec.optimizations.gradient_checkpointing
    if asked == "selective" or asked == "offload":
        return asked
    return "full" if asked else "off"


def is_eager(spec: Experiment, model: ModelShape) -> bool:
    """Whether attention writes a weight for each pair of positions: transformers has no sdpa for gpt_oss's sinks."""
    asked = spec.optimizations.attention
    return asked == "eager" or (asked == "auto" and model.family == "gpt_oss")


def _attention(spec: Experiment, model: ModelShape, padded: bool, whole: bool) -> Attention:
    asked = spec.optimizations.attention
    if is_eager(spec, model):
        return "eager"
    if asked == "varlen":
        return "sdpa" if whole else asked  # worker/optimizations/attention.py, `_by_rows`
    if asked in ("auto", "sdpa", "cudnn"):
        return "masked" if padded and spec.method.name != "unsloth" else "sdpa"
    return "flash"


def _loss(spec: Experiment) -> Loss:
    if spec.method.name == "unsloth":
        return "unsloth"
    if spec.optimizations.chunked_loss:
        return "chunked"
    return "liger" if spec.optimizations.liger else "trl"

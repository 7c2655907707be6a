"""Declare the strategies for several GPUs: what each strategy shards, and which settings it supports."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ftbench.spec.base import Experiment, Launch, Model
from ftbench.spec.methods import EXPERTS, GPT_OSS, configuration, family
from ftbench.spec.optimizations import switched_on

# Model families that pipeline parallelism supports, and optimizations that were tested with it.
PIPELINED = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "qwen3_moe")
_WITH_PP = ("gradient_checkpointing", "compile", "packing", "fixed_shape", "length_grouping", "loader_processes")
_WITHOUT_PLAN = (GPT_OSS, "qwen3_vl")  # families without a tensor-parallel plan in transformers


@dataclass(frozen=True)
class Strategy:
    """A value of `launch.strategy`.

    Args:
        description: One line for tables and messages.
        shards: What is split over the GPUs: optimizer, gradients, weights, matrices, experts, sequence, layers.
        same_samples: Whether all GPUs work on the same samples.
        offloads: The supported values of `launch.offload`.
        incompatibilities: Function that yields an error message for each unsupported setting.
    """

    description: str
    shards: tuple[str, ...] = ()
    same_samples: bool = False
    offloads: tuple[str, ...] = ()
    incompatibilities: Callable[[Experiment], Iterable[str]] = lambda spec: ()

    @property
    def sharded(self) -> bool:
        """Whether each GPU holds only a part of the model."""
        return bool({"weights", "matrices", "experts", "layers"} & {*self.shards})


def _optimizers(spec: Experiment) -> Iterator[str]:
    """Yield an error message if the optimizer does not support the sharded weights of the strategy."""
    name, optimizer = spec.launch.strategy, spec.train.optimizer
    if "bnb" in optimizer or optimizer.startswith("paged"):
        yield (
            f"train.optimizer {optimizer}: bitsandbytes does not support the sharded tensors of {name}: set it to "
            "adamw_torch or adamw_torchao_8bit"
        )
    if optimizer == "adamw_torch_fused" and name not in ("fsdp", "cp"):
        yield (
            f"train.optimizer {optimizer}: the fused step does not support sharded and unsharded weights together, "
            f"which {name} has: set it to adamw_torch"
        )


def _tp(spec: Experiment) -> Iterator[str]:
    yield from _optimizers(spec)
    if family(spec.model) in _WITHOUT_PLAN:
        yield f"launch.strategy: transformers does not have a tp sharding plan for {spec.model.id}: use fsdp"


def _ep(spec: Experiment) -> Iterator[str]:
    if getattr(spec.method, "experts", False):
        yield "launch.strategy: ep does not support adapters of experts: set method.experts to off, or use full or fsdp"
    if spec.method.name == "full":
        yield from _optimizers(spec)


_ONE_SAMPLE_PER_ROW = "ring attention ignores the boundaries between the samples of a row"
_NOT_WITH_CP = {
    "packing": _ONE_SAMPLE_PER_ROW,
    "padding_free": _ONE_SAMPLE_PER_ROW,
    "chunked_loss": "it needs complete rows, and each GPU has a part of each row",
    "liger": "its loss was not tested on parts of rows",
    "compile": "compiled layers were not tested with ring attention",
}


def _cp(spec: Experiment) -> Iterator[str]:
    yield from _optimizers(spec)
    on = spec.optimizations
    for key, why in _NOT_WITH_CP.items():
        if getattr(on, key):
            yield f"optimizations.{key} with cp: {why}: set it to off"
    if on.attention not in ("auto", "sdpa"):
        yield f"optimizations.attention: cp supports torch's own attention, not {on.attention}: set it to sdpa"
    if spec.dataset.has_images:
        yield "launch.strategy: cp does not split images: use fsdp"
    if family(spec.model) == GPT_OSS:
        yield "launch.strategy: cp does not support the attention sinks of gpt-oss: use fsdp"


def _pp(spec: Experiment) -> Iterator[str]:
    """Yield an error message for each setting that does not work with pipeline parallelism."""
    if {"tp", "fsdp"} & {*spec.launch.strategy.split("+")}:
        yield from _optimizers(spec)
    launch, train, on = spec.launch, spec.train, spec.optimizations
    if (kind := family(spec.model)) not in (None, *PIPELINED):
        yield f"launch.strategy: pp supports {', '.join(PIPELINED)}, and {spec.model.id} is {kind}: use fsdp"
    if spec.method.quantised and launch.strategy != "pp":
        yield (
            f"launch.strategy: {launch.strategy} does not support 4-bit weights, because the copies of a stage would "
            "get different gradients: use pp or ddp, or method lora"
        )
    if spec.dataset.has_images:
        yield "launch.strategy: pp supports only text: use ddp or fsdp"
    if train.precision == "fp16":
        yield "train.precision fp16: pp does not scale losses: set it to bf16"
    for name in switched_on(on):
        if name not in _WITH_PP:
            yield f"optimizations.{name} was not tested with the stages of pp: set it to off, or use fsdp"
    if on.attention not in ("auto", "sdpa", "eager"):
        yield f"optimizations.attention: pp supports sdpa and eager, not {on.attention}: set it to sdpa"
    for key in ("control", "keep_weights"):
        if getattr(spec.measure, key) not in ("off", False):
            yield f"measure.{key}: a GPU of pp does not have all layers: set it to off"
    if launch.pp is not None:
        yield from _stages(spec)


def _stages(spec: Experiment) -> Iterator[str]:
    """Yield an error message if the layers cannot form the stages, or the batch cannot form equal micro-batches."""
    launch, rows = spec.launch, spec.train.batch_size
    pp, micro = launch.pp or 1, launch.micro_batches or 1
    least = pp if launch.schedule in ("gpipe", "1f1b") else launch.stages
    if micro < least:
        yield (
            f"launch.micro_batches: {micro} micro-batches cannot fill {least} stages, and GPUs would wait for each "
            f"other: set it to {least} or more"
        )
    if launch.schedule == "zbv" and launch.strategy != "pp":
        yield (
            "launch.schedule: zbv splits the backward pass, and other GPUs would get wrong gradients: use "
            "interleaved-1f1b, or launch.strategy pp"
        )
    if launch.schedule == "interleaved-1f1b" and micro % pp:
        yield f"launch.micro_batches: interleaved-1f1b needs a multiple of {pp}, not {micro}: change it"
    if rows % micro:
        yield (
            f"train.batch_size: {rows} rows cannot form {micro} equal micro-batches: set it to "
            f"{micro * -(-rows // micro)}, or set launch.micro_batches"
        )
    if launch.split and len(launch.split) != launch.stages:
        yield f"launch.split has {len(launch.split)} numbers for {launch.stages} stages: give one number per stage"


def division_problems(model: Model, launch: Launch, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield an error message if the GPUs cannot share the layers, key heads or experts of a model. `config` is the
    configuration of the model, or empty if it is unknown."""
    text, parts = config.get("text_config", config), launch.strategy.split("+")
    if launch.strategy == "tp+fsdp" and (launch.gpus % (launch.tp or 1) or launch.gpus == launch.tp):
        yield (
            f"launch.tp: {launch.gpus} GPUs cannot form two or more groups of {launch.tp} GPUs: set launch.gpus to a "
            "multiple of it, or launch.strategy to tp or fsdp"
        )
    layers, stages = text.get("num_hidden_layers"), launch.stages
    if layers and layers < stages:
        yield f"launch.pp: {model.id} has {layers} layers, too few for {stages} stages: lower launch.pp, or use fsdp"
    elif layers and launch.split and sum(launch.split) != layers:
        yield f"launch.split: its sum is {sum(launch.split)}, and {model.id} has {layers} layers: change it"
    heads = text.get("num_key_value_heads") or text.get("num_attention_heads")
    experts = next(filter(None, map(text.get, EXPERTS)), None)
    if "ep" in parts and text and not experts:
        yield f"launch.strategy: ep needs experts and {model.id} has none: use fsdp or ddp"
    count, what = (heads, "key heads") if "tp" in parts else (experts, "experts") if "ep" in parts else (None, "")
    key, shares = ("launch.tp", launch.tp) if launch.tp else ("launch.gpus", launch.gpus)
    if count and count % shares:
        fitting = ", ".join(str(number) for number in range(2, count + 1) if count % number == 0)
        fix = f"set it to one of {fitting}, or use fsdp" if fitting else "use fsdp"
        yield f"{key}: {shares} GPUs cannot share the {count} {what} of {model.id} evenly: {fix}"


_STAGES = "each GPU holds some of the layers; micro-batches pass from one GPU to the next (torch)"
STRATEGIES = {
    "ddp": Strategy(
        description="each GPU has a copy of the model and trains on a share of the batch; the GPUs sum their gradients"
    ),
    "fsdp": Strategy(
        description="each GPU holds a part of each layer; GPUs gather a layer before computing it (PyTorch's FSDP2)",
        shards=("optimizer", "gradients", "weights"),
        offloads=("params",),
        incompatibilities=_optimizers,
    ),
    "zero1": Strategy(
        description="each GPU has a copy of the model and a share of the optimizer state (DeepSpeed ZeRO)",
        shards=("optimizer",),
        offloads=("optimizer",),
    ),
    "zero2": Strategy(
        description="each GPU has a copy of the weights, and a share of the gradients and of the optimizer state",
        shards=("optimizer", "gradients"),
        offloads=("optimizer",),
    ),
    "zero3": Strategy(
        description="each GPU has a share of weights, gradients and states; GPUs gather a layer before computing it",
        shards=("optimizer", "gradients", "weights"),
        offloads=("optimizer", "params"),
    ),
    "tp": Strategy(
        description="each GPU holds a part of each matrix; all GPUs work on the same tokens (transformers)",
        shards=("matrices",),
        same_samples=True,
        incompatibilities=_tp,
    ),
    "tp+fsdp": Strategy(
        description="`tp` within groups of `launch.tp` GPUs, and `fsdp` between the groups (FSDP2)",
        shards=("optimizer", "gradients", "weights", "matrices"),
        incompatibilities=_tp,
    ),
    "ep": Strategy(
        description="each GPU holds some of the experts; all GPUs work on the same tokens (transformers)",
        shards=("experts",),
        same_samples=True,
        incompatibilities=_ep,
    ),
    "cp": Strategy(
        description="each GPU has a part of each sequence; the GPUs exchange keys and values; FSDP2 shards the weights",
        shards=("optimizer", "gradients", "weights", "sequence"),
        same_samples=True,
        incompatibilities=_cp,
    ),
    "pp": Strategy(description=_STAGES, shards=("layers",), same_samples=True, incompatibilities=_pp),
    "pp+ddp": Strategy(
        description="several copies of a `pp` pipeline; the copies of each stage sum their gradients",
        shards=("layers",),
        incompatibilities=_pp,
    ),
    "pp+fsdp": Strategy(
        description="like `pp`, and several GPUs also shard each layer (FSDP2)",
        shards=("optimizer", "gradients", "weights", "layers"),
        incompatibilities=_pp,
    ),
    "pp+tp": Strategy(
        description="like `pp`, and `launch.tp` GPUs also share each matrix of a stage",
        shards=("matrices", "layers"),
        incompatibilities=_pp,
    ),
    "pp+tp+fsdp": Strategy(
        description="like `pp`, and the GPUs of each stage use `tp+fsdp`",
        shards=("optimizer", "gradients", "weights", "matrices", "layers"),
        incompatibilities=_pp,
    ),
}


def incompatibilities(spec: Experiment) -> list[str]:
    """Return error messages for mistakes in `launch:`, and for settings that the strategy does not support."""
    launch, name = spec.launch, spec.launch.strategy
    if launch.gpus % launch.nodes:
        return [
            f"launch.nodes: launch.gpus is {launch.gpus}, which {launch.nodes} machines cannot share evenly: set "
            f"launch.gpus to a multiple of {launch.nodes}, or launch.nodes to 1"
        ]
    if launch.nodes > 1 and launch.mock != "off":
        return ["launch.nodes: launch.mock supports one machine: set launch.nodes to 1"]
    for key, fitting in (("tp", "tp+fsdp"), ("pp", "pp"), ("micro_batches", "pp"), ("split", "pp")):
        there = key in name.split("+") or (key in ("micro_batches", "split") and name.startswith("pp"))
        if getattr(launch, key) is not None and (not there or name == "tp"):
            return [f"launch.{key} needs strategy {fitting}, and launch.strategy is {name}: change one of them"]
    if launch.schedule != "1f1b" and not name.startswith("pp"):
        return [f"launch.schedule needs strategy pp, and launch.strategy is {name}: change one of them"]
    if launch.gpus == 1:
        several = {"strategy": name, "offload": launch.offload}
        return [
            f"launch.{key}: {value} needs several GPUs and launch.gpus is 1: raise launch.gpus, or set {key} to none"
            for key, value in several.items()
            if value != "none"
        ]
    if name == "none":
        known = "; ".join(f"{key}: {strategy.description}" for key, strategy in STRATEGIES.items())
        return [f"launch.strategy: none is for one GPU and launch.gpus is {launch.gpus}: use one of {known}"]
    return [*_of_strategy(spec, STRATEGIES[name])]


def _of_strategy(spec: Experiment, strategy: Strategy) -> Iterator[str]:
    launch, name = spec.launch, spec.launch.strategy
    if strategy.sharded and spec.method.quantised and name != "zero3" and not name.startswith("pp"):
        yield (
            f"launch.strategy: {name} cannot shard 4-bit weights: bitsandbytes stores them as bytes that stay on each "
            "GPU, or computes wrong results if they are stored as bfloat16: use ddp, or method lora"
        )
    if strategy.shards and spec.measure.gradients:
        yield f"measure.gradients: {name} does not keep complete gradients: set it to 0, or use ddp"
    yield from strategy.incompatibilities(spec)
    yield from division_problems(spec.model, launch, configuration(spec.model))
    if launch.offload not in ("none", *strategy.offloads):
        having = [f"{key}: {' and '.join(each.offloads)}" for key, each in STRATEGIES.items() if each.offloads]
        yield f"launch.offload: {name} does not support {launch.offload} ({', '.join(having)}): set it to none"
    if spec.method.name == "unsloth":
        yield "method unsloth trains on one GPU: set launch.gpus to 1, or use method lora or qlora"

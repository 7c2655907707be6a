"""What the stages of a pipeline (`launch.pp`) support."""

from collections.abc import Iterator

from ftbench.spec.base import Experiment
from ftbench.spec.methods import family, number_of_layers
from ftbench.spec.optimizations import switched_on

PIPELINED = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "qwen3_moe")
_WITH_PP = ("gradient_checkpointing", "compile", "packing", "fixed_shape", "length_grouping", "loader_processes")


def incompatibilities(spec: Experiment) -> Iterator[str]:
    """Yield which settings do not work with the stages of pp."""
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
    """Yield why the layers or the batch cannot be divided."""
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
        yield f"launch.micro_batches: interleaved-1f1b needs a multiple of {pp}, and it is {micro}: change it"
    if rows % micro:
        yield (
            f"train.batch_size: {rows} rows cannot form {micro} equal micro-batches: set it to "
            f"{micro * -(-rows // micro)}, or set launch.micro_batches"
        )
    if launch.split and len(launch.split) != launch.stages:
        yield f"launch.split has {len(launch.split)} numbers, and there are {launch.stages} stages: give one for each"
    yield from split_problems(spec, number_of_layers(spec.model))


def split_problems(spec: Experiment, layers: int | None) -> Iterator[str]:
    """Yield why a model with this number of layers cannot be split into the stages."""
    launch = spec.launch
    if layers is None:
        return
    if layers < launch.stages:
        yield (
            f"launch.pp: {spec.model.id} has {layers} layers, too few for {launch.stages} stages: lower launch.pp, or "
            "use fsdp"
        )
    elif launch.split and sum(launch.split) != layers:
        yield f"launch.split: its sum is {sum(launch.split)}, and {spec.model.id} has {layers} layers: change it"

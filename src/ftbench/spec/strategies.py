"""How a run uses several GPUs: what each strategy is, and what it cannot go with, each as a sentence with a way out."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from ftbench.spec.base import Experiment
from ftbench.spec.methods import GPT_OSS, family
from ftbench.spec.optimizations.declaration import Capability

MOST_GPUS = 1024


@dataclass(frozen=True)
class Strategy:
    """A value of `launch.strategy`. `verified` says how a run knows that it is there; `offloads` are the values of
    `launch.offload` that it has, `incompatibilities` what it cannot go with."""

    description: str
    verified: str
    offloads: tuple[str, ...] = ()
    incompatibilities: Callable[[Experiment], Iterable[str]] = lambda spec: ()


def _refused_where_sharded(spec: Experiment) -> Iterator[str]:
    name = spec.launch.strategy
    if spec.method.quantised and name != "zero3":
        yield (
            f"launch.strategy: {name} cannot spread 4-bit weights: bitsandbytes keeps them as bytes that are left "
            "whole on each GPU, or computes wrong results where they are stored as bfloat16: use ddp, or method lora"
        )
    if spec.measure.generate is not None:
        yield f"measure.generate: an answer needs the whole model and {name} spreads it: set it to off"
    if spec.measure.gradients:
        yield f"measure.gradients: {name} leaves a share of each gradient on a rank: set it to 0, or use ddp"


def _refused_steps(spec: Experiment) -> Iterator[str]:
    """Yield which optimizer has no step for shares of matrices, or for these beside what is whole on each GPU."""
    name, optimizer = spec.launch.strategy, spec.train.optimizer
    if "bnb" in optimizer or optimizer.startswith("paged"):
        yield (
            f"train.optimizer {optimizer}: bitsandbytes has no step for what {name} spreads: set it to adamw_torch or "
            "adamw_torchao_8bit"
        )
    if optimizer == "adamw_torch_fused" and name not in ("fsdp", "cp"):
        yield (
            f"train.optimizer {optimizer}: {name} spreads some weights and leaves others whole, which one fused step "
            "does not take: set it to adamw_torch"
        )


def _refused_by_fsdp(spec: Experiment) -> Iterator[str]:
    yield from _refused_where_sharded(spec)
    yield from _refused_steps(spec)


def _refused_by_deepspeed(spec: Experiment) -> Iterator[str]:
    name = spec.launch.strategy
    if spec.measure.gradients:
        yield f"measure.gradients: {name} clears the gradients before they can be read: set it to 0, or use ddp"


# Families whose layers transformers has no plan to divide.
_UNDIVIDED = (GPT_OSS, "qwen3_vl")


def _refused_by_tp(spec: Experiment) -> Iterator[str]:
    yield from _refused_by_fsdp(spec)
    if family(spec.model) in _UNDIVIDED:
        yield f"launch.strategy: transformers has no plan by which tp divides {spec.model.id}: use fsdp"


def _refused_by_ep(spec: Experiment) -> Iterator[str]:
    yield from _refused_where_sharded(spec)
    if getattr(spec.method, "experts", False):
        yield "launch.strategy: ep has no adapters of experts: use method lora without method.experts, full, or fsdp"
    if spec.method.name == "full":
        yield from _refused_steps(spec)


# What does not go with attention that goes round, and why.
_WHOLE_ROWS = {
    "packing": "keys and values that go round know no border between the samples of a row",
    "padding_free": "keys and values that go round know no border between the samples of a row",
    "chunked_loss": "it finds labels by their place in whole rows, and each GPU has parts of them",
    "liger": "its loss is not proven on parts of rows",
    "compile": "no compiled layer is proven around keys and values that go round",
}


def _refused_by_cp(spec: Experiment) -> Iterator[str]:
    yield from _refused_by_fsdp(spec)
    on = spec.optimizations
    yield from (
        f"optimizations.{key} with cp: {why}: set it to off" for key, why in _WHOLE_ROWS.items() if getattr(on, key)
    )
    if on.attention not in ("auto", "sdpa"):
        yield f"optimizations.attention: cp divides torch's own attention, not {on.attention}: set it to sdpa"
    if spec.dataset.has_images:
        yield "launch.strategy: cp is for text, images are whole on each GPU: use fsdp"
    if family(spec.model) == GPT_OSS:
        yield "launch.strategy: cp has no attention sinks, which gpt-oss needs: use fsdp"


STRATEGIES = {
    "ddp": Strategy(
        description="a copy of the model on each GPU, each trained on its share of the batch; gradients are summed",
        verified="the model is wrapped for as many ranks, and after the first step all hold the same weights",
    ),
    "fsdp": Strategy(
        description="a share of each layer on each GPU, gathered while the layer computes (PyTorch's FSDP2)",
        verified="after the first step every layer is sharded, and every parameter is a DTensor over all ranks",
        offloads=("params",),
        incompatibilities=_refused_by_fsdp,
    ),
    "zero1": Strategy(
        description="a copy of the model on each GPU and a share of the optimizer's states (DeepSpeed's ZeRO)",
        verified="DeepSpeed's engine runs the stage, and a rank updates no more than its share",
        offloads=("optimizer",),
        incompatibilities=_refused_by_deepspeed,
    ),
    "zero2": Strategy(
        description="as zero1, and a share of the gradients",
        verified="DeepSpeed's engine runs the stage, and a rank updates no more than its share",
        offloads=("optimizer",),
        incompatibilities=_refused_by_deepspeed,
    ),
    "zero3": Strategy(
        description="as zero2, and a share of the weights, gathered while a layer computes",
        verified="DeepSpeed's engine runs the stage, a rank keeps no more than its share of the weights, and releases "
        "what it gathers layer by layer",
        offloads=("optimizer", "params"),
        incompatibilities=lambda spec: (*_refused_where_sharded(spec), *_refused_by_deepspeed(spec)),
    ),
    "tp": Strategy(
        description="a share of each matrix of a layer on each GPU, all on the same tokens (transformers)",
        verified="after the first step the matrices of every layer are DTensors",
        incompatibilities=_refused_by_tp,
    ),
    "tp+fsdp": Strategy(
        description="a mesh: `launch.tp` GPUs share each matrix and see one batch, layers are spread over the others",
        verified="as fsdp, and after the first step matrices are DTensors over all ranks, the rest over the shares",
        incompatibilities=_refused_by_tp,
    ),
    "ep": Strategy(
        description="a share of the experts on each GPU, all on the same tokens: saves memory alone (transformers)",
        verified="after the first step parameters are DTensors",
        incompatibilities=_refused_by_ep,
    ),
    "cp": Strategy(
        description="a part of each sequence on each GPU, keys and values go round; weights as under fsdp (torch)",
        verified="as fsdp, and after the first step keys and values went round for every layer",
        incompatibilities=_refused_by_cp,
    ),
}


def launch_in_full(launch: Mapping[str, object]) -> Mapping[str, object]:
    """Return a section `launch` with what follows from what it says. Raise ValueError for what trains in no way."""
    if launch.get("tp") is False:  # `off`, as an estimate says it
        launch = {**launch, "tp": None}
    if "fsdp" in launch:
        launch = _mesh(launch)
    if named := sorted(launch.keys() & {*STRATEGIES, "pp"} - {"tp"}):
        raise ValueError(
            f"`{named[0]}` is no key: set gpus, and strategy to one of {', '.join(STRATEGIES)}. Two numbers make a "
            "mesh of tp and fsdp alone"
        )
    if launch.get("strategy") in ("pp", "pipeline"):
        raise ValueError(
            "`strategy` pp: transformers' pipeline computes answers and no loss, so that nothing is trained. Take fsdp "
            "or tp, or train with torchtitan, NeMo AutoModel or Megatron"
        )
    if launch.get("strategy") == "tp+fsdp":
        return {**launch, "tp": launch.get("tp") or 2}
    several = type(gpus := launch.get("gpus")) is int and gpus > 1
    return {"strategy": "ddp", **launch} if several else launch


def _mesh(launch: Mapping[str, object]) -> dict[str, object]:
    """Return a section that names the two numbers of a mesh in the words of `strategy`; one that `--set` has given
    another strategy has no second number."""
    tp, fsdp = launch.get("tp"), launch["fsdp"]
    words = {key: value for key, value in launch.items() if key != "fsdp"}
    if launch.get("strategy", "tp+fsdp") != "tp+fsdp":
        return words
    if type(tp) is not int or type(fsdp) is not int or not 2 <= min(tp, fsdp) <= max(tp, fsdp) <= 512:
        raise ValueError(
            "the two numbers of a mesh are `tp` and `fsdp`, each from 2 to 512; for one set `gpus` and `strategy`"
        )
    if launch.get("gpus", tp * fsdp) != tp * fsdp:
        raise ValueError(f"`gpus` is another than `tp` and `fsdp` say, {tp * fsdp}: leave it out")
    return {**words, "gpus": tp * fsdp, "strategy": "tp+fsdp"}


def incompatibilities(spec: Experiment) -> list[str]:
    """Return what of `launch` cannot work, or not with the rest of the spec."""
    launch, name = spec.launch, spec.launch.strategy
    if launch.gpus % launch.nodes:
        many = f"{launch.gpus} GPU{'s' if launch.gpus > 1 else ''}"
        return [
            f"launch.nodes: {many} cannot be spread over {launch.nodes} machines, as many on each: set launch.gpus "
            f"to a multiple of {launch.nodes}, or launch.nodes to 1"
        ]
    if launch.nodes > 1 and launch.mock != "off":
        return ["launch.nodes: what launch.mock does is done on one machine: set launch.nodes to 1"]
    if launch.tp is not None and name != "tp+fsdp":
        return [f"launch.tp: is of strategy tp+fsdp alone, and launch.strategy is {name}: leave it out, or set that"]
    if launch.ranks == 1:
        several = {"strategy": name, "offload": launch.offload}
        return [
            f"launch.{key}: {value} is for several GPUs and launch.gpus is 1: raise it, or set {key} to none"
            for key, value in several.items()
            if value != "none"
        ]
    if name == "none":
        known = "; ".join(f"{key}: {strategy.description}" for key, strategy in STRATEGIES.items())
        return [f"launch.strategy: none is for one GPU and launch.gpus is {launch.gpus}: take one of {known}"]
    if name not in STRATEGIES:
        return [
            "launch.strategy: ulysses doubles gradients beside ZeRO-1 and 2, and beside ZeRO-3 weighs all batches of a "
            "step alike, however many tokens they hold (DeepSpeed 0.19, transformers 5.17): use cp"
        ]
    sentences = list(STRATEGIES[name].incompatibilities(spec))
    if name == "tp+fsdp" and not launch.is_mesh:
        sentences.append(
            f"launch.tp: {launch.gpus} GPUs are no mesh of {launch.tp} by two or more: set launch.gpus to a "
            "multiple of it, or launch.strategy to tp or fsdp"
        )
    if launch.offload not in ("none", *STRATEGIES[name].offloads):
        having = [f"{key} has {' and '.join(each.offloads)}" for key, each in STRATEGIES.items() if each.offloads]
        sentences.append(
            f"launch.offload: {launch.offload} is nothing that {name} has ({', '.join(having)}): set it to none"
        )
    if spec.method.name == "unsloth":
        sentences.append("method unsloth trains on one GPU: set launch.gpus to 1, or use method lora or qlora")
    return sentences


def machine_incompatibilities(spec: Experiment, capability: Capability) -> list[str]:
    """Return what of `launch` cannot work on a machine whose GPU has this compute capability; None is one without."""
    launch = spec.launch
    if capability is None and launch.offload == "params" and launch.strategy == "fsdp":
        return [
            "launch.offload: under fsdp params go from host memory to a GPU and back, and this machine has none: set "
            "it to none, or try zero3"
        ]
    return []

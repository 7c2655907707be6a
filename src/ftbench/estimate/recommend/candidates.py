"""The ways to train a spec that a recommendation weighs: methods, optimizations, and what each of them rules out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ftbench.core.hardware import Gpu, capability_of
from ftbench.estimate.memory.memory_cache import MemoryCache
from ftbench.estimate.workload.model import shape_of
from ftbench.estimate.workload.sharding import on_gpus, problem
from ftbench.facts import read_facts
from ftbench.spec import strategies
from ftbench.spec.experiment import Experiment, Launch, resolve
from ftbench.spec.incompatibilities import incompatibilities
from ftbench.spec.load import recipe
from ftbench.spec.methods import METHODS
from ftbench.spec.optimizations import Optimizations
from ftbench.spec.optimizations.triton_kernels import FAMILIES as KERNEL_FAMILIES
from ftbench.spec.recipes import recipes

ADAPTERS = ("lora", "qlora", "unsloth")  # these train the same matrices; full trains others
_BESIDE = {"generate": None, "gradients": 0}  # of `measure`: what is done beside the training, and its off
_SHARED = {"rank", "alpha", "dropout", "bias", "targets", "experts", "vision", "projector"}
_UNSLOTH = tuple((bits, again) for bits in (False, True) for again in ("off", "unsloth"))


@dataclass(frozen=True, slots=True)
class Way:
    """A spec with a method and optimizations of its own; `problems` are why it can be on no machine."""

    spec: Experiment
    problems: tuple[str, ...] = field(default=())

    def on(self, launch: Launch) -> Way:
        """Return the same way on several GPUs, with what it cannot be there. Where these refuse to answer prompts or to
        keep gradients, that is left out: it is no part of how it trains."""
        if launch is self.spec.launch or launch == self.spec.launch:
            return self
        spec = self.spec.model_copy(update={"launch": launch})
        why = incompatibilities(spec)
        if off := {
            key: value for key, value in _BESIDE.items() if any(line.startswith(f"measure.{key}:") for line in why)
        }:
            spec = spec.model_copy(update={"measure": spec.measure.model_copy(update=off)})
            why = incompatibilities(spec)
        return Way(spec, self.problems or tuple(why))

    def sized(self, batch: int, accumulation: int, capability: tuple[int, int] | None) -> Experiment:
        """Return the spec with this batch, resolved for a GPU."""
        return with_batch(resolve(self.spec, capability), batch, accumulation)


def left_out(spec: Experiment, way: Experiment) -> str:
    """Return what a way to train `spec` on several GPUs does not do of what that does beside the training; empty where
    it does all."""
    return ", ".join(f"measure.{key}" for key in _BESIDE if getattr(spec.measure, key) != getattr(way.measure, key))


def own_kind(spec: Experiment) -> tuple[str, ...]:
    """Return the methods that train the same matrices as the spec's: others learn something else."""
    return ("full",) if spec.method.name == "full" else ADAPTERS


def launches(spec: Experiment, gpus: int, config: dict[str, Any] | None = None) -> list[Launch]:
    """Return each way in which so many GPUs can share the work of a spec, with and without what a strategy offloads."""
    if gpus == 1:
        return [on_gpus(spec, 1, "none").launch]
    model = shape_of(spec.model, config)
    shared = (
        on_gpus(spec, gpus, name, offload).launch
        for name, strategy in strategies.STRATEGIES.items() for offload in ("none", *strategy.offloads)
    )  # fmt: skip
    return [launch for launch in shared if problem(model, launch) is None]


def ways(
    spec: Experiment, methods: Sequence[str], equal_lengths: bool, config: dict[str, Any] | None = None
) -> Iterator[Way]:
    """Return the spec as it is, if its method is among them, then the shipped recipes and every combination; each once.
    `equal_lengths` says that no batch has padding. Our own kernels are among them where the model is one they know."""
    seen, known = set(), shape_of(spec.model, config).family in KERNEL_FAMILIES
    own = [spec] if spec.method.name in methods else []
    others = (*_recipes(spec, methods, equal_lengths), *_combined(spec, methods, equal_lengths))
    for candidate in (*own, *map(_without_losses, others)):
        key = (candidate.method, candidate.optimizations, candidate.train)
        if key not in seen and (known or candidate.optimizations.triton_kernels is not True):
            seen.add(key)
            yield Way(candidate, tuple(incompatibilities(candidate)))


def _recipes(spec: Experiment, methods: Sequence[str], equal_lengths: bool) -> Iterator[Experiment]:
    """Return the shipped recipes laid over the spec: their method with the options that it shares with the spec's own,
    their optimizations and optimizer. The precision stays; rows that need no packing are not packed."""
    unpacked = {"packing": False, "attention": "auto"}
    for shipped in _shipped():
        method = shipped.get("method", {})
        name = method.get("name", spec.method.name)
        if name not in methods or name == "unsloth":
            continue
        chosen = next(_variants(spec, name))
        train = {key: value for key, value in shipped.get("train", {}).items() if key == "optimizer"}
        on = shipped["optimizations"] | _of_images(spec)
        if on.get("image_cache") and not spec.dataset.may_have_images:
            continue  # a recipe for images
        on = {**on, **unpacked} if equal_lengths and on["packing"] and not on["cuda_graph"] else on
        yield spec.model_copy(
            update={
                "method": type(chosen).model_validate({**chosen.model_dump(), **method}),
                "optimizations": Optimizations.model_validate(on),
                "train": spec.train.model_copy(update=train),
            }
        )


def _without_losses(spec: Experiment) -> Experiment:
    """Return a way of another objective without the losses of given answers: what else it switches on is still a
    way."""
    if spec.objective.name == "sft":
        return spec
    on = spec.optimizations.model_copy(update={"chunked_loss": False, "liger": False})
    return spec.model_copy(update={"optimizations": on})


def _of_images(spec: Experiment) -> dict[str, Any]:
    """Return what every way has for images: the resolution that the spec asks for, and a cache, which costs no step."""
    return {"image_size": spec.optimizations.image_size, "image_cache": True} if spec.dataset.has_images else {}


@cache
def _shipped() -> tuple[dict[str, Any], ...]:
    return tuple(recipe(name, Path()) for name in recipes())


def _combined(spec: Experiment, methods: Sequence[str], equal_lengths: bool) -> Iterator[Experiment]:
    weighed = read_facts("ways.yaml")
    estimated = [name for name in methods if name != "unsloth" or not spec.dataset.has_images]  # see check_modelled
    for method in estimated:
        for chosen in _variants(spec, method):
            for switches in weighed["switches"] if method != "unsloth" else ({},):
                layouts = weighed["compiled_layouts" if switches.get("compile") else "layouts"]
                for layout in ({},) if equal_lengths else layouts[: 2 if method == "unsloth" else None]:
                    on = Optimizations.model_validate({**switches, **layout, **_of_images(spec)})
                    yield from _with_optimizers(spec.model_copy(update={"method": chosen, "optimizations": on}))


def _variants(spec: Experiment, name: str) -> Iterator[Any]:
    """Return the method with the options of the spec's own; unsloth in 16 and 4 bits, checkpointed or not."""
    own = spec.method.model_dump() if spec.method.name == name else spec.method.model_dump(include=_SHARED)
    if name == "full":
        own = {}
    if name != "unsloth":
        yield METHODS[name].model_validate({**own, "name": name})
        return
    for bits, again in _UNSLOTH:
        more = {"name": name, "load_in_4bit": bits, "use_gradient_checkpointing": again}
        yield METHODS[name].model_validate({**own, **more})


def _with_optimizers(spec: Experiment) -> Iterator[Experiment]:
    """Yield ways of full training also with the fused kernel: the same arithmetic in one pass over the state."""
    yield spec
    if spec.method.name == "full" and spec.train.optimizer == "adamw_torch":
        yield spec.model_copy(update={"train": spec.train.model_copy(update={"optimizer": "adamw_torch_fused"})})


def with_batch(spec: Experiment, batch: int, accumulation: int) -> Experiment:
    train = spec.train.model_copy(update={"batch_size": batch, "gradient_accumulation_steps": accumulation})
    return spec.model_copy(update={"train": train})


def batches(largest: int, effective: int | None) -> list[tuple[int, int]]:
    """Return batch sizes with their accumulation, largest first: powers of two and the largest, or divisors."""
    if not largest:
        return []
    if effective is None:
        sizes = {largest, *(2**power for power in range(largest.bit_length()))}
        return [(size, 1) for size in sorted(sizes, reverse=True)]
    fitting = (size for size in range(min(largest, effective), 0, -1) if effective % size == 0)
    return [(size, effective // size) for size in fitting]


def completions(
    way: Way, gpu: Gpu | float, effective: int | None, most: int, memory_cache: MemoryCache
) -> list[tuple[int, int]]:
    """Return the batches of completions that fit, whole groups of them in a step, largest first: those of a step are
    made together, however few of them a forward pass holds."""
    capability, group = capability_of(gpu), way.spec.objective.group
    if effective is None:
        sizes = batches(memory_cache.largest_batch(way.sized(1, 1, capability), gpu, most=most) or 0, None)
        return [(size, passes) for size, passes in sizes if size % group == 0]
    if effective % group:
        return []
    sized = ((pair, way.sized(*pair, capability)) for pair in batches(most, effective))
    return [pair for pair, spec in sized if memory_cache.estimate(spec, gpu).verdict == "fits"]

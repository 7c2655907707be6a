"""Generate the training variants that `recommend` compares: methods, optimizations and multi-GPU strategies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from ftbench.estimate.memory.largest_batch import with_batch
from ftbench.estimate.workload.model import shape_of
from ftbench.estimate.workload.sharding import can_use, on_gpus
from ftbench.facts import read_facts
from ftbench.spec import strategies
from ftbench.spec.experiment import Experiment, Launch
from ftbench.spec.incompatibilities import incompatibilities, with_changes
from ftbench.spec.load import shipped_recipes
from ftbench.spec.methods import GPT_OSS, METHODS, configuration, decoder_family, family
from ftbench.spec.optimizations import Optimizations
from ftbench.spec.optimizations.compute import KERNEL_FAMILIES

ADAPTERS = ("lora", "qlora", "unsloth")  # methods that train adapters; `full` trains all weights
_SHARED = {"rank", "alpha", "dropout", "targets", "experts", "vision", "projector"}
_UNSLOTH = tuple((bits, again) for bits in (False, True) for again in ("off", "unsloth"))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A variant: a spec with another method or other optimizations. `problems` lists why the variant cannot run."""

    spec: Experiment
    problems: tuple[str, ...] = ()

    def on(self, launch: Launch) -> Candidate:
        """Return the variant with these `launch` settings, and with the problems of the combination."""
        if launch is self.spec.launch or launch == self.spec.launch:
            return self
        spec = self.spec.model_copy(update={"launch": launch})
        if launch.micro_batches:  # the batch is chosen later
            spec = with_batch(spec, launch.micro_batches)
        return Candidate(spec, self.problems or tuple(incompatibilities(spec)))


def launches(spec: Experiment, gpus: int) -> list[Launch]:
    """Return the possible `launch` sections for a number of GPUs: each strategy with and without offloading."""
    if gpus == 1:
        return [on_gpus(spec, 1, "none").launch]
    shared = (
        on_gpus(spec, gpus, name, offload).launch
        for name, strategy in strategies.STRATEGIES.items() if can_use(spec, gpus, name)
        for offload in ("none", *strategy.offloads)
    )  # fmt: skip
    config = configuration(spec.model)
    return [launch for launch in shared if not any(strategies.division_problems(spec.model, launch, config))]


def variants(spec: Experiment, methods: Sequence[str], equal_lengths: bool) -> Iterator[Candidate]:
    """Yield distinct variants: the spec itself, the shipped recipes, and the combinations of facts/variants.yaml.

    Variants use only `methods`. With `equal_lengths`, batches have no padding, so variants that reduce padding are
    omitted. Variants with ftbench's kernels are included if the kernels support the model."""
    seen, known = set(), decoder_family(spec.model) in KERNEL_FAMILIES
    own = [spec] if spec.method.name in methods else []
    for candidate in (*own, *_recipes(spec, methods, equal_lengths), *_combined(spec, methods, equal_lengths)):
        if spec.objective.name != "sft":  # only supervised fine-tuning supports these losses
            candidate = with_changes(candidate, {"optimizations.chunked_loss": False, "optimizations.liger": False})
        key = (candidate.method, candidate.optimizations, candidate.train)
        if key not in seen and (known or candidate.optimizations.triton_kernels is not True):
            seen.add(key)
            yield Candidate(candidate, tuple(incompatibilities(candidate)))


def _recipes(spec: Experiment, methods: Sequence[str], equal_lengths: bool) -> Iterator[Experiment]:
    """Yield the spec with the method, optimizations and `train` settings of each shipped recipe. If a recipe has
    `triton_kernels: auto`, also yield it with ftbench's kernels, because auto is off on cards without measurements.
    Also yield recipes with `precision: auto`, because old cards lack bf16, and qlora with `compile: lean`, because it
    needs less memory.

    The method options, such as the LoRA rank, come from the spec, and so does a precision other than auto. With
    `equal_lengths`, packing is off, except in recipes with a CUDA graph."""
    unpacked = {"packing": False, "attention": "auto"}
    for shipped in shipped_recipes().values():
        method = shipped.get("method", {})
        name = method.get("name", spec.method.name)
        if name not in methods or name == "unsloth":
            continue
        chosen, train, own = next(_of_method(spec, name)), shipped["train"], spec.train.precision
        on = shipped["optimizations"] | _for_images(spec)
        if on.get("image_cache") and not spec.dataset.may_have_images:
            continue  # a recipe for images
        on = {**on, **unpacked} if equal_lengths and on["packing"] and on["cuda_graph"] is not True else on
        changes: list[dict[str, Any]] = [{}, {"triton_kernels": True}] if on["triton_kernels"] == "auto" else [{}]
        changes += [{"compile": "lean", "triton_kernels": False}] if name == "qlora" and on["compile"] is True else []
        precisions = [train.get("precision", own), own] if own == "auto" else [own]  # `variants` omits duplicates
        for change, precision in product(changes, precisions):
            yield spec.model_copy(
                update={
                    "method": type(chosen).model_validate({**chosen.model_dump(), **method}),
                    "optimizations": Optimizations.model_validate({**on, **change}),
                    "train": spec.train.model_copy(update={**train, "precision": precision}),
                }
            )


def _for_images(spec: Experiment) -> dict[str, Any]:
    """Return the optimizations that all variants use for samples with images: image size and image cache."""
    return {"image_size": spec.optimizations.image_size, "image_cache": True} if spec.dataset.has_images else {}


def _combined(spec: Experiment, methods: Sequence[str], equal_lengths: bool) -> Iterator[Experiment]:
    """Yield the spec with each method and each combination of optimizations in facts/variants.yaml."""
    combinations = read_facts("variants.yaml")
    vision = len(methods) > 1 and shape_of(spec.model).vision  # unsloth is then not estimated (see check_modelled)
    for method in (name for name in methods if name != "unsloth" or not vision):
        for chosen in _of_method(spec, method):
            for switches in combinations["switches"] if method != "unsloth" else ({},):
                layouts = combinations["compiled_layouts" if switches.get("compile") else "layouts"]
                for layout in ({},) if equal_lengths else layouts[: 2 if method == "unsloth" else None]:
                    on = Optimizations.model_validate({**switches, **layout, **_for_images(spec)})
                    yield (made := spec.model_copy(update={"method": chosen, "optimizations": on}))
                    if method == "full" and spec.train.optimizer == "adamw_torch":  # fused AdamW: the same update
                        yield with_changes(made, {"train.optimizer": "adamw_torch_fused"})


def _of_method(spec: Experiment, name: str) -> Iterator[Any]:
    """Yield the method `name` with the options that the spec sets. For unsloth, yield variants in 16 and 4 bits, with
    and without gradient checkpointing. gpt-oss is published in MXFP4: qlora and unsloth keep this format."""
    packed = family(spec.model) == GPT_OSS
    own: dict[str, Any] = {"quant_type": "mxfp4"} if packed and name == "qlora" else {}
    if name != "full":
        own |= spec.method.model_dump(include=None if spec.method.name == name else _SHARED)
    for bits, again in _UNSLOTH[2 * packed :] if name == "unsloth" else [(None, None)]:
        more = {"load_in_4bit": bits, "use_gradient_checkpointing": again} if again else {}
        yield METHODS[name].model_validate({**own, **more, "name": name})

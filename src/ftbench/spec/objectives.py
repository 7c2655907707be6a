"""What a training minimises: one class an objective, OBJECTIVES the table; a method says what is trained for it. The
other half of dpo is `worker/preference.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ftbench.spec.base import Experiment, Float, Part, Switch
from ftbench.spec.optimizations import OPTIMIZATIONS, switched_on

PREFERENCE = "preference"  # the format of rows that are pairs


class Sft(Part):
    """Supervised fine-tuning: the answers of the data are learned, token by token."""

    pairs: ClassVar[bool] = False  # whether a sample is two sequences, of which one is preferred
    sequences: ClassVar[int] = 1  # that a sample is
    in_step: ClassVar[bool] = False  # whether a reference's forward pass is a part of each step

    name: Literal["sft"] = "sft"

    def refusals(self, spec: Experiment) -> Iterator[str]:
        """Yield what in the spec excludes this objective on any machine, each as a sentence with a way out."""
        if spec.dataset.format == PREFERENCE:
            yield (
                f"dataset.format {PREFERENCE} is of pairs: set objective to dpo, or learn the chosen answers alone "
                "with dataset.columns={completion: chosen} and no format"
            )


class Dpo(Part):
    """Direct preference optimization: of each pair of answers the chosen one becomes likelier than the rejected one."""

    pairs: ClassVar[bool] = True
    sequences: ClassVar[int] = 2

    name: Literal["dpo"] = "dpo"
    beta: Float = Field(0.1, gt=0, description="how much it costs to leave the reference model")
    precompute_ref_log_probs: Switch = Field(
        False,
        description="what the reference makes of the pairs is computed once, before training; off computes it in each "
        "step, by the weights under the adapters, or with method full by a second model beside the one that learns",
    )

    @property
    def in_step(self) -> bool:
        return not self.precompute_ref_log_probs

    def refusals(self, spec: Experiment) -> Iterator[str]:
        method, data, launch = spec.method, spec.dataset, spec.launch
        if method.name == "unsloth":
            yield "objective dpo with method unsloth is not measured here: use lora, qlora or full"
        if getattr(method, "dropout", 0):
            yield "objective dpo: trl switches dropout off, so that model and reference agree: set method.dropout to 0"
        if getattr(method, "bias", "none") != "none":
            yield "objective dpo: peft has no second adapter with biases, which trl asks for: set method.bias to none"
        if "torchao" in spec.train.optimizer:
            yield (
                f"train.optimizer {spec.train.optimizer} with objective dpo: trl's DPOTrainer takes no class of "
                "optimizers: use adamw_torch or adamw_bnb_8bit"
            )
        if launch.framework != "trl":
            yield f"objective dpo is trl's here, and launch.framework is {launch.framework}: use trl, or objective sft"
        if launch.gpus > 1:
            yield f"objective dpo is measured on one GPU and launch.gpus is {launch.gpus}: set it to 1"
        if data.has_images:
            yield f"objective dpo is given text alone, and {data.name} holds images: take another data set"
        elif format_name := data.format or data.source.format:
            if format_name != PREFERENCE:
                yield (
                    f"objective dpo learns from pairs, and the rows of {data.name} are {format_name}: take a file or a "
                    "set on the hub with prompt, chosen and rejected, or dataset=synthetic"
                )
        elif data.name == "wikipedia-ja":
            yield f"objective dpo learns from pairs, and {data.name} has articles: take dataset=synthetic"
        if data.loss_on == "all":
            yield "objective dpo compares answers to one prompt: leave dataset.loss_on at completion"
        refused = {name: OPTIMIZATIONS[name].pairs for name in switched_on(spec.optimizations)}
        yield from (f"optimizations.{name} with objective dpo: {why}" for name, why in refused.items() if why)


Objective = Annotated[Sft | Dpo, Field(discriminator="name")]
OBJECTIVES: dict[str, type[Sft] | type[Dpo]] = {"sft": Sft, "dpo": Dpo}

"""What a training minimises: one class an objective, OBJECTIVES the table; a method says what is trained for it. The
other halves are `worker/preference.py` of dpo and `worker/policy.py` of grpo."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from ftbench.spec import rewards
from ftbench.spec.base import Experiment, Float, Int, Part, Switch
from ftbench.spec.optimizations import OPTIMIZATIONS, switched_on

PREFERENCE = "preference"  # the format of rows that are pairs
PROMPT = "prompt"  # that of rows without answers


class Sft(Part):
    """Supervised fine-tuning: the answers of the data are learned, token by token."""

    pairs: ClassVar[bool] = False  # whether a sample is two sequences, of which one is preferred
    prompts: ClassVar[bool] = False  # whether it is a prompt that the model itself answers
    sequences: ClassVar[int] = 1  # that a sample is
    group: ClassVar[int] = 1  # of samples that are trained together: a step has a multiple of them
    in_step: ClassVar[bool] = False  # whether a reference's forward pass is a part of each step

    name: Literal["sft"] = "sft"

    def refusals(self, spec: Experiment) -> Iterator[str]:
        """Yield what in the spec excludes this objective on any machine, each as a sentence with a way out."""
        if spec.dataset.format == PREFERENCE:
            yield (
                f"dataset.format {PREFERENCE} is of pairs: set objective to dpo, or learn the chosen answers alone "
                "with dataset.columns={completion: chosen} and no format"
            )
        if spec.dataset.format == PROMPT:
            yield f"dataset.format {PROMPT} is of rows without answers: set objective to grpo, or take another format"


def _of_trl(spec: Experiment, trainer: str, with_reference: bool) -> Iterator[str]:
    """Yield what trl's own trainer of an objective does not take, or was not measured with."""
    objective, launch = f"objective {spec.objective.name}", spec.launch
    if spec.method.name == "unsloth":
        yield f"{objective} with method unsloth is not measured here: use lora, qlora or full"
    if with_reference and getattr(spec.method, "bias", "none") != "none":
        yield f"{objective}: peft has no second adapter with biases, which trl asks for: set method.bias to none"
    if "torchao" in spec.train.optimizer:
        yield (
            f"train.optimizer {spec.train.optimizer} with {objective}: trl's {trainer} takes no class of optimizers: "
            "use adamw_torch or adamw_bnb_8bit"
        )
    if launch.framework != "trl":
        yield f"{objective} is trl's here, and launch.framework is {launch.framework}: use trl, or objective sft"
    if launch.gpus > 1:
        yield f"{objective} is measured on one GPU and launch.gpus is {launch.gpus}: set it to 1"


class Dpo(Part):
    """Direct preference optimization: of each pair of answers the chosen one becomes likelier than the rejected one."""

    pairs: ClassVar[bool] = True
    prompts: ClassVar[bool] = False
    sequences: ClassVar[int] = 2
    group: ClassVar[int] = 1

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
        method, data = spec.method, spec.dataset
        if getattr(method, "dropout", 0):
            yield "objective dpo: trl switches dropout off, so that model and reference agree: set method.dropout to 0"
        yield from _of_trl(spec, "DPOTrainer", with_reference=True)
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


class Grpo(Part):
    """Group relative policy optimization: the model answers each prompt several times, and what has more reward than
    the rest of its group becomes likelier."""

    pairs: ClassVar[bool] = False
    prompts: ClassVar[bool] = True
    sequences: ClassVar[int] = 1

    name: Literal["grpo"] = "grpo"
    num_generations: Int = Field(8, ge=2, le=4096, description="completions of a prompt, which are its group")
    max_completion_length: Int = Field(512, ge=1, le=1_048_576, description="tokens; a completion ends there")
    fixed_length: Switch = Field(
        False, description="no completion ends before, so that runs generate equally many tokens"
    )
    temperature: Float = Field(1.0, gt=0, le=100, description="of the sampling")
    beta: Float = Field(0.0, ge=0, description="how much it costs to leave the reference model; 0 needs none")
    loss_type: Literal["dapo", "dr_grpo", "bnpo", "grpo"] = Field("dapo", description="by what trl divides the loss")
    reward: Annotated[str | tuple[str, ...] | None, BeforeValidator(rewards.named)] = Field(
        None,
        description="a function of yours that judges completions, path/to/file.py:function, or several, which add up; "
        "the share of even token ids if left out",
    )

    @property
    def group(self) -> int:
        return self.num_generations

    @property
    def in_step(self) -> bool:
        return bool(self.beta)

    def refusals(self, spec: Experiment) -> Iterator[str]:
        yield from self._of_batches(spec)
        yield from self._of_data(spec)
        yield from self._of_method(spec)
        for name in switched_on(spec.optimizations):
            if name not in ("attention", "gradient_checkpointing"):
                yield f"optimizations.{name} with objective grpo was not held against training without it: leave it off"
        if spec.measure.profile != "off":
            yield "measure.profile with objective grpo: a profile knows no generation: profile objective sft"
        if spec.train.precision == "fp16":
            yield "train.precision fp16 with objective grpo was not tried: set it to bf16 or fp32"
        yield from _of_trl(spec, "GRPOTrainer", with_reference=bool(self.beta))

    def _of_batches(self, spec: Experiment) -> Iterator[str]:
        size, group, samples = spec.global_batch, self.num_generations, spec.dataset.samples
        if size % group:
            yield (
                f"objective grpo: the {size} completions of a step (train.batch_size x "
                f"train.gradient_accumulation_steps) are no multiple of objective.num_generations {group}: set "
                f"train.batch_size to {group}"
            )
        elif samples is not None and samples < size // group:
            yield f"objective grpo: a step answers {size // group} prompts and dataset.samples is {samples}: raise it"

    def _of_data(self, spec: Experiment) -> Iterator[str]:
        data = spec.dataset
        if data.has_images:
            yield f"objective grpo is given text alone, and {data.name} holds images: take another data set"
        elif (data.format or data.source.format) in (PREFERENCE, "text"):
            yield (
                f"objective grpo answers prompts, and rows of {data.format or data.source.format} are none: set "
                f"dataset.format to {PROMPT} and dataset.columns to {{prompt: COLUMN}}"
            )
        if data.loss_on == "all":
            yield "objective grpo learns what the model itself answers: leave dataset.loss_on at completion"
        if data.eval_samples:
            yield "objective grpo: an evaluation would be another generation: set dataset.eval_samples to 0"

    def _of_method(self, spec: Experiment) -> Iterator[str]:
        if getattr(spec.method, "dropout", 0):
            yield (
                "objective grpo: dropout would have completions drawn from one model and learned by another: set "
                "method.dropout to 0"
            )
        if self.beta and not spec.method.adapters:
            yield (
                "objective grpo: of all weights trl would load a second model by itself, in float32: set "
                "objective.beta to 0, or train adapters (lora, qlora)"
            )


Objective = Annotated[Sft | Dpo | Grpo, Field(discriminator="name")]
OBJECTIVES: dict[str, type[Sft] | type[Dpo] | type[Grpo]] = {"sft": Sft, "dpo": Dpo, "grpo": Grpo}

"""Declare the training objectives, one class per objective. The trainers are in `worker/`."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from ftbench.spec.base import Experiment, Float, Int, Part, Switch
from ftbench.spec.optimizations import OPTIMIZATIONS, switched_on

PREFERENCE = "preference"  # dataset format with preference pairs
PROMPT = "prompt"  # dataset format with prompts without answers
_REWARD = re.compile(r".+\.py:[^\W\d]\w*", re.DOTALL)


class Sft(Part):
    """Supervised fine-tuning: predict the tokens of the answers."""

    pairs: ClassVar[bool] = False  # a sample is a chosen and a rejected sequence
    prompts: ClassVar[bool] = False  # a sample is a prompt that the model answers
    sequences: ClassVar[int] = 1  # number of sequences per sample
    group: ClassVar[int] = 1  # the number of sequences per step is a multiple of this number
    in_step: ClassVar[bool] = False  # each step runs a forward pass of a reference model

    name: Literal["sft"] = "sft"

    def incompatibilities(self, spec: Experiment) -> Iterator[str]:
        """Yield an error message for each setting of the spec that does not work with this objective."""
        if spec.dataset.format == PREFERENCE:
            yield (
                f"dataset.format {PREFERENCE} needs objective dpo: set objective to dpo, or set "
                "dataset.columns={completion: chosen} without a format to train on the chosen answers"
            )
        if spec.dataset.format == PROMPT:
            yield f"dataset.format {PROMPT} has no answers: set objective to grpo, or use another format"


def _trl_only(spec: Experiment, trainer: str) -> Iterator[str]:
    """Yield an error message for each setting that trl's `trainer` does not support, or that was not tested with it."""
    objective, launch = f"objective {spec.objective.name}", spec.launch
    if spec.method.name == "unsloth":
        yield f"{objective} with method unsloth is not supported: use lora, qlora or full"
    if "torchao" in spec.train.optimizer:
        yield (
            f"train.optimizer {spec.train.optimizer} with {objective}: trl's {trainer} does not support it: use "
            "adamw_torch or adamw_bnb_8bit"
        )
    if launch.framework != "trl":
        yield f"{objective} needs launch.framework trl, not {launch.framework}: use trl, or objective sft"
    if launch.gpus > 1:
        yield f"{objective} supports one GPU and launch.gpus is {launch.gpus}: set it to 1"


class Dpo(Part):
    """Direct preference optimization: raise the likelihood of the chosen answer over the rejected one."""

    pairs: ClassVar[bool] = True
    prompts: ClassVar[bool] = False
    sequences: ClassVar[int] = 2
    group: ClassVar[int] = 1

    name: Literal["dpo"] = "dpo"
    beta: Float = Field(0.1, gt=0, description="penalty for moving away from the reference model")
    precompute_ref_log_probs: Switch = Field(
        False,
        description="compute the reference's log-probabilities once before training; off: in each step, with the "
        "adapters disabled, or with a second model for method full",
    )

    @property
    def in_step(self) -> bool:
        return not self.precompute_ref_log_probs

    def incompatibilities(self, spec: Experiment) -> Iterator[str]:
        data = spec.dataset
        if getattr(spec.method, "dropout", 0):
            yield "objective dpo: trl disables dropout so that model and reference agree: set method.dropout to 0"
        yield from _trl_only(spec, "DPOTrainer")
        if data.has_images:
            yield f"objective dpo supports only text, and {data.name} has images: use another dataset"
        elif (format_name := data.format or data.source.format) not in (None, PREFERENCE):
            yield (
                f"objective dpo needs pairs, and the rows of {data.name} are {format_name}: use a file or a hub "
                "dataset with prompt, chosen and rejected, or dataset=synthetic"
            )
        if data.loss_on == "all":
            yield "objective dpo compares answers to one prompt: set dataset.loss_on to completion"
        excluded = {name: OPTIMIZATIONS[name].not_with_dpo for name in switched_on(spec.optimizations)}
        yield from (f"optimizations.{name} with objective dpo: {why}" for name, why in excluded.items() if why)


def _reward_names(value: object) -> object:
    """Return the reward functions as a tuple of `file.py:function`. Raise ValueError for another form."""
    rewards = [value] if isinstance(value, str) else value
    if rewards is None:
        return None
    if not (isinstance(rewards, (list, tuple)) and rewards and all(_REWARD.fullmatch(str(each)) for each in rewards)):
        raise ValueError("must be path/to/file.py:function, or a list of them")
    return tuple(rewards)


class Grpo(Part):
    """Group relative policy optimization: generate several answers to each prompt, and reinforce the better answers."""

    pairs: ClassVar[bool] = False
    prompts: ClassVar[bool] = True
    sequences: ClassVar[int] = 1

    name: Literal["grpo"] = "grpo"
    num_generations: Int = Field(8, ge=2, le=4096, description="number of completions per prompt")
    max_completion_length: Int = Field(512, ge=1, le=1_048_576, description="maximum tokens per completion")
    fixed_length: Switch = Field(
        False, description="always generate max_completion_length tokens; all runs then generate the same number"
    )
    temperature: Float = Field(1.0, gt=0, le=100, description="sampling temperature")
    beta: Float = Field(0.0, ge=0, description="penalty for moving away from the reference model; 0: no reference")
    loss_type: Literal["dapo", "dr_grpo", "bnpo", "grpo"] = Field("dapo", description="how the loss is normalized")
    reward: Annotated[str | tuple[str, ...] | None, BeforeValidator(_reward_names)] = Field(
        None,
        description="your reward function, path/to/file.py:function, or a list of functions, to add their values; "
        "default: the share of even token ids",
    )

    @property
    def group(self) -> int:
        return self.num_generations

    @property
    def in_step(self) -> bool:
        return bool(self.beta)

    def incompatibilities(self, spec: Experiment) -> Iterator[str]:
        yield from self._of_batches(spec)
        yield from self._of_data(spec)
        if getattr(spec.method, "dropout", 0):
            yield "objective grpo: generation and training must use the same model: set method.dropout to 0"
        if self.beta and not spec.method.adapters:
            yield (
                "objective grpo: with method full trl loads a second model in float32 as reference: set objective.beta "
                "to 0, or train adapters (lora, qlora)"
            )
        for name in switched_on(spec.optimizations):
            if name not in ("attention", "gradient_checkpointing"):
                yield f"optimizations.{name} with objective grpo was not compared with plain grpo: set it to off"
        if spec.measure.profile != "off":
            yield "measure.profile with objective grpo: a profile does not cover generation: profile objective sft"
        if spec.train.precision == "fp16":
            yield "train.precision fp16 with objective grpo was not tested: set it to bf16 or fp32"
        yield from _trl_only(spec, "GRPOTrainer")

    def _of_batches(self, spec: Experiment) -> Iterator[str]:
        size, group, samples = spec.global_batch, self.num_generations, spec.dataset.samples
        if size % group:
            yield (
                f"objective grpo: the {size} completions per step (train.batch_size x "
                f"train.gradient_accumulation_steps) are not a multiple of objective.num_generations {group}: set "
                f"train.batch_size to {group}"
            )
        elif samples is not None and samples < size // group:
            yield f"objective grpo: a step needs {size // group} prompts and dataset.samples is {samples}: raise it"

    def _of_data(self, spec: Experiment) -> Iterator[str]:
        data = spec.dataset
        format_name = data.format or data.source.format
        if data.has_images:
            yield f"objective grpo supports only text, and {data.name} has images: use another dataset"
        elif format_name in (PREFERENCE, "text"):
            yield (
                f"objective grpo needs prompts, and the rows are {format_name}: set dataset.format to {PROMPT} and "
                "dataset.columns to {prompt: COLUMN}"
            )
        if data.loss_on == "all":
            yield "objective grpo trains only on its own completions: set dataset.loss_on to completion"
        if data.eval_samples:
            yield "objective grpo does not support evaluation: set dataset.eval_samples to 0"


Objective = Annotated[Sft | Dpo | Grpo, Field(discriminator="name")]
OBJECTIVES: dict[str, type[Sft] | type[Dpo] | type[Grpo]] = {"sft": Sft, "dpo": Dpo, "grpo": Grpo}


def reward_parts(reward: str) -> tuple[Path, str]:
    """Split `path/to/file.py:function` into the path of the file and the name of the function."""
    file, _, function = reward.rpartition(":")
    return Path(file), function


def absolute_reward(value: Any, folder: Path) -> Any:
    """Return reward functions (`file.py:function`) with absolute paths. Return other values unchanged."""
    if isinstance(value, list):
        return [absolute_reward(each, folder) for each in value]
    if not (isinstance(value, str) and _REWARD.fullmatch(value)):
        return value
    file, function = reward_parts(value)
    return f"{os.path.abspath(folder / os.path.expanduser(file))}:{function}"

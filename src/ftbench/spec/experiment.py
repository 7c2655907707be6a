"""Declare the spec of one run as a frozen object."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from ftbench.facts import architecture, architectures, read_facts
from ftbench.spec.base import Float, Int, Part, Switch, Word
from ftbench.spec.datasets import Dataset
from ftbench.spec.incompatibilities import incompatibilities
from ftbench.spec.incompatibilities import resolve as resolve
from ftbench.spec.launch import Launch as Launch
from ftbench.spec.methods import Lora, Method
from ftbench.spec.objectives import Objective, Sft
from ftbench.spec.optimizations import Optimizations


def experiment_name(value: str) -> str:
    """Check the name of an experiment, and return it. Raise ValueError for a name that a folder cannot have."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}", value):
        raise ValueError("may have up to 80 letters (a to z), digits and . _ -, and must begin with a letter or digit")
    return value


class Model(Part):
    """The model, with pretrained or random weights."""

    id: str = Field(
        min_length=1,
        description="hub id, or a name from `ftbench list models`; default with `path`: the name of the directory",
    )
    weights: Literal["pretrained", "random"] = Field(
        "pretrained",
        description="random: same shape and speed, no download, no useful learning; default of names like tiny/qwen3",
    )
    revision: str | None = Field(None, description="commit, tag or branch on the hub")
    path: str | None = Field(None, description="local model directory, or a config.json for random weights")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="type of the loaded weights; auto: bfloat16 on a GPU that supports it, else float32"
    )
    seed: Int = Field(0, ge=0, description="seed of random weights")
    trust_remote_code: Switch = Field(False, description="run code from the model repository; needs a pinned revision")

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: object) -> object:
        """Set the default of `weights` for tiny models, which are on no hub, and that of `id` for a path."""
        if not isinstance(values, dict):
            return values
        if not isinstance(values.get("path"), str):
            owners = {name.partition("/")[0] for models in read_facts("tiny.yaml").values() for name in models}
            is_tiny = str(values.get("id")).partition("/")[0] in owners
            return {"weights": "random", **values} if is_tiny else values
        if values.get("id") is not None:
            return values
        path = Path(values["path"])
        name = path.parent.name if path.suffix == ".json" else path.name
        return {**values, "id": name} if name else values

    @model_validator(mode="after")
    def _check(self) -> Model:
        if self.trust_remote_code and not re.fullmatch(r"[0-9a-f]{40}", self.revision or ""):
            raise ValueError("`trust_remote_code` needs `revision`: the 40 hex digits of a commit whose code you trust")
        if self.weights == "random" and not self.path and not architecture(self.id):
            known = ", ".join(sorted(architectures()))
            raise ValueError(f"the shape of {self.id} is unknown: set `path: config.json`, or use one of {known}")
        return self


class Train(Part):
    """Training settings. Most defaults come from the founding study (docs/evidence/founding-text.md)."""

    removed = ("report_to",)

    batch_size: Int = Field(4, ge=1, le=65536, description="samples per forward pass and GPU")
    gradient_accumulation_steps: Int = Field(1, ge=1, le=65536, description="forward passes per optimizer step")
    epochs: Float = Field(1.0, gt=0, le=10_000, description="passes over the data; ignored if max_steps is set")
    max_steps: Int | None = Field(None, ge=1, description="stop after this many optimizer steps")
    learning_rate: Float = Field(2e-4, gt=0, le=10)
    lr_scheduler: Literal["constant", "linear", "cosine", "constant_with_warmup"] = "linear"
    warmup_steps: Int = Field(0, ge=0, description="number of steps in which the learning rate rises from 0")
    weight_decay: Float = Field(0.0, ge=0, le=10)
    optimizer: Literal[
        "adamw_torch", "adamw_torch_fused", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torchao_fp32",
        "adamw_torchao_bf16", "adamw_torchao_8bit", "sgd",
    ] = Field(
        "adamw_torch",
        description="AdamW of torch (fused: one kernel), bitsandbytes or torchao, or sgd; the names of torchao end "
        "with the type of the state; torchao rounds 16-bit weights stochastically, to keep small updates",
    )  # fmt: skip
    max_grad_norm: Float = Field(0.3, ge=0, description="gradients are clipped to this norm; 0: no clipping")
    precision: Literal["auto", "bf16", "fp16", "fp32"] = Field(
        "auto", description="autocast type (fp32: no autocast); auto: bf16 on a GPU that supports it, else fp32"
    )
    seed: Int = Field(42, ge=0, lt=2**32, description="seed of the initial adapters and of dropout")


# The values of `measure.control`. Each one damages the training on purpose, to test that `ftbench parity` detects it.
# `worker/measure/controls.py` applies them.
CONTROLS = {
    "learning_rate_0": "nothing is learned",
    "reversed_gradient": "the gradient has the opposite sign",
    "lora_scale_x0.5": "the output of the adapters is multiplied by 0.5",
    "lora_scale_x1.5": "the output of the adapters is multiplied by 1.5",
    "lora_scale_x1.05": "the output of the adapters is multiplied by 1.05",
    "projection_frozen": "v_proj is never trained",
    "layer_frozen": "one layer is never trained",
    "lora_a_frozen": "lora_A is never trained",
    "gradient_entries_lost": "1 % of the gradient entries of one layer are zero",
    "layer_gradient_reversed": "the gradient of one layer has the opposite sign",
    "learning_rate_x1.5": "the learning rate is multiplied by 1.5",
    "learning_rate_x0.1": "the learning rate is multiplied by 0.1",
    "gradient_noise": "noise with the size of the gradient is added to the gradient",
    "frozen_weights_noise": "the frozen weights have 5 % noise",
    "positions_zero": "every token has position 0",
    "attention_off": "attention returns zeros",
    "loss_over_padding": "padding tokens contribute to the loss",
    "prompts_not_masked": "prompt tokens contribute to the loss",
    "packed_samples_see_each_other": "samples of a packed row attend to each other",
    "accumulation_divisor": "each micro-batch has the same weight, independent of its number of label tokens",
}
DAMAGED, RECORDED = "a control", "recorded for a parity check"  # first words of the warnings of such runs
GRADED = tuple(CONTROLS)[2:]  # the controls that `ftbench parity --controls all` runs
OF_ADAPTERS = (*(name for name in GRADED if name.startswith("lora_")), "frozen_weights_noise")
STEPS_BEFORE_PROFILE = 6  # the first ones load kernels and compile; the last three are timed


class Measure(Part):
    """What a run measures, and how often."""

    removed = ("generate",)

    repeats: Int = Field(1, ge=1, le=100, description="runs per cell of a sweep, each in a new process")
    warmup: Literal["auto"] | Annotated[Int, Field(ge=0)] = Field(
        "auto", description="steps before the steady window; auto: detected"
    )
    eval: Annotated[Literal["off", "end", "epoch"], Word] = Field(
        "end", description="when to evaluate, if dataset.eval_samples is set"
    )
    allow_fallback: Switch = Field(False, description="run even if a setting could not be applied")
    share_gpu: Switch = Field(
        False,
        description="do not wait for other ftbench runs on this GPU; speed and device memory are then not valid. "
        "`parity` starts two runs at a time",
    )
    save_adapter: Switch = Field(
        False, description="save the trained adapters (method full: the model) in the directory of the run"
    )
    profile: Annotated[Literal["off", "on"], Word] = Field(
        "off", description="profile a few steps; reports ignore the speed of this run"
    )
    profile_steps: Int = Field(3, ge=1, le=20, description="number of profiled steps, after the warm-up")
    gradients: Int = Field(
        0, ge=0, le=20, description="parity: number of steps with recorded gradients, at initial and trained weights"
    )
    weights_of: str = Field(
        "", pattern=r"[A-Za-z0-9._-]*", description="parity: name of the run whose trained weights are compared"
    )
    keep_weights: Switch = Field(False, description="parity: keep the trained tensors before and after training")
    round_products: Switch = Field(
        False, description="parity: round the inputs of matrix products to 8 bits like fp8, and multiply in 32 bits"
    )
    round_scale: Float = Field(
        1.0, gt=0, le=1, description="parity: factor for the scales of `round_products`; it changes the rounding errors"
    )
    control: Annotated[Literal["off", *CONTROLS], Word] = Field(  # type: ignore[valid-type]
        "off", description="break the training on purpose; all but the first three are controls of `ftbench parity`"
    )

    @property
    def steps_to_profile(self) -> int:
        """The number of steps of a profiled run: 6 until the speed is steady, 1 to warm up the profiler,
        `profile_steps`, and 1 to record memory."""
        return STEPS_BEFORE_PROFILE + 1 + self.profile_steps + 1


class Experiment(Part):
    """The complete spec of one run."""

    name: Annotated[str, AfterValidator(experiment_name)] = Field(description="default: the name of the file")
    model: Model
    method: Method = Field(default_factory=Lora)
    objective: Objective = Field(default_factory=Sft)
    dataset: Dataset = Field(default_factory=Dataset)
    train: Train = Field(default_factory=Train)
    optimizations: Optimizations = Field(default_factory=Optimizations)
    measure: Measure = Field(default_factory=Measure)
    launch: Launch = Field(default_factory=Launch)

    @property
    def resolved(self) -> dict[str, dict[str, object]]:
        """The values that replaced `auto`: {dotted key: {"value": value, "reason": reason}}."""
        kept: dict[str, dict[str, object]] = self.__dict__.get("_resolved", {})
        return kept

    @property
    def global_batch(self) -> int:
        """Samples per optimizer step, summed over all ranks. With packing, rows per step instead of samples."""
        return self.train.batch_size * self.train.gradient_accumulation_steps * self.launch.data_parallel_size

    @property
    def second_model(self) -> bool:
        """Whether training loads a second model as reference. With adapters, no second model is needed."""
        return self.objective.in_step and not self.method.adapters

    @field_validator("method", "objective", mode="before")
    @classmethod
    def _named(cls, value: object, info: ValidationInfo) -> object:
        return {"name": "lora" if info.field_name == "method" else "sft", **value} if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _combinations(self) -> Experiment:
        if problems := incompatibilities(self):
            raise ValueError("; ".join(problems))
        return self

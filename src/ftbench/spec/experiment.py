"""The spec: what to train and how, as one frozen object."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from ftbench.core.architectures import architectures
from ftbench.spec import frameworks
from ftbench.spec.base import Float, Int, Part, Switch, Word
from ftbench.spec.controls import CONTROLS
from ftbench.spec.datasets import Dataset
from ftbench.spec.generate import Generate, switched
from ftbench.spec.incompatibilities import incompatibilities
from ftbench.spec.methods import Lora, Method
from ftbench.spec.objectives import Objective, Sft
from ftbench.spec.optimizations import Optimizations
from ftbench.spec.resolve import resolve as resolve
from ftbench.spec.strategies import MOST_GPUS, launch_in_full


def experiment_name(value: str) -> str:
    """Return the name of an experiment, which is a folder's too. Raises ValueError for one that cannot be."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}", value):
        raise ValueError(
            "may hold letters, digits, dot, dash and underscore, at most 80, and begins with a letter or digit"
        )
    return value


class Model(Part):
    """Which model, and whether its weights are the published ones or random ones of the same shape."""

    id: str = Field(
        min_length=1,
        description="hub id, or a name of `ftbench list models`; beside `path` its directory's name if empty",
    )
    weights: Literal["pretrained", "random"] = Field(
        "pretrained", description="random: same shape and speed, nothing downloaded, nothing learned"
    )
    revision: str | None = Field(None, description="commit, tag or branch on the hub")
    path: str | None = Field(
        None, description="local directory with the model, or for random weights a config.json to take the shape from"
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="type of the loaded weights; auto is bfloat16 on a GPU that has it, float32 elsewhere"
    )
    seed: Int = Field(0, ge=0, description="of random weights")
    trust_remote_code: Switch = Field(False, description="run code that comes with the model; needs a pinned revision")

    @model_validator(mode="before")
    @classmethod
    def _named_by_its_path(cls, values: object) -> object:
        if not isinstance(values, dict) or values.get("id") is not None or not isinstance(values.get("path"), str):
            return values
        path = Path(values["path"])
        name = path.parent.name if path.suffix == ".json" else path.name
        return {**values, "id": name} if name else values

    @model_validator(mode="after")
    def _check(self) -> Model:
        if self.trust_remote_code and not re.fullmatch(r"[0-9a-f]{40}", self.revision or ""):
            raise ValueError(
                "`trust_remote_code` needs `revision`: the 40 hex digits of the commit whose code you read"
            )
        if self.weights == "random" and not self.path and self.id not in architectures():
            known = ", ".join(sorted(architectures()))
            raise ValueError(f"no shape is known for {self.id}: give `path: config.json`, or take one of {known}")
        return self


SERVICES = ("tensorboard", "mlflow", "wandb", "trackio")  # each is also the name of the package it needs


def _services(value: object) -> object:
    """Read `tensorboard` for `[tensorboard]`; none, off or nothing for an empty list."""
    if value is None or value is False or value == "none":
        return ()
    return (value,) if isinstance(value, str) else value


class Train(Part):
    """The recipe. Defaults are the founding study's where it names a value."""

    batch_size: Int = Field(4, ge=1, le=65536, description="samples a forward pass, on each of several GPUs")
    gradient_accumulation_steps: Int = Field(1, ge=1, le=65536, description="forward passes an optimizer step")
    epochs: Float = Field(1.0, gt=0, le=10_000, description="passes over the data; ignored with max_steps")
    max_steps: Int | None = Field(None, ge=1, description="stop after this many optimizer steps")
    learning_rate: Float = Field(2e-4, gt=0, le=10)
    lr_scheduler: Literal["constant", "linear", "cosine", "constant_with_warmup"] = "linear"
    warmup_steps: Int = Field(0, ge=0, description="steps over which the learning rate rises")
    weight_decay: Float = Field(0.0, ge=0, le=10)
    optimizer: Literal[
        "adamw_torch", "adamw_torch_fused", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torchao_fp32",
        "adamw_torchao_bf16", "adamw_torchao_8bit", "sgd",
    ] = Field(
        "adamw_torch",
        description="AdamW of torch (fused: one kernel), bitsandbytes or torchao, or sgd; torchao's keeps its state in "
        "the type that its name ends in, and rounds 16-bit weights up or down at random, so that small updates are not "
        "lost",
    )  # fmt: skip
    max_grad_norm: Float = Field(0.3, ge=0, description="gradients are scaled down to this norm; 0 leaves them")
    precision: Literal["auto", "bf16", "fp16", "fp32"] = Field(
        "auto",
        description="of the products (autocast; fp32 is none); auto is bf16 on a GPU that has it, fp32 elsewhere",
    )
    seed: Int = Field(42, ge=0, lt=2**32, description="of adapters and dropout")
    report_to: Annotated[
        tuple[Literal["tensorboard", "mlflow", "wandb", "trackio"], ...], BeforeValidator(_services)
    ] = Field((), description="services that the steps are logged to while they happen; none if left out")


def _warmup(value: object) -> object:
    if value != "auto" and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise ValueError("must be auto or a whole number, 0 or more")
    return value


STEPS_BEFORE_PROFILE = 6  # at the least: the first ones load kernels and compile, the last three are timed


class Measure(Part):
    """What is measured besides the training itself."""

    repeats: Int = Field(1, ge=1, le=100, description="runs of each cell of a sweep, each in a fresh process")
    warmup: Annotated[Literal["auto"] | Int, BeforeValidator(_warmup)] = Field(
        "auto", description="steps before the steady window; auto finds them"
    )
    eval: Annotated[Literal["off", "end", "epoch"], Word] = Field(
        "end", description="when to evaluate, if dataset.eval_samples is set"
    )
    allow_fallback: Switch = Field(False, description="measure even where a library did not do what was asked for")
    share_gpu: Switch = Field(
        False,
        description="do not wait for other runs of ftbench on this GPU; speed and device memory are then nobody's",
    )
    save_adapter: Switch = Field(
        False, description="keep what was trained in the run's directory: the adapters, or with method full the model"
    )
    profile: Annotated[Literal["off", "on"], Word] = Field(
        "off", description="record what a few steps do, in a run that is never used for speed"
    )
    profile_steps: Int = Field(3, ge=1, le=20, description="steps that are profiled, once speed is steady")
    gradients: Int = Field(
        0, ge=0, le=20, description="parity: steps at the initial and at trained weights whose gradients are recorded"
    )
    weights_of: str = Field(
        "", pattern=r"[A-Za-z0-9._-]*", description="parity: run in the same folder whose weights are compared at"
    )
    keep_weights: Switch = Field(False, description="parity: keep the trained tensors before and after training")
    control: Annotated[Literal["off", *CONTROLS], Word] = Field(  # type: ignore[valid-type]
        "off", description="damage the training on purpose; `ftbench parity` must notice (`ftbench list controls`)"
    )
    generate: Annotated[Generate | None, BeforeValidator(switched)] = Field(
        None, description="prompts (a YAML file, or a section) that are answered before and after training"
    )

    @property
    def steps_to_profile(self) -> int:
        """How many steps a run takes whose last ones are profiled: until it is steady, one that the profiler itself
        warms up in, those that count, and one in which memory is recorded."""
        return STEPS_BEFORE_PROFILE + 1 + self.profile_steps + 1


def _patience(value: object) -> object:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
    if value not in ("auto", "off") and not number:
        raise ValueError("must be auto, off, or a number of seconds above 0")
    return value


class Launch(Part):
    """How the spec becomes processes."""

    gpus: Int = Field(1, ge=1, le=MOST_GPUS, description="GPUs that one run trains on, a process each")
    nodes: Int = Field(1, ge=1, le=MOST_GPUS, description="machines over which these GPUs are spread evenly")
    strategy: Literal["none", "ddp", "fsdp", "zero1", "zero2", "zero3", "tp", "tp+fsdp", "ep", "cp", "ulysses"] = Field(
        "none", description="how a run uses several GPUs; ddp if left out beside several"
    )
    tp: Int | None = Field(None, ge=2, le=512, description="GPUs that share each matrix under tp+fsdp; 2 if left out")
    offload: Literal["none", "optimizer", "params"] = Field(
        "none", description="what waits in the host's memory: the optimizer's states, or these and the parameters"
    )
    framework: Annotated[Literal["trl", "axolotl", "llamafactory", "ms-swift"], BeforeValidator(frameworks.named)] = (
        Field("trl", description="who runs the training loop")
    )
    python: str | None = Field(None, min_length=1, description="interpreter of the environment that has the framework")
    settings: Literal["plain", "best"] = Field(
        "plain", description="of another framework: plain, or its own best: its kernels, fused loss and packing"
    )
    timeout_s: Float | None = Field(None, gt=0, description="end the run after this many seconds")
    no_step_s: Annotated[Literal["auto", "off"] | float, BeforeValidator(_patience), Word] = Field(
        "auto", description="end the run when nothing moves for this many seconds; auto learns it from the run's steps"
    )
    mock: Annotated[Literal["off", "ok", "oom", "crash", "hang", "slow", "flaky"], Word] = Field(
        "off", description="train nothing and pretend: to try a sweep without a GPU"
    )
    mock_fits: Int = Field(8, ge=0, description="largest batch that fits where mock is oom")

    @model_validator(mode="before")
    @classmethod
    def _in_full(cls, values: object) -> object:
        return launch_in_full(values) if isinstance(values, dict) else values

    @property
    def ranks(self) -> int:
        """How many processes train, each on a GPU of its own."""
        return self.gpus

    @property
    def is_mesh(self) -> bool:
        """Whether these GPUs make a mesh of `tp` by two or more."""
        return self.tp is not None and self.gpus % self.tp == 0 and self.gpus > self.tp

    @property
    def gpus_of_node(self) -> int:
        """How many of them are on one machine."""
        return self.gpus // self.nodes

    @property
    def sharded(self) -> bool:
        """Whether no rank holds the whole model."""
        return self.ranks > 1 and self.strategy not in ("ddp", "zero1", "zero2")

    @property
    def shares(self) -> int:
        """Into how many shares a step's batch is dealt: ranks that hold parts of one layer see the same."""
        if self.tp is not None:
            return self.ranks // self.tp
        return 1 if self.strategy in ("tp", "ep", "cp", "ulysses") else self.ranks

    @property
    def parts_of_sequence(self) -> int:
        """Into how many equal parts a sequence is cut: under cp each GPU has one from the front and one from the back,
        so that all have as many keys to look at."""
        return 2 * self.ranks if self.strategy == "cp" else 1


class Experiment(Part):
    """One spec, resolved."""

    name: Annotated[str, AfterValidator(experiment_name)] = Field(description="the file's stem if left out")
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
        """Return the settings that were `auto`: dotted key → `value` and `reason`."""
        kept: dict[str, dict[str, object]] = self.__dict__.get("_resolved", {})
        return kept

    @property
    def global_batch(self) -> int:
        """Samples (rows, where they are packed) of an optimizer step, over all ranks."""
        return self.train.batch_size * self.train.gradient_accumulation_steps * self.launch.shares

    @property
    def second_model(self) -> bool:
        """Whether the reference is a model of its own: where weights are trained there are none under adapters."""
        return self.objective.in_step and not self.method.adapters

    @field_validator("method", "objective", mode="before")
    @classmethod
    def _named(cls, value: object, info: ValidationInfo) -> object:
        return {"name": "lora" if info.field_name == "method" else "sft", **value} if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _combinations(self) -> Experiment:
        problems = list(incompatibilities(self))
        if problems:
            raise ValueError("; ".join(problems))
        return self

"""The section `launch:` of a spec: the processes of a run."""

from collections.abc import Mapping
from typing import Annotated, Literal, cast

from pydantic import BeforeValidator, Field, model_validator

from ftbench.core import pipeline
from ftbench.spec.base import Float, Int, Part, Word
from ftbench.spec.strategies import STRATEGIES

MOST_GPUS = 1024
_OFF = ("tp", "pp", "micro_batches", "split")  # keys that may be `off`


def _patience(value: object) -> object:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
    if value not in ("auto", "off") and not number:
        raise ValueError("must be auto, off, or a number of seconds above 0")
    return value


def _count(value: object) -> object:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(
            "must be the number of GPUs of a run, for example 2. CUDA_VISIBLE_DEVICES=0,1 selects them, and "
            "`ftbench sweep --gpu-ids 0,1` runs one cell on each"
        )
    return value


class Launch(Part):
    """The processes of a run."""

    gpus: Annotated[Int, BeforeValidator(_count)] = Field(
        1, ge=1, le=MOST_GPUS, description="GPUs of one run, with one process each"
    )
    nodes: Int = Field(1, ge=1, le=MOST_GPUS, description="machines; each has the same number of these GPUs")
    strategy: Literal[
        "none", "ddp", "fsdp", "zero1", "zero2", "zero3", "tp", "tp+fsdp", "ep", "cp",
        "pp", "pp+ddp", "pp+fsdp", "pp+tp", "pp+tp+fsdp",
    ] = Field("none", description="how a run uses several GPUs; default with several GPUs: ddp")  # fmt: skip
    tp: Int | None = Field(
        None, ge=2, le=512, description="GPUs that share each matrix with tp+fsdp and pp+tp; default: 2"
    )
    pp: Int | None = Field(None, ge=2, le=512, description="GPUs that share the layers with pp; default: all, or 2")
    micro_batches: Int | None = Field(
        None, ge=1, le=4096, description="parts of a batch that pass through the stages of pp; default: 2 * pp"
    )
    schedule: Literal["gpipe", "1f1b", "interleaved-1f1b", "zbv"] = Field(
        "1f1b", description="order of the micro-batches in a stage of pp; the last two give each GPU two stages"
    )
    split: tuple[Annotated[Int, Field(ge=1)], ...] | None = Field(
        None, description="layers of each stage of pp, in order; default: equally slow stages"
    )
    offload: Literal["none", "optimizer", "params"] = Field(
        "none", description="what is kept in host memory: the optimizer state, or the optimizer state and parameters"
    )
    framework: Literal["trl", "axolotl", "llamafactory", "ms-swift", "megatron", "verl"] = Field(
        "trl", description="the framework that runs the training loop"
    )
    python: str | None = Field(None, min_length=1, description="Python interpreter of the framework's environment")
    settings: Literal["plain", "best"] = Field(
        "plain", description="settings of another framework: plain, or best (its kernels, fused loss and packing)"
    )
    timeout_s: Float | None = Field(None, gt=0, description="end the run after this many seconds")
    no_step_s: Annotated[Literal["auto", "off"] | float, BeforeValidator(_patience), Word] = Field(
        "auto", description="end the run if nothing happens for this many seconds; auto: learned from the run's steps"
    )
    mock: Annotated[Literal["off", "ok", "oom", "crash", "hang", "slow", "flaky"], Word] = Field(
        "off", description="pretend to train, to try a sweep without a GPU"
    )
    mock_fits: Int = Field(8, ge=0, description="largest batch size that fits with mock oom")

    @model_validator(mode="before")
    @classmethod
    def _in_full(cls, values: object) -> object:
        return _launch_in_full(values) if isinstance(values, dict) else values

    @property
    def ranks(self) -> int:
        """The number of training processes, one per GPU."""
        return self.gpus

    @property
    def is_mesh(self) -> bool:
        """Whether the GPUs form a mesh of `tp` times two or more."""
        return self.tp is not None and self.gpus % self.tp == 0 and self.gpus > self.tp

    @property
    def gpus_of_node(self) -> int:
        """The number of GPUs per machine."""
        return self.gpus // self.nodes

    @property
    def sharded(self) -> bool:
        """Whether no rank holds the complete model."""
        return self.ranks > 1 and STRATEGIES[self.strategy].sharded

    @property
    def shares(self) -> int:
        """The number of different batches per step (data-parallel size)."""
        if self.tp or self.pp:
            return self.ranks // ((self.tp or 1) * (self.pp or 1))
        strategy = STRATEGIES.get(self.strategy)
        return 1 if strategy and strategy.same_samples else self.ranks

    @property
    def stages(self) -> int:
        """The number of stages of the pipeline, 1 without pp."""
        return self.pp * pipeline.parts(self.schedule) if self.pp else 1

    @property
    def parts_of_sequence(self) -> int:
        """The number of equal parts of a sequence.

        With cp each GPU has one part from the front and one from the back, so that all have the same number of keys.
        """
        return 2 * self.ranks if self.strategy == "cp" else 1


def _launch_in_full(launch: Mapping[str, object]) -> Mapping[str, object]:
    """Return the section with the defaults that depend on other keys. Raise ValueError for an impossible mesh."""
    launch = {key: None if key in _OFF and value is False else value for key, value in launch.items()}
    strategy = launch.get("strategy")
    if str(strategy).startswith("pp") or (strategy is None and launch.get("pp") is not None):
        return _stages(launch)
    if "fsdp" in launch:
        launch = _mesh(launch)
    if launch.get("strategy") == "tp+fsdp":
        return {**launch, "tp": launch.get("tp") or 2}
    several = type(gpus := launch.get("gpus")) is int and gpus > 1
    return {"strategy": "ddp", **launch} if several else launch


def _mesh(launch: Mapping[str, object]) -> dict[str, object]:
    """Convert `{tp: 2, fsdp: 4}` to gpus and strategy. If `--set` gives another strategy, the second number is
    ignored."""
    tp, fsdp = launch.get("tp"), launch["fsdp"]
    others = {key: value for key, value in launch.items() if key != "fsdp"}
    if launch.get("strategy", "tp+fsdp") != "tp+fsdp":
        return others
    if type(tp) is not int or type(fsdp) is not int or not 2 <= min(tp, fsdp) <= max(tp, fsdp) <= 512:
        raise ValueError("a mesh needs `tp` and `fsdp`, each from 2 to 512; otherwise set `gpus` and `strategy`")
    if launch.get("gpus", tp * fsdp) != tp * fsdp:
        raise ValueError(f"`gpus` must be `tp` times `fsdp`, {tp * fsdp}: leave it out")
    return {**others, "gpus": tp * fsdp, "strategy": "tp+fsdp"}


def _stages(launch: Mapping[str, object]) -> dict[str, object]:
    """Return a launch with pp and all its numbers. `fsdp` is the number of shards.

    A strategy `pp` gets the parts that follow from the numbers: `pp+tp`, `pp+ddp`, ..."""
    others = {key: value for key, value in launch.items() if key != "fsdp"}
    name, gpus, fsdp = str(launch.get("strategy") or "pp"), launch.get("gpus"), launch.get("fsdp")
    tp = launch.get("tp") or (2 if "tp" in name.split("+") else 1)
    if gpus == 1 or not all(type(each) is int for each in (tp, gpus or 1, launch.get("pp") or 1, fsdp or 1)):
        return others  # reported later
    tp, gpus, fsdp = cast(int, tp), cast(int | None, gpus), cast(int | None, fsdp)
    all_stages = gpus is not None and fsdp is None and name in ("pp", "pp+tp")
    pp = cast(int | None, launch.get("pp")) or (cast(int, gpus) // tp if all_stages else 2)
    gpus = pp * tp * (fsdp or 1) if gpus is None else gpus
    shares = fsdp or max(1, gpus // (pp * tp))
    if pp * tp * shares != gpus:
        numbers = {"pp": pp, "tp": tp, "fsdp": shares}
        product = " x ".join(f"{key} {number}" for key, number in numbers.items() if number > 1)
        raise ValueError(f"`gpus` is {gpus}, and {product} is {pp * tp * shares}: set gpus to {pp * tp * shares}")
    if name == "pp":
        sharded = fsdp or (tp > 1 and shares > 1)
        name = "+".join(["pp", *["tp"] * (tp > 1), *["fsdp" if sharded else "ddp"] * (shares > 1)])
    made = {"gpus": gpus, "strategy": name, "pp": pp, "tp": tp if tp > 1 else None}
    return {**others, **made, "micro_batches": launch.get("micro_batches") or 2 * pp}

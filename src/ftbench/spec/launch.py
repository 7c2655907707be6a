"""Declare the section `launch:` of a spec: GPUs, strategy, framework and time limits of a run."""

from collections.abc import Mapping
from typing import Annotated, Literal, cast

from pydantic import Field, model_validator

from ftbench.core import pipeline
from ftbench.spec.base import Float, Int, Part, Word
from ftbench.spec.strategies import STRATEGIES

MOST_GPUS = 1024
_OFF = ("tp", "pp", "micro_batches", "split")  # keys that accept `off`


class Launch(Part):
    """The section `launch:`, which describes the processes of a run."""

    gpus: Int = Field(1, ge=1, le=MOST_GPUS, description="GPUs of one run, with one process each")
    nodes: Int = Field(1, ge=1, le=MOST_GPUS, description="number of machines; each has the same number of GPUs")
    strategy: Literal["none", *STRATEGIES] = Field(  # type: ignore[valid-type]
        "none", description="how a run uses several GPUs; default with several GPUs: ddp"
    )
    tp: Int | None = Field(
        None, ge=2, le=512, description="tp+fsdp and pp+tp: number of GPUs that share each matrix; default: 2"
    )
    pp: Int | None = Field(None, ge=2, le=512, description="GPUs that share the layers with pp; default: all, or 2")
    micro_batches: Int | None = Field(
        None, ge=1, le=4096, description="pp: number of parts of a batch (micro-batches); default: 2 * pp"
    )
    schedule: Literal["gpipe", "1f1b", "interleaved-1f1b", "zbv"] = Field(
        "1f1b", description="pp: order of the micro-batches in a stage; with the last two, each GPU has two stages"
    )
    split: tuple[Annotated[Int, Field(ge=1)], ...] | None = Field(
        None, description="pp: number of layers of each stage; by default, all stages take about the same time"
    )
    offload: Literal["none", "optimizer", "params"] = Field(
        "none", description="keep in host memory: the optimizer state, or the optimizer state and the parameters"
    )
    framework: Literal["trl", "axolotl", "llamafactory", "ms-swift", "megatron", "verl"] = Field(
        "trl", description="the framework that runs the training loop"
    )
    python: str | None = Field(None, min_length=1, description="Python interpreter of the framework's environment")
    settings: Literal["plain", "best"] = Field(
        "plain", description="settings of another framework: plain, or best (its kernels, fused loss and packing)"
    )
    timeout_s: Float | None = Field(None, gt=0, description="end the run after this many seconds")
    no_step_s: Annotated[Literal["auto", "off"] | Annotated[Float, Field(gt=0)], Word] = Field(
        "auto", description="end the run after this many seconds without progress; auto: depends on the step times"
    )
    mock: Annotated[Literal["off", "ok", "oom", "crash", "hang", "slow", "flaky"], Word] = Field(
        "off", description="pretend to train, to try a sweep without a GPU"
    )
    mock_fits: Int = Field(8, ge=0, description="largest batch size that fits with mock oom")

    @model_validator(mode="before")
    @classmethod
    def _in_full(cls, values: object) -> object:
        """Set the defaults that depend on other keys. Raise ValueError if `gpus` contradicts other keys."""
        if not isinstance(values, dict):
            return values
        launch = {key: None if key in _OFF and value is False else value for key, value in values.items()}
        several = type(gpus := launch.get("gpus")) is int and gpus > 1
        strategy = launch.get("strategy")
        if strategy is None:
            strategy = "pp" if launch.get("pp") is not None else "ddp" if several else "none"
        if (name := str(strategy)).startswith("pp"):
            launch |= _stages(launch, name)
        elif strategy == "tp+fsdp":
            launch["tp"] = launch.get("tp") or 2
        return {"strategy": strategy, **launch}

    @property
    def gpus_of_node(self) -> int:
        """The number of GPUs per machine."""
        return self.gpus // self.nodes

    @property
    def sharded(self) -> bool:
        """Whether each rank holds only a part of the model."""
        return self.gpus > 1 and STRATEGIES[self.strategy].sharded

    @property
    def data_parallel_size(self) -> int:
        """The data-parallel size: the number of different batches that the GPUs process at the same time."""
        if self.tp or self.pp:
            return max(1, self.gpus // ((self.tp or 1) * (self.pp or 1)))
        strategy = STRATEGIES.get(self.strategy)
        return 1 if strategy and strategy.same_samples else self.gpus

    @property
    def stages(self) -> int:
        """The number of pipeline stages, or 1 without pipeline parallelism."""
        return self.pp * pipeline.parts(self.schedule) if self.pp else 1

    @property
    def parts_of_sequence(self) -> int:
        """The number of equal parts that context parallelism splits a sequence into, or 1 with other strategies.

        Each GPU gets one part from the front and one from the back. This gives all GPUs equal work.
        """
        return 2 * self.gpus if self.strategy == "cp" else 1


def _stages(launch: Mapping[str, object], name: str) -> dict[str, object]:
    """Return the keys of `launch:` for pipeline parallelism: gpus, strategy, pp, tp and micro_batches.

    If the given strategy is only `pp`, the numbers of GPUs decide the complete strategy, such as `pp+tp` or `pp+ddp`.
    """
    given = {"gpus": launch.get("gpus"), "pp": launch.get("pp"), "tp": launch.get("tp")}
    if given["gpus"] == 1 or not all(each is None or type(each) is int for each in given.values()):
        return {"strategy": name}  # other code reports this mistake later
    gpus, pp, tp = (cast(int | None, each) for each in given.values())
    tp, one_copy = tp or (2 if "tp" in name.split("+") else 1), name in ("pp", "pp+tp")
    pp = pp or (gpus // tp if gpus and one_copy else 2)
    gpus = gpus or pp * tp * (1 if one_copy else 2)
    copies = max(1, gpus // (pp * tp))
    if pp * tp * copies != gpus:
        product = f"pp {pp}" + (f" x tp {tp}" if tp > 1 else "")
        raise ValueError(f"`gpus` is {gpus}, but {product} uses {pp * tp * copies}: set gpus to {pp * tp * copies}")
    if name == "pp":
        name = "+".join(["pp", *["tp"] * (tp > 1), *["fsdp" if tp > 1 else "ddp"] * (copies > 1)])
    micro_batches = launch.get("micro_batches") or 2 * pp
    return {"gpus": gpus, "strategy": name, "pp": pp, "tp": tp if tp > 1 else None, "micro_batches": micro_batches}

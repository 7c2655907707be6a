"""The section `launch:` of a spec: the processes of a run."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from ftbench.spec.base import Float, Int, Part, Word
from ftbench.spec.strategies import STRATEGIES

MOST_GPUS = 1024


def _patience(value: object) -> object:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
    if value not in ("auto", "off") and not number:
        raise ValueError("must be auto, off, or a number of seconds above 0")
    return value


class Launch(Part):
    """The processes of a run."""

    gpus: Int = Field(1, ge=1, le=MOST_GPUS, description="GPUs of one run, with one process each")
    nodes: Int = Field(1, ge=1, le=MOST_GPUS, description="machines; each has the same number of these GPUs")
    strategy: Literal["none", "ddp", "fsdp", "zero1", "zero2", "zero3", "tp", "tp+fsdp", "ep", "cp", "ulysses"] = Field(
        "none", description="how a run uses several GPUs; default with several GPUs: ddp"
    )
    tp: Int | None = Field(None, ge=2, le=512, description="GPUs that share each matrix with tp+fsdp; default: 2")
    offload: Literal["none", "optimizer", "params"] = Field(
        "none", description="what is kept in host memory: the optimizer state, or the optimizer state and parameters"
    )
    framework: Literal["trl", "axolotl", "llamafactory", "ms-swift"] = Field(
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
        return self.ranks > 1 and (self.strategy not in STRATEGIES or STRATEGIES[self.strategy].sharded)

    @property
    def shares(self) -> int:
        """The number of different batches per step (data-parallel size)."""
        if self.tp is not None:
            return self.ranks // self.tp
        strategy = STRATEGIES.get(self.strategy)
        return 1 if self.strategy == "ulysses" or (strategy and strategy.same_samples) else self.ranks

    @property
    def parts_of_sequence(self) -> int:
        """The number of equal parts of a sequence.

        With cp each GPU has one part from the front and one from the back, so that all have the same number of keys.
        """
        return 2 * self.ranks if self.strategy == "cp" else 1


def _launch_in_full(launch: Mapping[str, object]) -> Mapping[str, object]:
    """Return the section with the defaults that depend on other keys. Raise ValueError for an impossible mesh."""
    if launch.get("tp") is False:  # `off`
        launch = {**launch, "tp": None}
    if "fsdp" in launch:
        launch = _mesh(launch)
    if launch.get("strategy") == "tp+fsdp":
        return {**launch, "tp": launch.get("tp") or 2}
    several = type(gpus := launch.get("gpus")) is int and gpus > 1
    return {"strategy": "ddp", **launch} if several else launch


def _mesh(launch: Mapping[str, object]) -> dict[str, object]:
    """Convert `{tp: 2, fsdp: 4}` to gpus and strategy. Another strategy (from `--set`) drops the second number."""
    tp, fsdp = launch.get("tp"), launch["fsdp"]
    others = {key: value for key, value in launch.items() if key != "fsdp"}
    if launch.get("strategy", "tp+fsdp") != "tp+fsdp":
        return others
    if type(tp) is not int or type(fsdp) is not int or not 2 <= min(tp, fsdp) <= max(tp, fsdp) <= 512:
        raise ValueError("a mesh needs `tp` and `fsdp`, each from 2 to 512; otherwise set `gpus` and `strategy`")
    if launch.get("gpus", tp * fsdp) != tp * fsdp:
        raise ValueError(f"`gpus` must be `tp` times `fsdp`, {tp * fsdp}: leave it out")
    return {**others, "gpus": tp * fsdp, "strategy": "tp+fsdp"}

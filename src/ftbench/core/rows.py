"""The columns of steps.csv and the fields of summary.json, with units and meanings.

The schema version is 1. "gb" in a name means GiB (2**30 bytes). Unknown values are empty in CSV and `null` in JSON.
This module needs only the standard library, because environments of other frameworks import it.
"""

import csv
import io
import math
from dataclasses import dataclass, field, fields
from typing import Any

SCHEMA = 1
# The phases of a training step, as named in a profile.
PREFIX = "ftbench."  # of range names in a trace
DATA, FORWARD, LOSS, METRICS, BACKWARD = "data", "forward", "loss", "metrics", "backward"
STAGES = "other stages"  # waiting for other pipeline stages
CLIP, OPTIMIZER = "clip", "optimizer"
OTHER = "other"  # time that no range covers


def _column(unit: str, meaning: str, ranks: str = "highest") -> Any:
    """Declare a column of steps.csv. `ranks` selects how store/ranks.py merges the values of several ranks."""
    return field(default=None, metadata={"unit": unit, "meaning": meaning, "ranks": ranks})


@dataclass(slots=True)
class StepRow:
    """One line of steps.csv: an optimizer step (`phase` train) or an evaluation (`phase` evaluate)."""

    step: int | None = _column("", "optimizer step, from 1", "first")
    epoch: float | None = _column("", "epochs trained at the end of the step", "first")
    elapsed_time_sec: float | None = _column("s", "host clock at the end of the step, since training began")
    progress_ratio: float | None = _column("", "step / planned steps", "first")
    memory_allocated_gb: float | None = _column("GiB", "tensors alive at the end of the step (CPU: resident set)")
    memory_reserved_gb: float | None = _column("GiB", "the allocator's pool at the end of the step (CPU: resident set)")
    peak_memory_gb: float | None = _column("GiB", "highest allocated within the step (CPU: highest resident set)")
    rank: int | None = _column("", "process of a multi-GPU run; empty if all ranks are merged", "none")
    phase: str | None = _column("", "train or evaluate", "first")
    step_time_s: float | None = _column("s", "device time from the end of the previous step to the end of this one")
    data_time_s: float | None = _column("s", "host time spent waiting for batches")
    forward_backward_s: float | None = _column("s", "device time of forward and backward passes and gradient clipping")
    optimizer_s: float | None = _column("s", "device time of the optimizer's update")
    real_tokens: int | None = _column("tokens", "non-padding tokens of the step", "shares")
    padded_tokens: int | None = _column("tokens", "all positions computed, including padding", "shares")
    label_tokens: int | None = _column("tokens", "positions that carry loss", "shares")
    samples: int | None = _column("", "samples of the step", "shares")
    longest_sequence: int | None = _column("tokens", "longest sequence of the step")
    loss: float | None = _column("nats/token", "loss of the objective, in training or evaluation", "loss")
    grad_norm: float | None = _column("", "gradient norm before clipping")
    learning_rate: float | None = _column("", "learning rate used by the step", "first")
    peak_reserved_gb: float | None = _column("GiB", "largest allocator pool within the step")
    device_memory_gb: float | None = _column("GiB", "memory in use according to the driver, highest sample")
    host_memory_gb: float | None = _column("GiB", "resident set of the process at the end of the step", "sum")
    allocator_retries: int | None = _column("", "cache flushes of the allocator within the step")
    power_w: float | None = _column("W", "mean of the sampled board power within the step", "sum")
    energy_j: float | None = _column("J", "energy counter of the board, interpolated between samples", "sum")
    sm_clock_mhz: float | None = _column("MHz", "mean of the sampled SM clock", "lowest")
    temperature_c: float | None = _column("°C", "highest sampled GPU temperature")
    throttle: str | None = _column("", "throttle reasons joined by |; `none` if the driver reported no reason", "all")
    recompiles: int | None = _column("", "graphs compiled by torch.compile within the step; empty without compile")
    gpu_busy: float | None = _column("", "share of the time that the GPU was busy, by the driver's counters", "mean")
    tensor_busy: float | None = _column("", "share of time with busy tensor cores, by the driver's counters", "mean")
    memory_busy: float | None = _column("", "share of the memory bandwidth used, by the driver's counters", "mean")
    allocations: int | None = _column("", "blocks allocated by the caching allocator within the step")
    data_rank: int | None = _column("", "ranks with the same number trained on the same tokens", "none")
    host_cpu_by_others: float | None = _column("", "share of the host's CPUs that other processes used", "mean")
    gpu_by_others: float | None = _column("", "share of the time in which kernels of other processes ran on the GPU")
    images: int | None = _column(
        "", "images of the step; without images, this and all columns to loss_s are empty", "shares"
    )
    image_tokens: int | None = _column("tokens", "real tokens of images", "shares")
    text_tokens: int | None = _column("tokens", "real tokens of text", "shares")
    tiles: int | None = _column("", "tiles that the images were split into", "shares")
    image_patches: int | None = _column("", "image patches processed by the vision encoder", "shares")
    vision_s: float | None = _column("s", "device time of encoder and projector in the forward pass")
    language_s: float | None = _column("s", "device time of the decoder in the forward pass")
    loss_s: float | None = _column("s", "device time of head and loss in the forward pass")
    reward_accuracy: float | None = _column("", "dpo: share of pairs whose chosen answer has the higher reward", "mean")
    reward_margin: float | None = _column("nats", "dpo: mean reward difference of chosen and rejected answer", "mean")
    generation_s: float | None = _column("s", "grpo: device time of generation, not part of forward_backward_s")
    scoring_s: float | None = _column("s", "grpo: device time of rewards and of the reference model")
    generated_tokens: int | None = _column("tokens", "grpo: tokens of the step's completions", "shares")
    reward: float | None = _column("", "grpo: mean reward of the step's completions", "mean")
    generation_peak_gb: float | None = _column("GiB", "grpo: highest allocated during generation")
    power_capped: float | None = _column("", "share of the samples in which the power limit reduced the clock")
    thermally_limited: float | None = _column("", "share of the samples in which heat or the power supply did so")


SMALLEST, LARGEST, MOST_STEPS = 1e-30, 1e15, 2**31  # bounds for seconds, tokens, GiB, joules and learning rates
FLOAT32 = 3.5e38  # larger values come from a computation that overflowed
SIGNED = ("loss", "grad_norm", "reward_margin", "reward")  # may be negative, and NaN or infinite if training diverges
COLUMNS: tuple[str, ...] = tuple(f.name for f in fields(StepRow))
_TYPES = {f.name: str(f.type) for f in fields(StepRow)}


def header() -> str:
    """Return the header line of steps.csv with a newline."""
    return ",".join(COLUMNS) + "\n"


def to_csv(row: StepRow) -> str:
    """Return a row as one line of steps.csv with a newline. Floats have nine significant digits."""
    out = io.StringIO()
    values = [getattr(row, name) for name in COLUMNS]
    texts = [format(value, ".9g") if isinstance(value, float) else value for value in values]
    csv.writer(out, lineterminator="\n").writerow(texts)  # None becomes an empty field
    return out.getvalue()


def parse(values: dict[str, str]) -> StepRow:
    """Convert a CSV record to a StepRow. Ignore unknown columns. Missing columns become None. Raise ValueError for a
    value that does not fit its column."""
    return StepRow(**{name: value_of(name, values[name]) for name in COLUMNS if values.get(name)})


def value_of(name: str, text: str) -> Any:
    """Convert the text of a CSV field to the type of its column. Raise ValueError if the text does not fit."""
    kind = _TYPES[name]
    if kind.startswith("str"):
        return text
    number = int(text) if kind.startswith("int") else float(text)
    if name in SIGNED:
        return number if not FLOAT32 < abs(number) < math.inf else number * math.inf
    if SMALLEST < number < (MOST_STEPS if name == "step" else LARGEST):
        return number
    if not 0 <= number <= SMALLEST:
        raise ValueError(f"{name}: {text[:40]} is not a valid number")
    return number * 0


_LATER = {"later": True}


@dataclass(slots=True)
class RunSummary:
    """The content of summary.json. Times are in seconds, memory is in GiB, energy is in joules.

    Most values come from the steady window: the steps after warm-up. `mfu` is relative to the peak of the data sheet
    without sparsity. `mfu_measured` is relative to the highest rate that `ftbench probe` measured. Comments describe
    the keys of dictionaries.
    """

    name: str
    run_id: str
    state: str
    reason: str | None
    method: str
    model: str
    weights: str
    gpu: str | None
    batch_size: int
    gradient_accumulation_steps: int
    optimizations: list[str]
    steps: dict[str, int]
    first_step_s: float | None = None
    time_to_steady_s: float | None = None
    step_time_s: dict[str, Any] = field(default_factory=dict)
    tokens_per_s: dict[str, float | None] = field(default_factory=dict)
    samples_per_s: float | None = None
    samples_per_hour: float | None = None
    memory_gb: dict[str, Any] = field(default_factory=dict)
    model_tflops: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    mfu_measured: float | None = None
    bound: dict[str, Any] = field(default_factory=dict)
    drift: float | None = None
    outliers: list[dict[str, Any]] = field(default_factory=list)
    energy: dict[str, float | None] = field(default_factory=dict)
    loss: dict[str, float | None] = field(default_factory=dict)
    parameters: dict[str, int | None] = field(default_factory=dict)
    phases_s: dict[str, float] = field(default_factory=dict)
    dataset: dict[str, Any] = field(default_factory=dict)
    oom: dict[str, Any] | None = None
    warnings: list[str] = field(default_factory=list)
    schema: int = SCHEMA
    # `state` (`ok` or `not finite`), `first_step` and `count` of the steps with a NaN or infinite loss or gradient norm
    learning: dict[str, Any] = field(default_factory=dict, metadata=_LATER)
    # `contended` (yes or no), and shares (0 to 1) of the steady window: `host_cpu_by_others`, `gpu_by_others`
    contention: dict[str, Any] = field(default_factory=dict, metadata=_LATER)
    # state of the compiler's cache before the first step: `cold`, `warm`, `partly warm`, or `none` without compilation
    first_step_cache: str | None = field(default=None, metadata=_LATER)
    # grpo: mean seconds per step: `generation`, `scoring`, `forward_backward`, `optimizer`
    parts_s: dict[str, float | None] = field(default_factory=dict, metadata=_LATER)
    # several ranks: `count`; `spread`: the `lowest` and `highest` value over ranks; `memory_gb` per rank (allocated,
    # reserved, device); `token_skew`: share of a step for which a rank waits for the rank with the most positions
    # (mean over ranks); `tokens_per_s_per_gpu`: real tokens/s of all ranks divided by `count`; pp: `layers` of each
    # stage, and `bubble`: share of a pass for which a rank waits for other stages (mean over ranks)
    ranks: dict[str, Any] = field(default_factory=dict, metadata=_LATER)
    # `images` and `tiles` per second; empty without images
    images_per_s: dict[str, float | None] = field(default_factory=dict, metadata=_LATER)
    # images: mean seconds per step of the forward pass: `vision` (with the projector), `language`, `loss`
    forward_s: dict[str, float | None] = field(default_factory=dict, metadata=_LATER)


# Fields that were added later may be missing in older files. All other fields are required.
LATER: frozenset[str] = frozenset(f.name for f in fields(RunSummary) if f.metadata == _LATER)
FIELDS: frozenset[str] = frozenset(f.name for f in fields(RunSummary)) - LATER

"""The columns of steps.csv and the fields of summary.json, each with its unit and meaning.

Schema 1. "gb" in a name is GiB (2**30 bytes), as in the founding study. Unknown is an empty field in the CSV and
`null` in the JSON: never a zero, never a guess. Standard library only: a framework's own environment can import it.
"""

import csv
import io
import math
from dataclasses import dataclass, field, fields
from typing import Any

SCHEMA = 1


def _column(unit: str, meaning: str, ranks: str = "highest") -> Any:
    """Declare a column; `ranks` says how those of several ranks become one (store/ranks.py)."""
    return field(default=None, metadata={"unit": unit, "meaning": meaning, "ranks": ranks})


@dataclass(slots=True)
class StepRow:
    """One line of steps.csv: one optimizer step (`phase` train) or one evaluation (`phase` evaluate)."""

    step: int | None = _column("", "optimizer step, from 1", "first")
    epoch: float | None = _column("", "epochs trained at the end of the step", "first")
    elapsed_time_sec: float | None = _column("s", "host clock at the end of the step, since training began")
    progress_ratio: float | None = _column("", "step / planned steps", "first")
    memory_allocated_gb: float | None = _column("GiB", "tensors alive at the end of the step (CPU: resident set)")
    memory_reserved_gb: float | None = _column("GiB", "the allocator's pool at the end of the step (CPU: resident set)")
    peak_memory_gb: float | None = _column("GiB", "highest allocated within the step (CPU: highest resident set)")
    rank: int | None = _column("", "process of a multi-GPU run; empty where all ranks are merged", "none")
    phase: str | None = _column("", "train or evaluate", "first")
    step_time_s: float | None = _column("s", "device time from the end of the step before to the end of this one")
    data_time_s: float | None = _column("s", "host time spent waiting for the batches of the step")
    forward_backward_s: float | None = _column("s", "device time of forward and backward passes and gradient clipping")
    optimizer_s: float | None = _column("s", "device time of the optimizer's update")
    real_tokens: int | None = _column("tokens", "non-padding tokens of the step", "shares")
    padded_tokens: int | None = _column("tokens", "all positions computed, padding included", "shares")
    label_tokens: int | None = _column("tokens", "positions that carry loss", "shares")
    samples: int | None = _column("", "samples of the step", "shares")
    longest_sequence: int | None = _column("tokens", "longest sequence of the step")
    loss: float | None = _column(
        "nats/token", "training loss of the step, or evaluation loss; of dpo, grpo theirs", "loss"
    )
    grad_norm: float | None = _column("", "gradient norm before clipping")
    learning_rate: float | None = _column("", "learning rate used by the step", "first")
    peak_reserved_gb: float | None = _column("GiB", "largest allocator pool within the step")
    device_memory_gb: float | None = _column("GiB", "what the driver says is used on the device, highest sample")
    host_memory_gb: float | None = _column("GiB", "resident set of the process at the end of the step", "sum")
    allocator_retries: int | None = _column("", "cache flushes the allocator needed within the step")
    power_w: float | None = _column("W", "mean of the sampled board power within the step", "sum")
    energy_j: float | None = _column(
        "J",
        "the board's energy counter, interpolated: sums count; what exceeds the board's limit is the next step's",
        "sum",
    )
    sm_clock_mhz: float | None = _column("MHz", "mean of the sampled SM clock", "lowest")
    temperature_c: float | None = _column("°C", "highest sampled GPU temperature")
    throttle: str | None = _column("", "throttle reasons seen, joined by |; `none` where the driver named none", "all")
    recompiles: int | None = _column("", "graphs torch.compile compiled within the step; empty without compile")
    gpu_busy: float | None = _column(
        "", "share of the time the GPU worked or launched, by the driver's counters", "mean"
    )
    tensor_busy: float | None = _column("", "share of the tensor cores' time in which they worked, by the same", "mean")
    memory_busy: float | None = _column("", "share of the memory's bandwidth that was used, by the same", "mean")
    allocations: int | None = _column("", "blocks that the GPU's caching allocator handed out within the step")
    data_rank: int | None = _column(
        "", "share of the batch: ranks with the same one trained on the same tokens", "none"
    )
    host_cpu_by_others: float | None = _column("", "share of the host's CPUs that other processes used", "mean")
    gpu_by_others: float | None = _column("", "share of the time in which other processes' kernels ran on the GPU")
    images: int | None = _column(
        "", "images of the step; like those from here to loss_s empty without images", "shares"
    )
    image_tokens: int | None = _column("tokens", "real tokens that stand for images", "shares")
    text_tokens: int | None = _column("tokens", "real tokens that do not", "shares")
    tiles: int | None = _column("", "parts that the images were cut into, each seen by itself", "shares")
    image_patches: int | None = _column("", "patches of the images that the vision encoder saw", "shares")
    vision_s: float | None = _column("s", "device time of encoder and projector in the forward pass")
    language_s: float | None = _column("s", "device time of the decoder in the forward pass")
    loss_s: float | None = _column("s", "device time of head and loss in the forward pass")
    reward_accuracy: float | None = _column(
        "", "dpo: share of the step's pairs whose chosen answer gained more on the reference than the rejected", "mean"
    )
    reward_margin: float | None = _column("nats", "dpo: beta times how much more it gained, mean of the pairs", "mean")
    generation_s: float | None = _column(
        "s", "grpo: device time in which the model answered the step's prompts, no part of forward_backward_s"
    )
    scoring_s: float | None = _column(
        "s", "grpo: the same of the completions' rewards, and of what the reference makes of them"
    )
    generated_tokens: int | None = _column("tokens", "grpo: tokens of the step's completions", "shares")
    reward: float | None = _column("", "grpo: mean reward of the step's completions", "mean")
    generation_peak_gb: float | None = _column("GiB", "grpo: highest allocated until completions were made")


SMALLEST, LARGEST, MOST_STEPS = 1e-30, 1e15, 2**31  # of the seconds, tokens, GiB, joules and learning rates of a run
FLOAT32 = 3.5e38  # what is larger was infinite where it was computed
MAY_DIVERGE = ("loss", "grad_norm", "reward_margin")  # NaN and infinity are figures here, of a training that went wrong
COLUMNS: tuple[str, ...] = tuple(f.name for f in fields(StepRow))
_TYPES = {f.name: str(f.type) for f in fields(StepRow)}


def header() -> str:
    """Return the first line of steps.csv, with its newline."""
    return ",".join(COLUMNS) + "\n"


def to_csv(row: StepRow) -> str:
    """Return one line of steps.csv, with its newline; floats keep nine significant digits."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow([_text(getattr(row, name)) for name in COLUMNS])
    return out.getvalue()


def _text(value: Any) -> Any:
    if value is None:
        return ""
    return format(value, ".9g") if isinstance(value, float) else value


def parse(values: dict[str, str]) -> StepRow:
    """Return the row of one CSV record. Unknown columns are ignored and missing ones stay empty, so that older and
    newer files can be read; a value that is not of its column's type raises ValueError."""
    return StepRow(**{name: _value(name, values[name]) for name in COLUMNS if values.get(name)})


def _value(name: str, text: str) -> Any:
    kind = _TYPES[name]
    if kind.startswith("str"):
        return text
    number = int(text) if kind.startswith("int") else float(text)
    if can_hold(name, number):
        return number
    if name in MAY_DIVERGE:
        return number * math.inf
    if not 0 <= number <= SMALLEST:
        raise ValueError(f"{name}: {text[:40]} is no number that a run writes")
    return number * 0


def can_hold(name: str, number: float) -> bool:
    """Return whether a column can hold a number other than zero as it is. NaN and infinity are figures of a loss."""
    if name in MAY_DIVERGE:
        return not FLOAT32 < abs(number) < math.inf
    return SMALLEST < number < (MOST_STEPS if name == "step" else LARGEST)


_LATER = {"later": True}


@dataclass(slots=True)
class RunSummary:
    """summary.json. Times in seconds, memory in GiB, energy in joules; every figure comes from the steady window of
    steps.csv unless its name says otherwise. A run that did not end well keeps the figures it can still prove. `mfu` is
    against the data sheet's dense peak, `mfu_measured` against the product rate that a probe of the store had seen."""

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
    # `state` (`ok` or `not finite`), `first_step` and `count` of the steps whose loss or gradient norm is no number
    learning: dict[str, Any] = field(default_factory=dict, metadata=_LATER)
    # `contended` (yes or no), and shares (0 to 1) of the steady window: `host_cpu_by_others`, `gpu_by_others`
    contention: dict[str, Any] = field(default_factory=dict, metadata=_LATER)
    # of the compiler, before the first step: `cold`, `warm`, `partly warm`, or `none` without compilation
    first_step_cache: str | None = field(default=None, metadata=_LATER)
    # seconds a step, on average: `generation`, `scoring`, `forward_backward`, `optimizer`; of grpo alone
    parts_s: dict[str, float | None] = field(default_factory=dict, metadata=_LATER)
    # of several ranks: their `count`, the `spread` (`lowest`, `highest`) of what the figures tell the worst of, the
    # `memory_gb` of each (allocated, reserved, device), `token_skew`: the share of a step in which the mean rank waits
    # for the one with the most positions, and real `tokens_per_s_per_gpu`, which are those of all by their count
    ranks: dict[str, Any] = field(default_factory=dict, metadata=_LATER)
    # `images` and `tiles` a second; empty without images
    images_per_s: dict[str, float | None] = field(default_factory=dict, metadata=_LATER)
    # seconds a step of the forward pass, on average: `vision` (with the projector), `language`, `loss`; of images alone
    forward_s: dict[str, float | None] = field(default_factory=dict, metadata=_LATER)


# Of a summary.json; one with fewer was written by an earlier version. What came later is absent from older ones.
LATER: frozenset[str] = frozenset(f.name for f in fields(RunSummary) if f.metadata == _LATER)
FIELDS: frozenset[str] = frozenset(f.name for f in fields(RunSummary)) - LATER

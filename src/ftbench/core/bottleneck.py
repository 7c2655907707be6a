"""Find the bottleneck of a run: data loading, kernel launches, arithmetic, memory bandwidth, temperature or power.

Summaries store the sentences in `why`, and `ftbench verify` compares them. If you change a sentence, run
`scripts/same-figures --write`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ftbench.core.rows import StepRow
from ftbench.core.units import tidy

DATA_BOUND = 0.10  # share of the steady window spent waiting for batches
UTILIZED = 0.90  # if the GPU's busy share is lower, the run is launch-bound
# A run is compute-bound if its matrix products alone would take this share of the time at the best known rate. If the
# driver reports how busy tensor cores and memory were, the run is bound by the busier of the two instead.
COMPUTE_BOUND = 1 / 3
# The driver counts busy time from a kernel's launch, the profiler from the kernel's first block. The difference is 0.9
# to 1.3 µs per kernel (five profiles of an H200, results/h200/profiles and launch-bound). The number of kernels is
# estimated from the blocks of the caching allocator, because an eager operation allocates one block. A step of LoRA has
# 8,041 blocks and 8,132 kernels, a step of unsloth 3,969 blocks and 6,415 kernels.
LAUNCH_S = 1.1e-6
THROTTLED = 0.5  # share of the steady window with a throttle reason
THERMAL = ("sw_thermal", "hw_thermal", "hw_slowdown", "hw_power_brake")
LIMITS = {"power_capped": ("sw_power_cap",), "thermally_limited": THERMAL}  # throttle reasons by column of steps.csv


@dataclass(slots=True)
class Bottleneck:
    """The bottleneck of a run. All shares refer to the steps after warm-up. Unknown values are None.

    Attributes:
        verdict: data-bound, launch-bound, compute-bound, memory-bound, thermally limited, or None.
        also: Other limits of the GPU's clock: power-capped, thermally limited.
        why: The reason for the verdict, or the reason why the verdict is None.
        gpu_busy: Share of the time in which kernels ran, without the time to launch them.
    """

    verdict: str | None = None
    also: list[str] = field(default_factory=list)
    why: str = ""
    gpu_busy: float | None = None
    gpu_busy_method: str | None = None
    data_wait: float | None = None
    products: float | None = None
    tensor_busy: float | None = None
    memory_busy: float | None = None
    power_capped: float | None = None
    thermally_limited: float | None = None
    sm_clock_mhz: float | None = None


def classify_bottleneck(
    steady: Sequence[StepRow], on_gpu: bool, products: float | None, busy_method: str | None = None
) -> Bottleneck:
    """Return the bottleneck of a run.

    Args:
        steady: Rows of the steps after warm-up, at least one.
        on_gpu: Whether the run used a GPU.
        products: Time that the matrix products would need at the best known rate of this GPU / measured time.
        busy_method: How `gpu_busy` was measured.
    """
    bottleneck = Bottleneck(
        data_wait=over_time(steady, [row.data_time_s for row in steady], of_time=True),
        gpu_busy=over_time(steady, [_in_kernels(row) for row in steady]),
        gpu_busy_method=busy_method,
        products=products,
        tensor_busy=over_time(steady, [row.tensor_busy for row in steady]),
        memory_busy=over_time(steady, [row.memory_busy for row in steady]),
        power_capped=_under(steady, "power_capped"),
        thermally_limited=_under(steady, "thermally_limited"),
        sm_clock_mhz=over_time(steady, [row.sm_clock_mhz for row in steady]),
    )
    bottleneck.verdict, why = _judge(bottleneck, on_gpu)
    bottleneck.why = tidy(why)
    for name, share in (("power-capped", bottleneck.power_capped), ("thermally limited", bottleneck.thermally_limited)):
        if share is not None and share > THROTTLED and name != bottleneck.verdict:
            bottleneck.also.append(name)
    return bottleneck


def _judge(bottleneck: Bottleneck, on_gpu: bool) -> tuple[str | None, str]:
    idle = None if bottleneck.gpu_busy is None else 1 - bottleneck.gpu_busy
    waits = bottleneck.data_wait is not None and bottleneck.data_wait > DATA_BOUND
    if waits and (idle is None or idle > 1 - UTILIZED):
        return "data-bound", f"{bottleneck.data_wait:.0%} of the steady window was spent waiting for batches"
    if not on_gpu:
        return None, "the run did not use a GPU"
    if idle is None:
        return None, "the driver did not report the GPU utilization"
    if idle > 1 - UTILIZED:
        return (
            "launch-bound",
            f"the GPU worked {bottleneck.gpu_busy:.0%} of the time and waited for the CPU the rest of the time",
        )
    if (bottleneck.thermally_limited or 0) > THROTTLED:
        return "thermally limited", f"heat throttled the GPU for {bottleneck.thermally_limited:.0%} of the time"
    return _arithmetic_or_memory(bottleneck)


def _arithmetic_or_memory(bottleneck: Bottleneck) -> tuple[str | None, str]:
    """Return `compute-bound`, `memory-bound` or None (unknown) for a busy GPU, and the reason."""
    busy = f"the GPU worked {bottleneck.gpu_busy:.0%} of the time"
    if bottleneck.tensor_busy is not None and bottleneck.memory_busy is not None:
        multiplied = max(bottleneck.tensor_busy, bottleneck.products or 0.0)  # products in fp32 do not use tensor cores
        kind = "compute-bound" if multiplied >= bottleneck.memory_busy else "memory-bound"
        memory = f"{bottleneck.memory_busy:.0%} of the memory's bandwidth was used"
        return kind, f"{busy}, its tensor cores {bottleneck.tensor_busy:.0%}; {memory}"
    if bottleneck.products is None:
        return None, f"{busy}; its peak rate of matrix products is unknown (`ftbench probe` measures it)"
    products = f"{busy}; its matrix products would take {bottleneck.products:.0%} of it at the best known rate"
    return ("compute-bound" if bottleneck.products >= COMPUTE_BOUND else "memory-bound"), products


def _in_kernels(row: StepRow) -> float | None:
    """Return the share of a step in which kernels ran: `gpu_busy - LAUNCH_S * allocations / step_time_s`."""
    if row.gpu_busy is None or not row.allocations or not row.step_time_s:
        return row.gpu_busy
    return max(0.0, row.gpu_busy - LAUNCH_S * row.allocations / row.step_time_s)


def over_time(steady: Sequence[StepRow], values: Sequence[float | None], of_time: bool = False) -> float | None:
    """Return a share of the time of all steps. By default, `values` has one share per step, and the result is the mean
    weighted by step time. With `of_time`, `values` has seconds per step: return sum(values) / sum(step times)."""
    known = ((row, value) for row, value in zip(steady, values, strict=True) if value is not None)
    pairs = [(row.step_time_s or 0.0, value) for row, value in known if math.isfinite(value)]
    seconds = sum(time for time, _ in pairs)
    return sum(value * (1.0 if of_time else time) for time, value in pairs) / seconds if seconds > 0 else None


def _under(steady: Sequence[StepRow], column: str) -> float | None:
    """Return the share of the steady time with a reason of `column`. Without the column, whole steps are counted."""
    whole = [float(any(each in row.throttle for each in LIMITS[column])) if row.throttle else None for row in steady]
    shares = [getattr(row, column) for row in steady]
    return over_time(steady, [flag if share is None else share for share, flag in zip(shares, whole, strict=True)])

"""Check whether the figures of a run are valid. Warn of slow steps, throttling, NaN losses, zero gradients and
other processes.

Summaries store the warnings, and `ftbench verify` compares them. If you change a sentence, run
`scripts/same-figures --write`.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from ftbench.core import stats
from ftbench.core.bottleneck import THERMAL, over_time
from ftbench.core.rows import StepRow
from ftbench.core.stats import total
from ftbench.core.units import some, tidy
from ftbench.store.rundir import NOT_FINITE, gpus_of

WALL_TOLERANCE = 0.02  # allowed difference between the sum of the steps and the wall clock
STEPS_AHEAD = 2  # steps that the sum may have in addition, because the host reads its clock before the last step ends
DRIFT_TOLERANCE = 0.05
FOREIGN_MEMORY_GB = 1.0
# An outlier exceeds OUTLIER_RATIO * median, and also median + OUTLIER_SPREAD * standard deviation.
OUTLIER_RATIO, OUTLIER_SPREAD = 1.2, 6.0
OUTLIERS_NAMED = 10


def warnings(
    everything: Sequence[StepRow],
    train: Sequence[StepRow],
    warm: int,
    machine: dict[str, Any],
    bound: dict[str, Any],
    ended_well: bool,
) -> list[str]:
    """Return the warnings about the speed and the GPU of a run. `warm` is the number of warm-up steps."""
    sentences = []
    steady = train[warm:]
    if ended_well and len(steady) < stats.MINIMUM_STEADY:
        sentences.append(
            f"only {len(steady)} steady steps: train at least {warm + stats.MINIMUM_STEADY} steps for reliable figures"
        )
    series = [row.step_time_s or 0.0 for row in steady], _per_position(steady)
    if abs(change := drift(steady) or 0.0) > DRIFT_TOLERANCE and all(map(stats.differs, series)):
        sentences.append(f"the step time changed by {change:+.0%} during the steady window")
    gap = None if machine.get("imported") else wall_gap(everything, train, warm)  # lines may be means of steps
    if gap is not None and not -WALL_TOLERANCE <= gap <= WALL_TOLERANCE + STEPS_AHEAD / len(steady):
        sentences.append(f"the sum of the steady steps and their wall clock differ by {gap:+.1%}")
    if slow := outliers(steady):
        sentences.append(f"{len(slow)} steps were far slower than the others: {_describe(slow)}")
    reasons = {reason for row in steady for reason in (row.throttle or "").split("|")}
    if hot := sorted(reasons.intersection(THERMAL)):
        sentences.append(f"the GPU was throttled by heat or by its power supply ({', '.join(hot)})")
    if retries := total(row.allocator_retries for row in steady):
        sentences.append(f"the allocator ran full and flushed its cache {retries:.0f} times in the steady window")
    if bound.get("verdict") in ("data-bound", "launch-bound"):
        sentences.append(f"{bound['verdict']}: {bound['why']}")
    if machine.get("shared_host"):
        sentences.append("shared host: other runs used this machine's other GPUs at the same time")
    for gpu in gpus_of(machine):
        if errors := gpu.get("ecc_uncorrected"):
            sentences.append(f"the GPU has counted {some(errors, 'uncorrected memory error')}: do not trust it")
        if not is_free(gpu):
            sentences.append(f"the GPU was not free before the run: {usage(gpu)}")
    return list(map(tidy, sentences))


def is_free(gpu: dict[str, Any]) -> bool:
    """Return whether no other program used a GPU. `gpu` is an entry of machine.json."""
    return not gpu.get("foreign_processes") and (gpu.get("memory_used_before_gb") or 0.0) <= FOREIGN_MEMORY_GB


def usage(gpu: dict[str, Any]) -> str:
    """Return how other programs used a GPU before the run: `8.0 GiB in use, 1 other process`."""
    used, others = gpu.get("memory_used_before_gb") or 0.0, gpu.get("foreign_processes")
    return f"{used:.1f} GiB in use" + (f", {some(others, 'other process')}" if others else "")


def _describe(slow: Sequence[dict[str, Any]]) -> str:
    """Describe the three slowest steps, such as `step 17 (2.1 times the median, 1 graphs compiled); step 4 (...)`."""
    words = (", ".join([f"{row['times_the_median']:.1f} times the median", *row["with"]]) for row in slow[:3])
    return "; ".join(f"step {row['step']} ({text})" for row, text in zip(slow[:3], words, strict=True))


def drift(steady: Sequence[StepRow]) -> float | None:
    """Return the relative change of the step time during the steady window (+0.05: 5 % slower), or None if unknown.

    Batches differ in length. Therefore a change must appear in the step times and in the times per padded token.
    Return the smaller of the two changes, or 0 if they have opposite signs.
    """
    raw = stats.drift([row.step_time_s or 0.0 for row in steady])
    per_position = stats.drift(_per_position(steady))
    if raw is None or per_position is None:
        return None
    return 0.0 if raw * per_position <= 0 else min(raw, per_position, key=abs)


def outliers(steady: Sequence[StepRow]) -> list[dict[str, Any]]:
    """Return the steady steps that took much longer than the others, both in total and per padded token.

    The slowest step comes first. The keys are `step`, `step_time_s`, `times_the_median`, and `with`: phrases about
    possible causes.
    """
    times, rates = [row.step_time_s or 0.0 for row in steady], _per_position(steady)
    if len(steady) < stats.MINIMUM_STEADY:
        return []
    limits = [_limit(times), _limit(rates)]
    middle = statistics.median(times)
    waits = statistics.median(row.data_time_s or 0.0 for row in steady)
    slow: list[dict[str, Any]] = [
        {"step": row.step, "step_time_s": time, "times_the_median": time / middle, "with": _causes(row, middle, waits)}
        for row, time, rate in zip(steady, times, rates, strict=True)
        if time > limits[0] and rate > limits[1]
    ]
    return sorted(slow, key=lambda step: -step["step_time_s"])


def _limit(values: Sequence[float]) -> float:
    middle = statistics.median(values)
    spread = stats.MAD_TO_SIGMA * statistics.median(abs(value - middle) for value in values)
    return max(OUTLIER_RATIO * middle, middle + OUTLIER_SPREAD * spread)


def _causes(row: StepRow, middle: float, waits: float) -> list[str]:
    """Return possible causes of a slow step. `middle` (step time) and `waits` (wait for a batch) are medians in s."""
    causes = {
        f"{row.recompiles} graphs compiled": row.recompiles,
        f"{row.allocator_retries} flushes of the allocator's cache": row.allocator_retries,
        "a wait for the batch": (row.data_time_s or 0.0) - waits > 0.1 * middle,
        "throttling by heat": set((row.throttle or "").split("|")).intersection(THERMAL),
    }
    return [cause for cause, present in causes.items() if present]


def _per_position(steady: Sequence[StepRow]) -> list[float]:
    return [(row.step_time_s or 0.0) / (row.padded_tokens or 1) for row in steady]


def wall_gap(everything: Sequence[StepRow], train: Sequence[StepRow], warm: int) -> float | None:
    """Return `device time / wall time - 1` of the steady steps, or None for fewer than MINIMUM_STEADY steps.

    The wall time comes from the host clock, which is independent of device events. Evaluations are subtracted. Step 2
    does not count, because the settings are checked between steps 1 and 2.
    """
    first = max(warm, 2)
    if warm < 1 or len(train) - first < stats.MINIMUM_STEADY:
        return None
    before, last = train[first - 1].elapsed_time_sec, train[-1].elapsed_time_sec
    if before is None or last is None:
        return None
    evaluated = total(
        row.step_time_s for row in everything
        if row.phase == "evaluate" and row.elapsed_time_sec and before < row.elapsed_time_sec <= last
    )  # fmt: skip
    wall = last - before - evaluated
    return total(row.step_time_s for row in train[first:]) / wall - 1 if wall > 0 else None


# --- finite losses, and contention ------------------------------------------------------------------------------------

# A run is contended if other processes use more than these shares of the CPUs or of the GPU's time. The CPU limit is
# higher for runs on a GPU: they keep only one or two CPUs busy. Kernels of other processes always delay a run.
HOST_SHARE, HOST_SHARE_BESIDE_GPU = 0.25, 0.5
GPU_SHARE = 0.05


def learning(rows: Sequence[StepRow], loss_scaled: bool, imported: bool = False) -> tuple[dict[str, Any], list[str]]:
    """Check that losses and gradient norms are finite, and that not all gradient norms are 0.

    Args:
        rows: Rows of steps.csv.
        loss_scaled: Whether the loss is scaled (fp16). A trainer with loss scaling skips steps with infinite gradients.
        imported: Whether the rows are from another tool's log, which can have 0 for an unknown gradient norm.

    Returns:
        A dict, which is empty without a loss, and a list of warnings. The dict has the `state` (`ok` or `not finite`),
        and `first_step` and `count` of the steps with NaN or infinity. The warnings name the quantities that are NaN or
        infinite in training steps, and gradient norms that are all 0.
    """
    columns = {"loss": "the loss"} | ({} if loss_scaled else {"grad_norm": "the gradient norm"})
    broken = [row for row in rows if not all(finite(getattr(row, name)) for name in columns)]
    sentences = []
    for name, text in columns.items():
        if steps := [row.step for row in broken if row.phase == "train" and not finite(getattr(row, name))]:
            sentences.append(tidy(f"{text} is not a number in {len(steps)} steps, first in step {steps[0]}"))
    norms = [row.grad_norm for row in rows if row.phase == "train"]
    if norms and all(norm == 0 for norm in norms) and not imported:
        sentences.append("the gradient norm is 0 in all steps: the model learns nothing from the data")
    if not any(row.loss is not None for row in rows):
        return {}, sentences
    state = NOT_FINITE if broken else "ok"
    return {"state": state, "first_step": broken[0].step if broken else None, "count": len(broken)}, sentences


def finite(value: float | None) -> bool:
    """Return False for NaN and infinity. Return True for other values and for None (unknown)."""
    return value is None or math.isfinite(value)


def not_finite_reason(learned: dict[str, Any], sentences: Sequence[str]) -> str:
    """Explain the state `not finite` of a run, and how to fix the problem. `sentences` are the warnings of the run."""
    fact = next((text for text in sentences if " is not a number in " in text), "an evaluation's loss is not a number")
    if (learned.get("first_step") or 0) <= 1:
        return f"{fact}: check the model's weights for NaN (download them again), and train in bf16 or fp32"
    return f"{fact}: lower train.learning_rate, or train in bf16 or fp32"


def contention(steady: Sequence[StepRow], on_gpu: bool) -> tuple[dict[str, Any], list[str]]:
    """Return the load by other processes in the steady window, and a warning if this load is too high.

    `host_cpu_by_others` is their share of the CPU time, and `gpu_by_others` their share of the GPU time (None if
    unknown). `contended` is true if a share is above its limit. If both shares are unknown, the dict is empty.
    """
    limits = {"host_cpu_by_others": HOST_SHARE_BESIDE_GPU if on_gpu else HOST_SHARE, "gpu_by_others": GPU_SHARE}
    shares = {name: over_time(steady, [getattr(row, name) for row in steady]) for name in limits}
    if all(share is None for share in shares.values()):
        return {}, []
    resources = {"host_cpu_by_others": "the host's CPUs", "gpu_by_others": "the GPU's time"}
    excess = [f"{share:.0%} of {resources[name]} (more than {limits[name]:.0%})" for name, share in shares.items()
             if share is not None and share > limits[name]]  # fmt: skip
    text = " and ".join(excess)
    sentence = f"contended: other processes used {text}; its speed is not valid: stop them and repeat the run"
    return {"contended": bool(excess), **shares}, [tidy(sentence)] if excess else []

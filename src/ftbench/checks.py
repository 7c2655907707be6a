"""What makes a run's figures weak, as sentences: from its steps and its machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ftbench.core import stats
from ftbench.core.rows import StepRow
from ftbench.core.stats import total

WALL_TOLERANCE = 0.02  # sum of the steps against the wall clock of the window
DRIFT_TOLERANCE = 0.05
DATA_BOUND = 0.10  # share of the steady window
FOREIGN_MEMORY_GB = 1.0
_THERMAL = ("sw_thermal", "hw_thermal", "hw_slowdown", "hw_power_brake")


def warnings(
    everything: Sequence[StepRow],
    train: Sequence[StepRow],
    warm: int,
    machine: dict[str, Any],
    ended_well: bool,
) -> list[str]:
    """What makes the figures weak, as sentences."""
    found = []
    steady = train[warm:]
    if broken := [row.step for row in train if row.loss is not None and not math.isfinite(row.loss)]:
        found.append(f"the loss is not a number in {len(broken)} steps, first in step {broken[0]}")
    if ended_well and len(steady) < stats.MINIMUM_STEADY:
        found.append(
            f"only {len(steady)} steady steps: train at least {warm + stats.MINIMUM_STEADY} for a figure to rely on"
        )
    if abs(change := _drift(steady)) > DRIFT_TOLERANCE:
        found.append(f"steps took {change:+.0%} at the end of the steady window against its beginning")
    gap = None if machine.get("imported") else wall_gap(everything, train, warm)  # a line may tell of several steps
    if gap is not None and abs(gap) > WALL_TOLERANCE:
        found.append(f"the sum of the steady steps and their wall clock differ by {gap:+.1%}")
    reasons = {reason for row in steady for reason in (row.throttle or "").split("|")}
    if hot := sorted(reasons.intersection(_THERMAL)):
        found.append(f"the GPU was throttled by heat or by its power supply ({', '.join(hot)})")
    if retries := total(row.allocator_retries for row in steady):
        found.append(f"the allocator ran full and flushed its cache {retries:.0f} times in the steady window")
    waited, steps = total(row.data_time_s for row in steady), total(row.step_time_s for row in steady)
    if steps and waited / steps > DATA_BOUND:
        found.append(f"data-bound: {waited / steps:.0%} of the steady window was spent waiting for batches")
    gpu = machine.get("gpu") or {}
    if gpu.get("ecc_uncorrected"):
        found.append(f"the GPU has counted {gpu['ecc_uncorrected']} uncorrected memory errors: do not trust it")
    if machine.get("shared_host"):
        found.append("shared host: other runs used this machine's other GPUs at the same time")
    used, others = gpu.get("memory_used_before_gb"), gpu.get("foreign_processes")
    if others or (used is not None and used > FOREIGN_MEMORY_GB):
        found.append(f"the GPU was not free before the run: {used or 0:.1f} GiB in use, {others or 0} other processes")
    return found


def _drift(steady: Sequence[StepRow]) -> float:
    """How much slower steps became, as a share. Batches differ in length, so a trend counts only where the time of a
    step and its time per position agree on it; the smaller of the two is told."""
    raw = stats.drift([row.step_time_s or 0.0 for row in steady])
    per_position = stats.drift([(row.step_time_s or 0.0) / (row.padded_tokens or 1) for row in steady])
    if raw is None or per_position is None or raw * per_position <= 0:
        return 0.0
    return min(raw, per_position, key=abs)


def wall_gap(everything: Sequence[StepRow], train: Sequence[StepRow], warm: int) -> float | None:
    """Sum of the steady steps' device times over the wall clock of the window, minus one; None for a short window.

    The host clock is read as each step ends, independently of the device's events; evaluations that fall into the
    window are taken off it.
    """
    if warm < 1 or len(train) - warm < stats.MINIMUM_STEADY:
        return None
    before, last = train[warm - 1].elapsed_time_sec, train[-1].elapsed_time_sec
    if before is None or last is None:
        return None
    evaluated = total(
        row.step_time_s for row in everything
        if row.phase == "evaluate" and row.elapsed_time_sec and before < row.elapsed_time_sec <= last
    )  # fmt: skip
    wall = last - before - evaluated
    return total(row.step_time_s for row in train[warm:]) / wall - 1 if wall > 0 else None

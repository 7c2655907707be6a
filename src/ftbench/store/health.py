"""Check whether the figures of a run are valid: finite losses and gradients, and no contention."""

import math
from collections.abc import Sequence
from typing import Any

from ftbench.core.rows import StepRow
from ftbench.core.units import reworded
from ftbench.store.rundir import NOT_FINITE

# A run is contended if other processes use more than these shares of the CPUs or of the GPU's time. A run on the CPU
# needs all CPUs. A run on a GPU keeps one or two busy. Kernels of other processes always delay a run.
HOST_SHARE, HOST_SHARE_BESIDE_GPU = 0.25, 0.5
GPU_SHARE = 0.05


def learning(rows: Sequence[StepRow], loss_scaled: bool) -> dict[str, Any]:
    """Check that losses and gradient norms are finite.

    Args:
        rows: The rows of a run.
        loss_scaled: Whether the loss is scaled (fp16). The trainer then skips steps with an infinite gradient norm.

    Returns:
        `state` (`ok` or `not finite`), `first_step` and `count` of the rows that are not finite. Empty without a loss.
    """
    if not any(row.loss is not None for row in rows):
        return {}
    broken = [row for row in rows if not finite(row.loss) or not (loss_scaled or finite(row.grad_norm))]
    state = NOT_FINITE if broken else "ok"
    return {"state": state, "first_step": broken[0].step if broken else None, "count": len(broken)}


def finite(value: float | None) -> bool:
    """Return whether a value is finite or unknown."""
    return value is None or math.isfinite(value)


def learning_warnings(rows: Sequence[StepRow], loss_scaled: bool) -> list[str]:
    """Return a warning for the loss and one for the gradient norm, if they are not finite."""
    columns = {"loss": "the loss"} | ({} if loss_scaled else {"grad_norm": "the gradient norm"})
    broken = {text: [row.step for row in rows if not finite(getattr(row, name))] for name, text in columns.items()}
    return [reworded(f"{text} is not a number in {len(steps)} steps, first in step {steps[0]}")
            for text, steps in broken.items() if steps]  # fmt: skip


def reason(learned: dict[str, Any], sentences: Sequence[str]) -> str:
    """Return why a run with the state `not finite` failed and how to fix it. `sentences` are its warnings."""
    said = next((text for text in sentences if " is not a number in " in text), "an evaluation's loss is not a number")
    if (learned["first_step"] or 0) <= 1:
        return f"{said}: see whether the model's weights are numbers (get them again), and train in bf16 or fp32"
    return f"{said}: lower train.learning_rate, or train in bf16 or fp32"


def contention(steady: Sequence[StepRow], on_gpu: bool) -> tuple[dict[str, Any], list[str]]:
    """Return the shares of the steady window that other processes used, and a warning if a share is too large.

    The shares are `host_cpu_by_others` and `gpu_by_others` (None if unknown). `contended` is true if one is above its
    limit. Empty if both are unknown.
    """
    limits = {"host_cpu_by_others": HOST_SHARE_BESIDE_GPU if on_gpu else HOST_SHARE, "gpu_by_others": GPU_SHARE}
    shares = {name: _over_time(steady, name) for name in limits}
    if all(share is None for share in shares.values()):
        return {}, []
    what = {"host_cpu_by_others": "the host's CPUs", "gpu_by_others": "the GPU's time"}
    taken = [f"{share:.0%} of {what[name]} (more than {limits[name]:.0%})" for name, share in shares.items()
             if share is not None and share > limits[name]]  # fmt: skip
    sentence = f"contended: other processes used {' and '.join(taken)}; its speed is no measurement: run it again alone"
    return {"contended": bool(taken), **shares}, [reworded(sentence)] if taken else []


def _over_time(rows: Sequence[StepRow], name: str) -> float | None:
    """Return the mean of a column, weighted by step time, over the steps that have a value."""
    known = [(row.step_time_s or 0.0, value) for row in rows if (value := getattr(row, name)) is not None]
    seconds = sum(time for time, _ in known)
    return sum(time * value for time, value in known) / seconds if seconds else None

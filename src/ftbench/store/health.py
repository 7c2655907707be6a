"""Whether a run's figures may be trusted: did it learn with finite numbers, and had it the machine to itself."""

import math
from collections.abc import Sequence
from typing import Any

from ftbench.core.rows import StepRow
from ftbench.core.units import reworded
from ftbench.store.rundir import NOT_FINITE

# Shares of the host's CPUs and of the GPU's time that others may have taken before a run counts as contended. A run on
# the CPU uses all of its CPUs; one on a GPU keeps one or two busy, which it finds while half of them are free. Kernels
# of others delay ours from the first on.
HOST_SHARE, HOST_SHARE_BESIDE_GPU = 0.25, 0.5
GPU_SHARE = 0.05


def learning(rows: Sequence[StepRow], loss_scaled: bool) -> dict[str, Any]:
    """Return `state` (`ok` or `not finite`), the `first_step` and the `count` of the rows whose loss or gradient norm
    is NaN or infinite; empty where no row has a loss. With `loss_scaled` (fp16) gradient norms may be infinite while
    the scale is searched for: such a step is skipped."""
    if not any(row.loss is not None for row in rows):
        return {}
    broken = [row for row in rows if not finite(row.loss) or not (loss_scaled or finite(row.grad_norm))]
    state = NOT_FINITE if broken else "ok"
    return {"state": state, "first_step": broken[0].step if broken else None, "count": len(broken)}


def finite(value: float | None) -> bool:
    """Return whether a figure is a number or not known."""
    return value is None or math.isfinite(value)


def learning_warnings(rows: Sequence[StepRow], loss_scaled: bool) -> list[str]:
    """Return a sentence for the loss and one for the gradient norm, where they are no numbers."""
    columns = {"loss": "the loss"} | ({} if loss_scaled else {"grad_norm": "the gradient norm"})
    broken = {text: [row.step for row in rows if not finite(getattr(row, name))] for name, text in columns.items()}
    return [reworded(f"{text} is not a number in {len(steps)} steps, first in step {steps[0]}")
            for text, steps in broken.items() if steps]  # fmt: skip


def reason(learned: dict[str, Any], sentences: Sequence[str]) -> str:
    """Return why a run failed whose `learning` is not finite, with a way out. `sentences` are its warnings."""
    said = next((text for text in sentences if " is not a number in " in text), "an evaluation's loss is not a number")
    if (learned["first_step"] or 0) <= 1:
        return f"{said}: see whether the model's weights are numbers (get them again), and train in bf16 or fp32"
    return f"{said}: lower train.learning_rate, or train in bf16 or fp32"


def contention(steady: Sequence[StepRow], on_gpu: bool) -> tuple[dict[str, Any], list[str]]:
    """Return what other processes took of the steady window, as shares of its time: `host_cpu_by_others`,
    `gpu_by_others` (None where it is not known), and whether that is too much (`contended`); and a sentence where it
    is. Empty where neither is known."""
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
    """Return the mean of a column over the time of the steps that have it."""
    known = [(row.step_time_s or 0.0, value) for row in rows if (value := getattr(row, name)) is not None]
    seconds = sum(time for time, _ in known)
    return sum(time * value for time, value in known) / seconds if seconds else None

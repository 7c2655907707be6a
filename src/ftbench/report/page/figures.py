"""The figures of a run that the page knows: what each is called, where it stands in a record, how it becomes text."""

import math
from collections.abc import Callable
from typing import Any

from ftbench.core import units

NUMBERS = {
    "step": "step_time_s.median", "samples": "samples_per_hour", "tokens": "tokens_per_s.real",
    "peak": "memory_gb.allocated_peak", "energy": "energy.joules_per_1k_samples",
}  # fmt: skip
FIGURES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("median step", "step_time_s.median", units.seconds),
    ("fastest tenth of the steps, at most", "step_time_s.p10", units.seconds),
    ("slowest tenth, at least", "step_time_s.p90", units.seconds),
    ("first step", "first_step_s", units.seconds),
    ("until speed is steady", "time_to_steady_s", units.seconds),
    ("steps", "steps.total", units.count),
    ("of which steady", "steps.steady", units.count),
    ("samples per hour", "samples_per_hour", units.rate),
    ("real tokens/s", "tokens_per_s.real", units.rate),
    ("images/s", "images_per_s.images", units.rate),
    ("positions computed/s, padding included", "tokens_per_s.padded", units.rate),
    ("tokens with loss/s", "tokens_per_s.label", units.rate),
    ("GiB allocated at the peak", "memory_gb.allocated_peak", units.gibibytes),
    ("GiB reserved at the peak", "memory_gb.reserved_peak", units.gibibytes),
    ("GiB used on the device at the peak", "memory_gb.device_peak", units.gibibytes),
    ("GiB of the host's memory at the peak", "memory_gb.host_peak", units.gibibytes),
    ("model TFLOP/s", "model_tflops", lambda value: f"{value:.3g}"),
    ("MFU", "mfu", units.percent),
    ("HFU", "hfu", units.percent),
    ("MFU against the measured product rate", "mfu_measured", units.percent),
    ("GPU busy", "bound.gpu_busy", units.percent),
    ("waiting for batches", "bound.data_wait", units.percent),
    ("joules per 1,000 samples, GPU only", "energy.joules_per_1k_samples", units.rate),
    ("mean watts, GPU only", "energy.mean_watts", units.rate),
    ("idle watts", "energy.idle_watts", units.rate),
    ("loss of the first step", "loss.first", lambda value: f"{value:.4f}"),
    ("loss of the last step", "loss.last", lambda value: f"{value:.4f}"),
    ("evaluation loss", "loss.eval", lambda value: f"{value:.4f}"),
    ("parameters", "parameters.total", lambda value: units.parameters(int(value))),
    ("trained", "parameters.trainable", lambda value: units.parameters(int(value))),
    ("wall time", "phases_s.total", units.seconds),
)


def number(value: Any) -> float | None:
    """Return a finite number, or None."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None

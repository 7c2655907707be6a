"""The watts a GPU draws in training: as runs like it drew, else a share of its board power."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ftbench.core.hardware import Gpu
from ftbench.estimate.memory.estimate import Band
from ftbench.estimate.time.history import TimedRun, settings_of
from ftbench.estimate.time.speeds import Step
from ftbench.spec.experiment import Experiment

# Share of the board power that is drawn while the GPU waits, and the further share while it works without a pause:
# H200 runs of results/h200 drew 0.33 to 0.42 where Python set the pace and 0.93 to 0.99 where the GPU did.
_WAITING, _WORKING = 0.2, 0.77
_SPREAD = 1.3
_MEASURED_SPREAD, _SCALED_SPREAD = 1.05, 1.2


def watts(
    spec: Experiment, gpu: Gpu, same: Sequence[TimedRun], runs: Sequence[TimedRun], step: Step
) -> tuple[Band, str]:
    """Return the mean watts of the steady steps with their source; no more than the board may draw. `runs` are those on
    such a GPU."""
    if measured := [run.watts for run in same if run.watts]:
        return _band(statistics.median(measured), _MEASURED_SPREAD, gpu), "measured"
    own = settings_of(spec) if runs else None
    alike = [run.watts for run in runs if run.watts and run.settings == own
             and _busy(run.watts, gpu) != step.host_bound]  # fmt: skip
    if alike:
        return _band(statistics.median(alike), _SCALED_SPREAD, gpu), "from runs like it"
    share = _WAITING + _WORKING * min(1.0, step.device / step.seconds)
    return _band(gpu.watts * share, _SPREAD, gpu), f"{share:.0%} of the board's {gpu.watts:.0f} W"


def _busy(drawn: float, gpu: Gpu) -> bool:
    return drawn > 0.6 * gpu.watts


def _band(expected: float, spread: float, gpu: Gpu) -> Band:
    expected = min(expected, gpu.watts)
    return Band(expected / spread, expected, min(expected * spread, gpu.watts))

"""A run with the work that it did, and runs beside what the coefficients say of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ftbench.estimate.time.history import TimedRun
from ftbench.estimate.time.speeds import Ideal


@dataclass(frozen=True, slots=True)
class Observation:
    """A run's mean step with its work; runs of one `key` took the same step and count as one."""

    run: TimedRun
    ideal: Ideal

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.run.gpu, *self.run.key)

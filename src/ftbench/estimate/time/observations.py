"""A results store as the time estimate sees it: its runs with the work that they did, and its probes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftbench.core.hardware import Gpu
from ftbench.errors import SpecError
from ftbench.estimate.time import speeds
from ftbench.estimate.time.ceilings import limits_of
from ftbench.estimate.time.history import Known
from ftbench.estimate.time.work import step_work
from ftbench.estimate.workload.lengths import Batch
from ftbench.estimate.workload.method import trainable_shape
from ftbench.spec.experiment import Experiment


@dataclass(frozen=True, slots=True)
class Observation:
    """A run's mean step with its work; runs of one `key` took the same step and count as one."""

    run: Known
    ideal: speeds.Ideal
    samples: float  # of a step, as the estimate counts them

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.run.gpu, *self.run.key)

    @property
    def seconds(self) -> float:
        """The measured step, for as many samples as the estimate's step has: the last one of an epoch is short."""
        return self.run.step_s * self.samples / self.run.samples


def observed(run: Known, gpu: Gpu, store: Path | None) -> Observation | None:
    """None for a run of a model whose shape is not known, or in a precision of which no rate is."""
    spec, batches = run.spec, (run.batch,)
    try:
        shape = trainable_shape(spec)
        limits = limits_of(gpu, spec.train.precision, spec.optimizations.fp8 != "off", store)
    except SpecError:
        return None
    return Observation(run, speeds.ideal(step_work(spec, shape, batches), limits), per_step(spec, batches, "samples"))


def per_step(spec: Experiment, batches: Sequence[Batch], name: str) -> float:
    """The mean of a field of the micro-batches, of all micro-batches of an optimizer step."""
    passes = spec.train.gradient_accumulation_steps
    return passes * sum(batch.weight * float(getattr(batch, name)) for batch in batches)

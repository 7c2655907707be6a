"""The time half of `ftbench estimate`: of each GPU that was asked about, or why it cannot be told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ftbench.core import units
from ftbench.core.hardware import Gpu
from ftbench.errors import SpecError
from ftbench.estimate.time import duration_text
from ftbench.estimate.time.duration import DurationEstimate, epochs_samples, estimate_duration
from ftbench.estimate.time.duration_text import Question
from ftbench.estimate.time.run_index import Store
from ftbench.spec.experiment import Experiment


@dataclass(frozen=True, slots=True)
class Timed:
    """A GPU of the table with its estimate; `why` there is none."""

    name: str
    gpu: Gpu | None
    found: DurationEstimate | None
    why: str = ""


def timed(
    spec: Experiment, name: str, gpu: Gpu | float, store: Store, config: dict[str, Any] | None, gpus: int
) -> Timed:
    """`gpus` share the work; of several nothing is known yet."""
    if not isinstance(gpu, Gpu):
        return Timed(name, None, None, "how fast this GPU is is not known: name one of `ftbench list gpus` with --gpu")
    if gpus > 1:
        return Timed(name, gpu, None, "of several GPUs together it is not known how long they take")
    try:
        return Timed(name, gpu, estimate_duration(spec, gpu, store, config=config))
    except SpecError as error:
        return Timed(name, gpu, None, str(error))


def as_text(spec: Experiment, rows: Sequence[Timed], asked: Question) -> str:
    """The section of one GPU, or a line a GPU."""
    if len(rows) > 1:
        return _table(spec, rows, asked)
    only = rows[0]
    if only.gpu is None or only.found is None:
        return f"time: {only.why}"
    return duration_text.as_text(spec, only.gpu, only.found, asked).rstrip()


def _table(spec: Experiment, rows: Sequence[Timed], asked: Question) -> str:
    a_step = next((row.found.samples for row in rows if row.found), 0.0)
    samples = asked.samples or epochs_samples(spec, a_step)
    training = "" if samples is None else f"{units.count(samples)} samples"
    lines = [
        f"{'GPU':<36} {'step':>10} {'samples/h':>10} {f'in {asked.hours:g} h':>13} {training:>18} {'cost':>12}  basis"
    ]
    for row in rows:
        if row.gpu is None or row.found is None:
            lines.append(f"{row.name:<36} {row.why}")
            continue
        found = row.found
        seconds = None if samples is None else found.seconds_for(samples)
        cost = None if seconds is None else duration_text.cost_of(row.gpu, found, seconds, asked.prices)
        cells = (
            f"{row.name:<36} {units.seconds(found.step_s.expected):>10} {units.count(found.samples_per_hour):>10}",
            f"{units.count(found.samples_in(3600 * asked.hours).expected):>13}",
            f"{units.seconds(seconds.expected) if seconds else '':>18}",
            f"{'' if cost is None else str(cost):>12}  {found.basis}",
        )
        lines.append(" ".join(cells))
    return "\n".join(lines)


def as_documents(spec: Experiment, rows: Sequence[Timed], asked: Question) -> list[dict[str, Any]]:
    """For --json, in the order of the rows; `why` where there is no estimate."""
    return [
        {"why": row.why} if row.gpu is None or row.found is None
        else duration_text.as_record(spec, row.gpu, row.found, asked)
        for row in rows
    ]  # fmt: skip

"""What `--dry-run` says: every job with where it stands, the command that makes it, and what it is expected to take."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ftbench.core.units import gibibytes, seconds
from ftbench.estimate import preflight
from ftbench.estimate.memory.estimate import MemoryEstimate
from ftbench.estimate.time.duration import SHEET, epochs_samples
from ftbench.estimate.time.run_index import Store
from ftbench.spec.experiment import Experiment
from ftbench.sweep.command import Ready
from ftbench.sweep.jobs import Job, Standing, command
from ftbench.sweep.plan import frontier
from ftbench.sweep.plan.search import Search, trial_of

# Of a training, what its memory does not depend on.
_LEARNING = ("learning_rate", "lr_scheduler", "warmup_steps", "weight_decay", "seed", "report_to")


@dataclass(frozen=True, slots=True)
class Planned:
    """One line: at most `seconds` (of earlier runs of this sweep) or `estimated_s` with how sure that is, the GiB
    needed, the command."""

    what: str
    state: str
    reason: str | None
    seconds: float | None = None
    peak_gb: float | None = None
    verdict: str | None = None
    estimated_s: float | None = None
    confidence: str | None = None
    command: list[str] = field(default_factory=list)


def dry_run(ready: Ready) -> list[Planned]:
    """Return every job with where it stands and the command that makes it; of a search the first trials."""
    plan = ready.plan
    if isinstance(plan, Search):
        while plan.next(lambda job: True) is not None:
            pass
    trials: dict[str, list[frontier.Trial]] = {}
    for job, standing in plan.standings.items():
        if standing.state == "ok":
            trials.setdefault(job.family, []).append(trial_of(job, standing))
    store, known = Store.read(ready.request.out) if ready.device else Store(), dict[Any, MemoryEstimate | None]()
    lines = [_planned(ready, store, job, standing, trials.get(job.family, []), known)
             for job, standing in plan.standings.items()]  # fmt: skip
    return lines + [Planned(cell, "impossible", reason) for cell, reason in ready.impossible]


def _planned(
    ready: Ready, store: Store, job: Job, standing: Standing, trials: Sequence[frontier.Trial],
    known: dict[Any, MemoryEstimate | None],
) -> Planned:  # fmt: skip
    peak = frontier.peak_on_the_line(trials, job.spec.train.batch_size)
    expected = verdict = estimated = confidence = None
    if not standing.done:
        expected = ready.plan.wall_times.at_most_s(job)
        if memory := _memory(job.spec, ready, known):
            verdict, peak = memory.verdict, memory.reserved.expected if peak is None else peak
        if expected is None:
            estimated, confidence = _estimated(job.spec, ready, store)
    state = "pending" if standing.state == "running" else standing.state
    return Planned(
        job.what, state, standing.reason, expected, peak, verdict, estimated, confidence,
        command(ready.request.spec, job, ready.request.out),
    )  # fmt: skip


def _memory(spec: Experiment, ready: Ready, known: dict[Any, MemoryEstimate | None]) -> MemoryEstimate | None:
    """Return the estimate on this machine; `known` keeps it for cells that differ in how they learn alone and share
    their sections."""
    sections = (spec.model, spec.method, spec.dataset, spec.optimizations, spec.measure, spec.launch)
    key = (*map(id, sections), *(value for name, value in spec.train if name not in _LEARNING))
    if key not in known:
        known[key] = preflight.on_machine(spec, ready.device, ready.request.out)
    return known[key]


def _estimated(spec: Experiment, ready: Ready, store: Store) -> tuple[float | None, str | None]:
    """Return wall seconds and how they are known; nothing by the data sheet alone, which would be a guess in a plan."""
    time = preflight.time_on_machine(spec, ready.device, store)
    if time is None or time.basis == SHEET or (samples := epochs_samples(spec, time.samples)) is None:
        return None, None
    return time.seconds_for(samples).expected, time.confidence


def as_text(lines: Sequence[Planned]) -> str:
    """Return the lines of --dry-run for people."""
    text = []
    for line in lines:
        duration = f"at most {seconds(line.seconds)}" if line.seconds else ""
        if line.estimated_s:
            duration = f"about {seconds(line.estimated_s)} ({line.confidence})"
        memory = f"{gibibytes(line.peak_gb)} GiB" if line.peak_gb else ""
        verdict = line.verdict if line.verdict != "fits" else None
        details = ", ".join(part for part in (line.reason, duration, memory, verdict) if part)
        text.append(f"{line.state:<10} {line.what}" + (f": {details}" if details else ""))
        if line.command:
            text.append(f"           {shlex.join(line.command)}")
    return "\n".join(text)

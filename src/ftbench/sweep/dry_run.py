"""`--dry-run`: list all jobs of a plan with status, command, and expected time, memory and energy."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ftbench.core.table import folded_command, wrapped
from ftbench.core.units import JOULES_PER_KWH, gibibytes, seconds, some
from ftbench.sweep.plan.base import Job, JobStatus, run_command
from ftbench.sweep.plan.search import Search
from ftbench.sweep.sweep import Ready


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """One job of `--dry-run`. `seconds` is a prediction if `confidence` is set, and an upper bound otherwise."""

    what: str
    state: str
    reason: str | None
    seconds: float | None = None
    confidence: str | None = None
    peak_gb: float | None = None
    verdict: str | None = None
    joules: float | None = None
    command: list[str] = field(default_factory=list)


def dry_run(ready: Ready) -> list[PlannedJob]:
    """Return all jobs of a plan. For `--until-oom`, return the finished trials and the next trial of each cell."""
    from ftbench.estimate import api

    plan = ready.plan
    if isinstance(plan, Search):
        while plan.next(lambda job: True) is not None:
            pass
    predictor = api.Predictor(ready.device, ready.request.out) if ready.device else None
    lines = [_planned(ready, predictor, job, status) for job, status in plan.statuses.items()]
    return lines + [PlannedJob(cell, "impossible", reason) for cell, reason in ready.impossible]


def _planned(ready: Ready, predictor: Any, job: Job, status: JobStatus) -> PlannedJob:
    state = "pending" if status.state == "running" else status.state
    command = run_command(ready.request.spec, job, ready.request.out) if ready.plan.has_commands else []
    planned = PlannedJob(job.what, state, status.reason, command=command)
    if status.done:
        return planned
    planned = replace(planned, seconds=ready.plan.wall_times.at_most_s(job))
    if predictor is None:
        return planned
    memory, time, wall_s = predictor.predict(job.spec)
    if planned.seconds is None and wall_s is not None:
        planned = replace(planned, seconds=wall_s, confidence=time.confidence)
    if time and planned.seconds:
        planned = replace(planned, joules=planned.seconds * time.gpus * time.watts.expected)
    return replace(planned, peak_gb=memory.reserved.expected, verdict=memory.verdict) if memory else planned


def as_text(lines: Sequence[PlannedJob], ready: Ready | None = None) -> str:
    """Return the jobs as text, followed by the total time and energy of the pending runs."""
    text = []
    for line in lines:
        sure = ("at most", "") if line.confidence is None else ("about", f" ({line.confidence})")
        duration = f"{sure[0]} {seconds(line.seconds)}{sure[1]}" if line.seconds else ""
        memory = f"{gibibytes(line.peak_gb)} GiB" if line.peak_gb else ""
        verdict = line.verdict if line.verdict != "fits" else None
        details = ", ".join(part for part in (line.reason, duration, memory, verdict) if part)
        text.append(wrapped(f"{line.state:<10} {line.what}" + (f": {details}" if details else ""), 11))
        if line.command:
            text.append(folded_command(shlex.join(line.command), 11))
    return "\n".join([*text, *_totals([line for line in lines if line.state == "pending"], ready)])


def known_total(ready: Ready) -> str | None:
    """Return the number and total time of the pending runs as text. Return None for `--until-oom` or without runs."""
    if isinstance(ready.plan, Search):
        return None
    pending = [line for line in dry_run(ready) if line.state == "pending"]
    return _totals(pending, ready)[0].strip() if pending else None


def _totals(pending: Sequence[PlannedJob], ready: Ready | None) -> list[str]:
    """Return the line `total: ...`, with the number of pending runs and their total time and energy."""
    lasting = [line.seconds for line in pending if line.seconds]
    energies = [line.joules for line in pending if line.joules is not None]
    if not pending:
        return []
    if not lasting:
        why = "no formula or run covers these cells" if ready and ready.device else "formulas need a GPU"
        return ["\n" + wrapped(f"total: {some(len(pending), 'run')}; time unknown until the first run ends: {why}")]
    slots = min(len(ready.slots), len(pending)) if ready else 1
    total, joules = sum(lasting), sum(energies)
    parts = [some(len(pending), "run"), f"about {seconds(max(total / slots, *lasting))}"]
    parts += [f"{slots} at a time"] if slots > 1 else []
    parts += [f"{joules / JOULES_PER_KWH:.3g} kWh of the GPU"] if energies else []
    parts += [f"times known for {len(lasting)} of {len(pending)} runs"] if len(lasting) < len(pending) else []
    return ["\n" + wrapped("total: " + ", ".join(parts))]
